"""The state of a decoding loop: one pytree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.decoding import logprobs
from mars_jax.decoding.drafts import Drafts
from mars_jax.decoding.logprobs import Logprobs
from mars_jax.decoding.plan import Plan

RUNNING, STOP, LENGTH = range(3)
FINISH_REASONS = (None, "stop", "length")
# The logit of an id that may not be emitted. Finite, so that differences never make NaN.
NEVER = -1e30
UNFILLED = -1


class Block(NamedTuple):
    """The block that is being filled in block diffusion, places in any order.

    tokens:  int32 `[B, W]`, UNFILLED where a place is still a placeholder.
    forward: int32 `[B, W]`, the forward that filled each place.
    """

    tokens: jax.Array
    forward: jax.Array

    @property
    def is_filled(self) -> jax.Array:
        return self.tokens != UNFILLED

    def emptied(self, where_B: jax.Array) -> "Block":
        return self._replace(tokens=jnp.where(where_B[:, None], UNFILLED, self.tokens))


class DecodeState(NamedTuple):
    """All rows of a batch. N is the capacity: the most tokens, prompt and output, that a row can hold.

    cache:    keys and values, whatever the network made; slots are written in place.
    tokens:   int32 `[B, N]`, committed tokens; entries at or past `length` mean nothing.
    forward:  int32 `[B, N]`, the forward (from 0) that committed each token; -1 for the prompt.
    length:   int32 `[B]`, committed tokens.
    cursor:   int32 `[B]`, slots that hold keys and values of committed tokens; what lies at or past it is never seen.
    drafts:   candidates for the tokens from `length` on.
    forwards: int32 `[B]`, decoding forwards that committed tokens.
    finish:   int32 `[B]`, RUNNING, STOP or LENGTH.
    logprobs: of committed tokens, or None where nobody asked.
    block:    in block diffusion, the tokens from `length` on, as far as they are filled in.
    """

    cache: Any
    tokens: jax.Array
    forward: jax.Array
    length: jax.Array
    cursor: jax.Array
    drafts: Drafts
    forwards: jax.Array
    finish: jax.Array
    logprobs: Logprobs | None
    block: Block | None

    @property
    def running(self) -> jax.Array:
        return self.finish == RUNNING

    @property
    def pending(self) -> jax.Array:
        """Committed tokens without keys and values; the last of them, the root, predicts the next token."""
        return self.length - self.cursor


def no_drafts(plan: Plan, batch: int, vocab_size: int) -> Drafts:
    """What rows have before their first forward with this plan."""
    q = jnp.zeros((batch, plan.drafts, vocab_size)) if plan.sampled and plan.masks and plan.drafts else None

    def nothing():
        return jnp.zeros((batch, plan.drafts), jnp.int32), jnp.zeros(batch, jnp.int32)

    return Drafts(*nothing(), q, Drafts(*nothing(), None) if plan.found else None)


def no_block(plan: Plan, batch: int) -> Block | None:
    if plan.sources != ("diffusion",):
        return None
    return Block(jnp.full((batch, plan.masks), UNFILLED, jnp.int32), jnp.zeros((batch, plan.masks), jnp.int32))


def empty_state(plan: Plan, cache, batch: int, capacity: int, vocab_size: int) -> DecodeState:
    """A batch of rows that are all finished: free slots."""

    def zeros():  # every field its own buffer, for the state is donated
        return jnp.zeros(batch, jnp.int32)

    return DecodeState(
        cache=cache,
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        forward=jnp.full((batch, capacity), -1, jnp.int32),
        length=zeros(),
        cursor=zeros(),
        drafts=no_drafts(plan, batch, vocab_size),
        forwards=zeros(),
        finish=jnp.full(batch, LENGTH, jnp.int32),
        logprobs=None if plan.logprobs is None else logprobs.empty(batch, capacity, plan.logprobs),
        block=no_block(plan, batch),
    )
