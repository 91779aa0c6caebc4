"""One decoding step: forward, check drafts, choose, trust or keep candidates, cut, commit.

All modes are this one, but block diffusion (`decoding.diffusion`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.decoding import drafts as sources
from mars_jax.decoding.acceptance import cut, finish, leading, passes
from mars_jax.decoding.choice import Ahead, Checked, at, check, look_ahead
from mars_jax.decoding.drafts import Drafts
from mars_jax.decoding.layout import step_layout
from mars_jax.decoding.logprobs import Logprobs, of_run
from mars_jax.decoding.network import Network
from mars_jax.decoding.penalties import Context, committed
from mars_jax.decoding.plan import Plan
from mars_jax.decoding.sampling import Purpose, uniforms
from mars_jax.decoding.settings import Settings, Vocabulary
from mars_jax.decoding.state import NEVER, DecodeState


def step(
    network: Network, plan: Plan, params, vocabulary: Vocabulary, settings: Settings, state: DecodeState
) -> DecodeState:
    """Advance every running row by one forward."""
    own, found = _forward(network, plan, params, vocabulary, settings, state)
    context = committed(state, vocabulary.emit.shape[0]) if plan.adjusted else None
    branch = _checked(plan, settings, state, own, context)
    if plan.found:
        state, branch = _longer(plan, settings, state, branch, found, context)
    checked = branch.checked
    at_hand_B = jnp.where(branch.at_hand, jnp.minimum(settings.width, plan.masks), 0)
    ahead = look_ahead(plan, settings, state, branch.ahead, checked, context)

    trusted_B = _trusted(settings, at_hand_B, checked, ahead) if plan.masks else jnp.zeros_like(at_hand_B)
    run_BM = _assemble(plan, state.drafts.tokens, checked, ahead)
    recorded = None
    if plan.logprobs is not None:
        recorded = of_run(branch.next, branch.ahead, checked.confirmed, run_BM, plan.logprobs)
    state = _commit(network, plan, settings, state, branch.kv, run_BM, checked.confirmed, trusted_B, recorded)
    if plan.drafts:
        state = state._replace(drafts=_next_drafts(plan, settings, state, checked, ahead, at_hand_B))
    return state


class Offered(NamedTuple):
    """What one forward gives for one chain of drafts.

    next: `[B, X, V]`, logits after the root and each draft. ahead: `[B, S, W, V]`, of placeholders.
    kv:   keys and values of the real tokens.
    """

    next: jax.Array
    ahead: jax.Array
    kv: Any


def _forward(
    network: Network, plan: Plan, params, vocabulary: Vocabulary, settings, state
) -> tuple[Offered, Offered | None]:
    """Forward the step's tokens; logits only where they are needed. The second is of drafts that lookup found."""
    layout = step_layout(plan, vocabulary, settings, state)
    cache = None if plan.cache == "recompute" else state.cache
    hidden_BTD, kv = network.forward(params, layout.tokens, layout.visibility, cache, state.cursor)
    batch = hidden_BTD.shape[0]
    next_BX = jnp.minimum(state.pending[:, None] - 1 + jnp.arange(plan.drafts + 1)[None], plan.real - 1)
    next_BXD = jnp.take_along_axis(hidden_BTD, next_BX[..., None], axis=1)
    logits = network.logits(params, jnp.concatenate([next_BXD, hidden_BTD[:, plan.real :]], axis=1))
    logits = jnp.where(vocabulary.emit[None, None], logits, NEVER)
    sizes = [plan.drafts + 1, plan.stops * plan.masks, plan.drafts * plan.found]
    after, ahead, after_found, ahead_found = jnp.split(logits, np.cumsum(sizes), axis=1)
    ahead = ahead.reshape(batch, plan.stops, plan.masks, logits.shape[-1])
    own = Offered(after, ahead, jax.tree.map(lambda a: a[:, : plan.real], kv))
    if not plan.found:
        return own, None
    places = [0, *range(plan.tokens - plan.drafts - plan.masks, plan.tokens - plan.masks)]
    after = jnp.concatenate([after[:, :1], after_found], axis=1)
    return own, Offered(after, ahead_found[:, None], jax.tree.map(lambda a: a[:, np.array(places)], kv))


class Branch(NamedTuple):
    """One chain of drafts, checked. next, kv: as in `Offered`.

    ahead:   `[B, W, V]`, logits of the placeholders right after the last draft that stands.
    at_hand: bool `[B]`, whether there are such placeholders.
    """

    next: jax.Array
    kv: Any
    checked: Checked
    ahead: jax.Array
    at_hand: jax.Array


def _checked(plan: Plan, settings: Settings, state: DecodeState, offered: Offered, context: Context | None) -> Branch:
    checked = check(plan, settings, state, offered.next, context)
    if offered.ahead.shape[1] > 1:
        return Branch(
            offered.next, offered.kv, checked, at(offered.ahead, checked.confirmed), jnp.ones_like(state.running)
        )
    # Placeholders after the last draft only: they are at hand where every draft stood.
    return Branch(offered.next, offered.kv, checked, offered.ahead[:, 0], checked.confirmed == state.drafts.count)


def _longer(plan: Plan, settings: Settings, state: DecodeState, branch: Branch, offered: Offered, context):
    """`(state, branch)` with the drafts of lookup and what became of them, in rows where more of them stand."""
    drafts, found = state.drafts._replace(found=None), state.drafts.found
    other = _checked(plan, settings, state._replace(drafts=found), offered, context)
    longer_B = other.checked.confirmed > branch.checked.confirmed
    if drafts.q is not None:
        found = found._replace(q=found.distributions(drafts.q.shape[-1]))
    drafts, branch = sources.chosen(longer_B, (found, other), (drafts, branch))
    return state._replace(drafts=drafts), branch


