"""One decoding step: forward, confirm drafts, choose, trust or keep new candidates, cut, commit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.decoding.acceptance import cut, finish, leading, passes
from mars_jax.decoding.layout import step_layout
from mars_jax.decoding.network import Network
from mars_jax.decoding.plan import Plan
from mars_jax.decoding.settings import Settings, Vocabulary
from mars_jax.decoding.state import DecodeState

# Finite, so that softmax differences never make NaN.
NEVER = -1e30


class Proposals(NamedTuple):
    """Logits of one forward. next: `[B, X, V]` after the root and each draft. ahead: `[B, S, W, V]` of placeholders."""

    next: jax.Array
    ahead: jax.Array


def _at(array_BX: jax.Array, index_B: jax.Array) -> jax.Array:
    """`array[b, index[b]]` for arrays `[B, X, ...]`."""
    return jnp.take_along_axis(array_BX, index_B.reshape(-1, *[1] * (array_BX.ndim - 1)), axis=1)[:, 0]


def _propose(network: Network, plan: Plan, params, vocabulary: Vocabulary, settings, state):
    """Forward the step's tokens; logits only where they are needed. Returns `(proposals, kv)`."""
    layout = step_layout(plan, vocabulary, settings, state)
    cache = None if plan.cache == "recompute" else state.cache
    hidden_BTD, kv = network.forward(params, layout.tokens, layout.visibility, cache, state.cursor)
    batch = hidden_BTD.shape[0]
    next_BX = jnp.minimum(state.pending[:, None] - 1 + jnp.arange(plan.drafts + 1)[None], plan.real - 1)
    next_BXD = jnp.take_along_axis(hidden_BTD, next_BX[..., None], axis=1)
    logits = network.logits(params, jnp.concatenate([next_BXD, hidden_BTD[:, plan.real :]], axis=1))
    logits = jnp.where(vocabulary.emit[None, None], logits, NEVER)
    ahead = logits[:, plan.drafts + 1 :].reshape(batch, plan.stops, plan.masks, logits.shape[-1])
    return Proposals(logits[:, : plan.drafts + 1], ahead), kv


def _assemble(plan: Plan, drafts_BK, confirmed_B, first_B, candidates_BW) -> jax.Array:
    """Runs `[B, M]`: confirmed drafts, the first new token, candidates."""
    batch = first_B.shape[0]
    index_BM = jnp.broadcast_to(jnp.arange(plan.run), (batch, plan.run))
    after_BM = index_BM - confirmed_B[:, None]
    run_BM = jnp.broadcast_to(first_B[:, None], (batch, plan.run))
    if plan.drafts:
        run_BM = jnp.where(after_BM < 0, jnp.take_along_axis(drafts_BK, index_BM, axis=1, mode="clip"), run_BM)
    if plan.masks:
        run_BM = jnp.where(after_BM > 0, jnp.take_along_axis(candidates_BW, after_BM - 1, axis=1, mode="clip"), run_BM)
    return run_BM


def _trusted(settings: Settings, offered_B, logits_BXV, tokens_BX) -> jax.Array:
    """How many candidates are taken on their score alone; `tokens_BX` are the first new token and the candidates."""
    passes_BX = passes(logits_BXV, tokens_BX, settings)
    offered_BW = jnp.arange(tokens_BX.shape[1] - 1)[None] < offered_B[:, None]
    trusted_B = leading(passes_BX[:, 1:] & offered_BW)
    gated_B = settings.exact | (settings.gate_first & ~passes_BX[:, 0])
    return jnp.where(gated_B, 0, trusted_B)


class Stride(NamedTuple):
    """How far rows go, each `[B]`. moving: bool. end: int32, no run passes it. keep: bool, keep keys and values."""

    moving: jax.Array
    end: jax.Array
    keep: jax.Array


