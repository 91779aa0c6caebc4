"""Rows for the decoding loop, and a model that says what a test tells it to."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.decoding import loop
from mars_jax.decoding.loop import insert, prefill
from mars_jax.decoding.settings import SCORES, SOURCES, Adjustment, Sampling, Settings, Vocabulary
from mars_jax.decoding.state import FINISH_REASONS, empty_state

MANY = 10_000


def prefilled(network, weights, cache, tokens_BT, count_B, start: int = 0):
    """The cache with these rows' next tokens, `count` of them from slot `start` on."""
    rows = np.arange(len(tokens_BT), dtype=np.int32)
    return prefill(network, weights, cache, rows, np.asarray(tokens_BT), np.full_like(rows, start), np.asarray(count_B))


def rows(network, weights, plan, prompts, capacity: int, vocab_size: int = 1, **options):
    """A state and settings whose rows hold these prompts, prefilled up to their last tokens."""
    length = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache, cursor = None, np.zeros_like(length)
    if plan.cache != "recompute":
        cursor = length - 1
        cache = prefilled(network, weights, network.init_cache(len(prompts), capacity), tokens, cursor)
    state = empty_state(plan, cache, len(prompts), capacity, vocab_size)
    own = settings(plan, prompts, capacity, **options)
    given = jax.tree.map(jnp.zeros_like, own)
    for i in range(len(prompts)):
        row_settings = jax.tree.map(lambda a, i=i: a[i], own)
        state, given = insert(plan, state, given, i, tokens[i], length[i], cursor[i], row_settings)
    return state, given


def settings(plan, prompts, capacity, stop=(), **changes) -> Settings:
    """The same settings for all rows unless a value is a list."""
    batch = len(prompts)
    dtypes = {
        "width": np.int32, "exact": bool, "source": np.int32, "beside": bool, "tau": np.float32, "score": np.int32,
        "gate_first": bool, "max_new_tokens": np.int32, "temperature": np.float32, "top_k": np.int32,
        "top_p": np.float32, "min_p": np.float32, "seed": np.uint32, "repetition": np.float32,
        "presence": np.float32, "frequency": np.float32, "min_new_tokens": np.int32,
    }  # fmt: skip
    defaults = {
        "width": max(plan.masks, plan.drafts), "exact": plan.drafts > 0, "source": plan.sources[0],
        "beside": plan.found, "tau": 0.9, "score": "probability",
        "gate_first": False, "max_new_tokens": capacity, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "seed": 0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0, "min_new_tokens": 0,
    }  # fmt: skip
    bias = changes.pop("bias", {})
    values = defaults | changes
    values["score"] = SCORES.index(values["score"])
    names = [values["source"]] if isinstance(values["source"], str) else values["source"]
    values["source"] = [SOURCES.index(name) if name in SOURCES else 0 for name in names]
    columns = {
        name: jnp.array(np.broadcast_to(np.array(value, dtypes[name]), (batch,))) for name, value in values.items()
    }
    length = jnp.array([len(p) for p in prompts], jnp.int32)

    def repeated(row, dtype):
        return jnp.array([list(row)] * batch, dtype)

    return Settings(
        **{name: columns[name] for name in ("width", "exact", "source", "beside", "tau", "score", "gate_first")},
        limit=jnp.minimum(length + columns["max_new_tokens"], capacity),
        stop=repeated(stop or [-1], jnp.int32),
        sampling=Sampling(**{name: columns[name] for name in Sampling._fields}),
        adjustment=Adjustment(
            **{name: columns[name] for name in ("repetition", "presence", "frequency")},
            bias_ids=repeated(bias or [-1], jnp.int32),
            bias=repeated(bias.values() or [0.0], jnp.float32),
            min_length=length + columns["min_new_tokens"],
        ),
    )


def decode(network, plan, weights, vocabulary, settings, state, steps: int = MANY):
    """The state after that many steps, or all."""
    return loop.decode(network, plan, weights, vocabulary, settings, state, np.int32(steps), np.bool_(False))[0]


def results(state, prompts) -> list[tuple[list[int], list[int], str | None]]:
    """`(token_ids, accepted, finish_reason)` of each row."""
    state = jax.device_get(state._replace(cache=None))
    found = []
    for row, prompt in enumerate(prompts):
        new = slice(len(prompt), int(state.length[row]))
        accepted = np.bincount(state.forward[row, new]).tolist()
        found.append((state.tokens[row, new].tolist(), accepted, FINISH_REASONS[state.finish[row]]))
    return found


def run(network, weights, plan, vocabulary, prompts, capacity=128, **options):
    """Decode prompts to the end; `results` of every row."""
    state, given = rows(network, weights, plan, prompts, capacity, len(vocabulary.emit), **options)
    return results(decode(network, plan, weights, vocabulary, given, state), prompts)


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

    def write(self, cache, kv, row_B, cursor_B, count_B):
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


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of one position in plain numpy: sort, cut, renormalise."""
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= max(top_p, 1e-9)]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()