def _trusted(settings: Settings, at_hand_B: jax.Array, checked: Checked, ahead: Ahead) -> jax.Array:
    """How many candidates are taken on their score alone."""
    first_B1V = at(checked.logits, checked.confirmed)[:, None]
    logits_BXV = jnp.concatenate([first_B1V, ahead.logits], axis=1)
    tokens_BX = jnp.concatenate([checked.first[:, None], ahead.tokens], axis=1)
    # Where all rows check their candidates, nobody's score is looked at.
    passes_BX = jax.lax.cond(
        settings.exact.all(),
        lambda: jnp.zeros(tokens_BX.shape, bool),
        lambda: passes(logits_BXV, tokens_BX, settings),
    )
    at_hand_BW = jnp.arange(ahead.tokens.shape[1])[None] < at_hand_B[:, None]
    trusted_B = leading(passes_BX[:, 1:] & at_hand_BW)
    gated_B = settings.exact | (settings.gate_first & ~passes_BX[:, 0])
    return jnp.where(gated_B, 0, trusted_B)


def _assemble(plan: Plan, drafts_BK: jax.Array, checked: Checked, ahead: Ahead) -> jax.Array:
    """Runs `[B, M]`: confirmed drafts, the first new token, candidates."""
    batch = drafts_BK.shape[0]
    index_BM = jnp.broadcast_to(jnp.arange(plan.run), (batch, plan.run))
    after_BM = index_BM - checked.confirmed[:, None]
    run_BM = jnp.broadcast_to(checked.first[:, None], (batch, plan.run))
    if plan.drafts:
        run_BM = jnp.where(after_BM < 0, jnp.take_along_axis(drafts_BK, index_BM, axis=1, mode="clip"), run_BM)
    if plan.masks:
        run_BM = jnp.where(after_BM > 0, jnp.take_along_axis(ahead.tokens, after_BM - 1, axis=1, mode="clip"), run_BM)
    return run_BM


def _next_drafts(plan: Plan, settings: Settings, state, checked: Checked, ahead: Ahead, at_hand_B) -> Drafts:
    """Drafts for the next forward; `state` holds the run already."""
    by_source = {}
    if "masks" in plan.sources:
        count_B = jnp.where(settings.exact, jnp.minimum(at_hand_B, plan.drafts), 0)
        tokens_BK, q = jax.tree.map(lambda a: _resized(a, plan.drafts), (ahead.tokens, ahead.q))
        by_source["masks"] = Drafts(tokens_BK, count_B, q)
    if "lookup" in plan.sources or plan.found:
        by_source["lookup"] = sources.lookup(state.tokens, state.length, settings.width, plan.drafts)
    if "jacobi" in plan.sources:
        u_BK = uniforms(settings.sampling.seed, state.forwards, Purpose.GUESS, plan.drafts)
        guess_BK = sources.guesses(u_BK, state.tokens, state.length)
        by_source["jacobi"] = sources.jacobi(checked.likeliest, checked.confirmed, guess_BK, settings.width)
    return sources.of_rows(by_source, plan, settings)


def _resized(array_BX: jax.Array, size: int) -> jax.Array:
    """The first `size` entries along axis 1, zeros where there are fewer."""
    missing = max(0, size - array_BX.shape[1])
    return jnp.pad(array_BX[:, :size], [(0, 0), (0, missing)] + [(0, 0)] * (array_BX.ndim - 2))


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


def _commit(
    network: Network, plan: Plan, settings: Settings, state, kv, run_BM, confirmed_B, trusted_B, recorded
) -> DecodeState:
    """Append each row's run up to its first end, and keep the keys and values of its tokens that are real."""
    stride = _stride(plan, settings, state)
    count_B, stopped_B = cut(run_BM, confirmed_B + 1 + trusted_B, stride.end - state.length, settings.stop)
    count_B = jnp.where(stride.moving, count_B, 0)
    length_B = state.length + count_B

    # Those that were pending (but, in a block, the last) and the confirmed drafts.
    kept_B = state.pending - (plan.cache == "block") + confirmed_B
    kept_B = jnp.where(stride.keep, jnp.minimum(kept_B, length_B - state.cursor), 0)
    cache = state.cache
    if plan.cache != "recompute":
        cache = network.write(cache, kv, jnp.arange(kept_B.shape[0]), state.cursor, kept_B)
    forward_BM = jnp.broadcast_to(state.forwards[:, None], run_BM.shape)
    return append(state, run_BM, forward_BM, count_B, recorded)._replace(
        cache=cache,
        length=length_B,
        cursor=state.cursor + kept_B,
        forwards=state.forwards + stride.moving,
        finish=jnp.where(stride.moving, finish(stopped_B, length_B, settings.limit), state.finish),
    )


def append(state: DecodeState, run_BM, forward_BM, count_B: jax.Array, recorded: Logprobs | None) -> DecodeState:
    """Write each row's first `count` tokens of its run, and what is recorded of them, after its committed ones."""
    batch, width = run_BM.shape
    index_BM = jnp.broadcast_to(jnp.arange(width), (batch, width))
    row_BM = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, width))
    capacity = state.tokens.shape[1]
    slot_BM = jnp.where(index_BM < count_B[:, None], state.length[:, None] + index_BM, capacity)

    def put(array, new):
        return array.at[row_BM, slot_BM].set(new, mode="drop")

    return state._replace(
        tokens=put(state.tokens, run_BM),
        forward=put(state.forward, forward_BM),
        logprobs=jax.tree.map(put, state.logprobs, recorded),
    )