def _stride(plan: Plan, settings: Settings, state: DecodeState) -> Stride:
    running_B = state.running
    if plan.cache != "block":
        return Stride(running_B, settings.limit, running_B & (plan.cache == "cursor"))
    # A row sleeps at the end of its block until every running row has reached its own; then all blocks join the prefix.
    size = plan.real - 1
    end_B = state.cursor + 1 + size
    awake_B = running_B & (state.length < end_B)
    freeze = ~awake_B.any()
    end_B = jnp.where(freeze, end_B + size, end_B)
    return Stride(jnp.where(freeze, running_B, awake_B), jnp.minimum(end_B, settings.limit), running_B & freeze)


def step(
    network: Network, plan: Plan, params, vocabulary: Vocabulary, settings: Settings, state: DecodeState
) -> DecodeState:
    """Advance every running row by one forward."""
    proposals, kv = _propose(network, plan, params, vocabulary, settings, state)

    choice_BX = jnp.argmax(proposals.next, axis=-1)
    exists_BK = jnp.arange(plan.drafts)[None] < state.num_drafts[:, None]
    confirmed_B = leading(exists_BK & (state.drafts[:, : plan.drafts] == choice_BX[:, : plan.drafts]))
    first_B = _at(choice_BX, confirmed_B)

    # The placeholders right after the last confirmed token; a chain has them only where every draft stood.
    group_B = confirmed_B if plan.branched else jnp.zeros_like(confirmed_B)
    at_hand_B = plan.branched | (confirmed_B == state.num_drafts)
    offered_B = jnp.where(at_hand_B, jnp.minimum(settings.width, plan.masks), 0)
    ahead_BWV = _at(proposals.ahead, group_B)
    candidates_BW = jnp.argmax(ahead_BWV, axis=-1)

    new_logits_BXV = jnp.concatenate([_at(proposals.next, confirmed_B)[:, None], ahead_BWV], axis=1)
    new_tokens_BX = jnp.concatenate([first_B[:, None], candidates_BW], axis=1)
    trusted_B = _trusted(settings, offered_B, new_logits_BXV, new_tokens_BX)
    run_BM = _assemble(plan, state.drafts, confirmed_B, first_B, candidates_BW)

    # Commit, up to the first end.
    stride = _stride(plan, settings, state)
    room_B = stride.end - state.length
    count_B, stopped_B = cut(run_BM, confirmed_B + 1 + trusted_B, room_B, settings.stop)
    count_B = jnp.where(stride.moving, count_B, 0)
    length_B = state.length + count_B
    state = _append(state, run_BM, count_B)

    # Keep the keys and values of real tokens: those that were pending but, in a block, its last; and confirmed drafts.
    kept_B = state.pending - (plan.cache == "block") + confirmed_B
    kept_B = jnp.where(stride.keep, jnp.minimum(kept_B, length_B - state.cursor), 0)
    cache = state.cache
    if plan.cache != "recompute":
        cache = network.write(cache, jax.tree.map(lambda a: a[:, : plan.real], kv), state.cursor, kept_B)

    drafts = {}
    if plan.drafts:
        drafts = {"drafts": candidates_BW, "num_drafts": jnp.where(settings.exact, offered_B, 0)}
    return state._replace(
        cache=cache,
        length=length_B,
        cursor=state.cursor + kept_B,
        forwards=state.forwards + stride.moving,
        finish=jnp.where(stride.moving, finish(stopped_B, length_B, settings.limit), state.finish),
        **drafts,
    )


def _append(state: DecodeState, run_BM: jax.Array, count_B: jax.Array) -> DecodeState:
    """Write each row's first `count` tokens of its run after its committed ones."""
    batch, width = run_BM.shape
    index_BM = jnp.broadcast_to(jnp.arange(width), (batch, width))
    row_BM = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, width))
    capacity = state.tokens.shape[1]
    slot_BM = jnp.where(index_BM < count_B[:, None], state.length[:, None] + index_BM, capacity)
    forward_BM = jnp.broadcast_to(state.forwards[:, None], (batch, width))
    return state._replace(
        tokens=state.tokens.at[row_BM, slot_BM].set(run_BM, mode="drop"),
        forward=state.forward.at[row_BM, slot_BM].set(forward_BM, mode="drop"),
    )
