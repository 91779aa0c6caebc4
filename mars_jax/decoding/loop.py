"""What runs on the device: prefill, insert, evict, and the decoding loop, one `lax.while_loop` over `step`."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.decoding import diffusion
from mars_jax.decoding import drafts as sources
from mars_jax.decoding.drafts import Drafts
from mars_jax.decoding.logprobs import Logprobs
from mars_jax.decoding.network import Network
from mars_jax.decoding.plan import Plan
from mars_jax.decoding.sampling import Purpose, uniforms
from mars_jax.decoding.settings import Settings, Vocabulary
from mars_jax.decoding.state import LENGTH, RUNNING, DecodeState, no_drafts
from mars_jax.decoding.step import step
from mars_jax.objective.visibility import public


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def prefill(network: Network, weights, cache, row_B: jax.Array, tokens_BT, cursor_B: jax.Array, count_B: jax.Array):
    """The cache after the first `count` tokens of `tokens_BT` were added to these rows, from their cursors on.

    A prompt may come in several chunks. Rows of the cache that are not named stay as they are.
    """
    index_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    exists_BT = (index_BT < count_B[:, None]).astype(jnp.int32)
    visibility = public(exists_BT, cursor_B[:, None] + index_BT)
    rows = jax.tree.map(lambda a: a[row_B], cache)
    _, kv = network.forward(weights, tokens_BT, visibility, rows, cursor_B)
    return network.write(cache, kv, row_B, cursor_B, count_B)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(1, 2))
def insert(
    plan: Plan, state: DecodeState, settings: Settings, row: jax.Array, prompt_N, length, cursor, row_settings: Settings
) -> tuple[DecodeState, Settings]:
    """Let a row hold a prompt whose first `cursor` tokens are in the cache; `row_settings` have no axis B."""

    def put(array, value):
        return array.at[row].set(value)

    settings = jax.tree.map(put, settings, row_settings)
    state = state._replace(
        tokens=put(state.tokens, prompt_N),
        forward=put(state.forward, -1),
        length=put(state.length, length),
        cursor=put(state.cursor, cursor),
        forwards=put(state.forwards, 0),
        finish=put(state.finish, RUNNING),
    )
    if state.block is not None:
        state = state._replace(block=state.block.emptied(jnp.arange(state.length.shape[0]) == row))
    if plan.drafts:
        first = _first_drafts(plan, settings, state)
        if state.drafts.q is not None:
            first = first._replace(q=first.distributions(state.drafts.q.shape[-1]))
        state = state._replace(drafts=jax.tree.map(lambda old, new: put(old, new[row]), state.drafts, first))
    return state, settings


def _first_drafts(plan: Plan, settings: Settings, state: DecodeState) -> Drafts:
    """Every row's drafts before its first forward."""
    nothing = Drafts(jnp.zeros_like(state.drafts.tokens), jnp.zeros_like(state.length), None)
    by_source = {"masks": nothing}
    if "lookup" in plan.sources or plan.found:
        by_source["lookup"] = sources.lookup(state.tokens, state.length, settings.width, plan.drafts)
    if "jacobi" in plan.sources:
        u_BK = uniforms(settings.sampling.seed, state.forwards, Purpose.GUESS, plan.drafts)
        guess_BK = sources.guesses(u_BK, state.tokens, state.length)
        by_source["jacobi"] = nothing._replace(tokens=guess_BK, count=jnp.minimum(settings.width, plan.drafts))
    return sources.of_rows(by_source, plan, settings)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2,))
def start_over(plan: Plan, vocab_size: int, state: DecodeState) -> DecodeState:
    """Let all rows go on with this plan, from no drafts.

    Compiled, so that the new arrays lie where the others do: to `decode`, arrays that are bound to no device would be
    another program.
    """
    return state._replace(drafts=no_drafts(plan, state.length.shape[0], vocab_size))


@partial(jax.jit, donate_argnums=(0,))
def evict(state: DecodeState, row: jax.Array) -> DecodeState:
    """Free a row: it no longer takes part."""
    return state._replace(finish=state.finish.at[row].set(LENGTH))


class Report(NamedTuple):
    """What the host reads after some steps: fields of the state, as of then, and what these steps did.

    gained, forwards_done: int32 `[B]`, tokens that each row gained in these steps, and the forwards they took.
    """

    tokens: jax.Array
    forward: jax.Array
    length: jax.Array
    finish: jax.Array
    logprobs: Logprobs | None
    gained: jax.Array
    forwards_done: jax.Array


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(5,))
def decode(
    network: Network,
    plan: Plan,
    weights,
    vocabulary: Vocabulary,
    settings: Settings,
    state: DecodeState,
    max_steps: jax.Array,
    until_one_finishes: jax.Array,
) -> tuple[DecodeState, Report]:
    """Step until every row has finished (or, where asked, until one has), or `max_steps` times."""
    enough = jnp.where(until_one_finishes, state.running.sum(), 1)

    one_step = diffusion.step if plan.sources == ("diffusion",) else step

    def going_on(carry):
        steps, state = carry
        running = state.running.sum()
        return (steps < max_steps) & (running > 0) & (running >= enough)

    def advance(carry):
        steps, state = carry
        return steps + 1, one_step(network, plan, weights, vocabulary, settings, state)

    before = state
    _, state = jax.lax.while_loop(going_on, advance, (jnp.zeros((), jnp.int32), state))
    gained, done = state.length - before.length, state.forwards - before.forwards
    return state, Report(state.tokens, state.forward, state.length, state.finish, state.logprobs, gained, done)
