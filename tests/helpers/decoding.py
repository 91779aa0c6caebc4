"""Rows for the decoding loop, and a model that says what a test tells it to."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.decoding.loop import decode, prefill, start
from mars_jax.decoding.settings import SCORES, Settings, Vocabulary
from mars_jax.decoding.state import FINISH_REASONS, empty_state

MANY = jnp.int32(10_000)


def rows(network, params, plan, prompts, capacity: int):
    """A state whose rows hold these prompts, prefilled up to their last tokens."""
    length = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache, cursor = None, np.zeros_like(length)
    if plan.cache != "recompute":
        cursor = length - 1
        cache = network.init_cache(len(prompts), capacity)
        cache = prefill(network, params, cache, tokens, np.zeros_like(length), cursor)
    state = empty_state(cache, len(prompts), capacity, plan.drafts)
    return start(state, *map(jnp.array, (tokens, length, cursor, np.ones_like(length, bool))))


def settings(plan, prompts, capacity, stop=(), **changes) -> Settings:
    """The same settings for all rows unless a value is a list."""
    batch = len(prompts)
    values = {
        "width": plan.masks,
        "exact": plan.drafts > 0,
        "tau": 0.9,
        "score": "probability",
        "gate_first": False,
        "max_new_tokens": capacity,
    } | changes
    values["score"] = SCORES.index(values["score"])
    rows = {k: np.array(v if isinstance(v, list) else [v] * batch) for k, v in values.items()}
    new = rows.pop("max_new_tokens")
    dtypes = {"width": np.int32, "exact": bool, "tau": np.float32, "score": np.int32, "gate_first": bool}
    return Settings(
        **{k: jnp.array(v.astype(dtypes[k])) for k, v in rows.items()},
        limit=jnp.array(np.minimum(np.array([len(p) for p in prompts]) + new, capacity), jnp.int32),
        stop=jnp.array([list(stop) or [-1]] * batch, jnp.int32),
    )


def results(state, prompts) -> list[tuple[list[int], list[int], str | None]]:
    """`(token_ids, accepted, finish_reason)` of each row."""
    state = jax.device_get(state._replace(cache=None))
    found = []
    for row, prompt in enumerate(prompts):
        new = slice(len(prompt), int(state.length[row]))
        accepted = np.bincount(state.forward[row, new]).tolist()
        found.append((state.tokens[row, new].tolist(), accepted, FINISH_REASONS[state.finish[row]]))
    return found


def run(network, params, plan, vocabulary, prompts, capacity=128, **options):
    """Decode prompts to the end; `results` of every row."""
    state = rows(network, params, plan, prompts, capacity)
    state = decode(network, plan, params, vocabulary, settings(plan, prompts, capacity, **options), state, MANY)
    return results(state, prompts)


@dataclass(frozen=True)
class ScriptedNetwork:
    """Logits come from tables, by position: `params = (after_NV, ahead_NWV)`.

    after_NV:  logits after the token at a position.
    ahead_NWV: logits of the j-th placeholder of a group that stands after N tokens.
    """

    def init_cache(self, batch, slots):
        return ()

    def forward(self, params, tokens_BT, visibility, cache, cursor_B):
        hidden = [visibility.position, visibility.group, visibility.limit, visibility.order]
        return jnp.stack(hidden, axis=-1), ()

    def write(self, cache, kv, cursor_B, count_B):
        return cache

    def logits(self, params, hidden):
        after_NV, ahead_NWV = params
        position, group, limit, order = (hidden[..., i] for i in range(4))
        clip = {"mode": "clip"}
        after = after_NV.at[position].get(**clip)
        if not ahead_NWV.shape[1]:
            return after
        return jnp.where((group == 0)[..., None], after, ahead_NWV.at[limit, order].get(**clip))


def vocabulary(size: int, never=()) -> Vocabulary:
    return Vocabulary(jnp.array([i not in never for i in range(size)]), jnp.int32(0))


def peaked(tokens, probability, size: int) -> np.ndarray:
    """Float32 logits that give each token its probability and share the rest equally. `[*tokens.shape, V]`."""
    tokens, probability = np.asarray(tokens), np.asarray(probability, np.float64)
    rest = (1 - probability) / (size - 1)
    p = np.broadcast_to(rest[..., None], (*tokens.shape, size)).copy()
    np.put_along_axis(p, tokens[..., None], probability[..., None], axis=-1)
    return np.log(np.maximum(p, 1e-30)).astype(np.float32)
