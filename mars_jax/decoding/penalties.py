"""Changes of the logits that depend on what a row already holds: penalties, bias, a minimum length.

Every position of a step has its own context: counts include the tokens of the same run before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.decoding.settings import Settings
from mars_jax.decoding.state import NEVER, DecodeState


class Context(NamedTuple):
    """What precedes a position. prompt: `[B, V]` and output: `[B, V]` int32 counts. length: `[B]`, tokens before it."""

    prompt: jax.Array
    output: jax.Array
    length: jax.Array

    def then(self, token_B: jax.Array) -> "Context":
        """The context of the next position, after this token."""
        row_B = jnp.arange(token_B.shape[0])
        return Context(self.prompt, self.output.at[row_B, token_B].add(1), self.length + 1)


def committed(state: DecodeState, vocab_size: int) -> Context:
    """The context of the first token after a row's committed ones."""
    batch, capacity = state.tokens.shape
    index_BN = jnp.broadcast_to(jnp.arange(capacity), state.tokens.shape)
    row_BN = jnp.broadcast_to(jnp.arange(batch)[:, None], state.tokens.shape)
    is_output_BN = state.forward >= 0

    def count(where_BN):
        where_BN &= index_BN < state.length[:, None]
        return jnp.zeros((batch, vocab_size), jnp.int32).at[row_BN, state.tokens].add(where_BN.astype(jnp.int32))

    return Context(count(~is_output_BN), count(is_output_BN), state.length)


def adjust(logits_BV: jax.Array, context: Context, settings: Settings) -> jax.Array:
    """The logits of one position under its row's penalties, bias and minimum length."""
    a = settings.adjustment
    row_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    repetition = a.repetition[:, None]
    repeated = jnp.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    logits = jnp.where((context.prompt > 0) | (context.output > 0), repeated, logits_BV)
    logits -= a.presence[:, None] * (context.output > 0) + a.frequency[:, None] * context.output
    logits = logits.at[row_B1, _in_range(a.bias_ids, logits)].add(a.bias, mode="drop")
    too_short = context.length < a.min_length
    stop_BE = jnp.where(too_short[:, None], settings.stop, -1)
    return logits.at[row_B1, _in_range(stop_BE, logits)].set(NEVER, mode="drop")


def _in_range(ids_BX: jax.Array, logits_BV: jax.Array) -> jax.Array:
    """Padding (-1) past the end, where scatters drop it, instead of at the last id."""
    return jnp.where(ids_BX < 0, logits_BV.shape[-1], ids_BX)
