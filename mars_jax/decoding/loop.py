"""Prefill, and the decoding loop: one `lax.while_loop` over `step`."""

from functools import partial

import jax
import jax.numpy as jnp

from mars_jax.decoding.network import Network
from mars_jax.decoding.plan import Plan
from mars_jax.decoding.settings import Settings, Vocabulary
from mars_jax.decoding.state import LENGTH, RUNNING, DecodeState
from mars_jax.decoding.step import step
from mars_jax.objective.visibility import public


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def prefill(network: Network, params, cache, tokens_BT: jax.Array, cursor_B: jax.Array, count_B: jax.Array):
    """The cache after each row's first `count` tokens of `tokens_BT` were added from its cursor on.

    A prompt may come in several chunks; counts beyond a row's tokens are padding.
    """
    index_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    exists_BT = (index_BT < count_B[:, None]).astype(jnp.int32)
    visibility = public(exists_BT, cursor_B[:, None] + index_BT)
    _, kv = network.forward(params, tokens_BT, visibility, cache, cursor_B)
    return network.write(cache, kv, cursor_B, count_B)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(5,))
def decode(
    network: Network,
    plan: Plan,
    params,
    vocabulary: Vocabulary,
    settings: Settings,
    state: DecodeState,
    max_steps: jax.Array,
) -> DecodeState:
    """Step until every row has finished, or `max_steps` times."""

    def unfinished(carry):
        steps, state = carry
        return (steps < max_steps) & state.running.any()

    def advance(carry):
        steps, state = carry
        return steps + 1, step(network, plan, params, vocabulary, settings, state)

    return jax.lax.while_loop(unfinished, advance, (jnp.zeros((), jnp.int32), state))[1]


def start(
    state: DecodeState, prompts_BN: jax.Array, length_B: jax.Array, cursor_B: jax.Array, running_B
) -> DecodeState:
    """Rows that hold these prompts, ready for their first forward; the cache below the cursors is filled."""
    return state._replace(
        tokens=prompts_BN,
        forward=jnp.full_like(state.forward, -1),
        length=length_B,
        cursor=cursor_B,
        num_drafts=jnp.zeros_like(length_B),
        forwards=jnp.zeros_like(length_B),
        finish=jnp.where(running_B, RUNNING, LENGTH),
    )
