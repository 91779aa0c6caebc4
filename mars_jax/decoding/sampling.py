"""Drawing tokens: the distribution that a row samples from, and draws that depend on the row alone.

The same `distribution` is used for drafts and for their verification; exactness rests on that.
"""

import enum
from functools import partial

import jax
import jax.numpy as jnp

from mars_jax.decoding.acceptance import likeliest
from mars_jax.decoding.settings import Sampling


class Purpose(enum.IntEnum):
    """What a random number is for. Each use of a forward has a stream of its own."""

    CONFIRM = 0  # whether a draft stands
    NEXT = 1  # the first new token
    AHEAD = 2  # candidates from placeholders
    GUESS = 3  # guesses that nothing is known about


def uniforms(seed_B: jax.Array, forward_B: jax.Array, purpose: Purpose, count: int) -> jax.Array:
    """`[B, count]` float32 in [0, 1), a function of the row's seed and its own number of forwards only."""

    def row(seed, forward):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), forward), purpose)
        return jax.random.uniform(key, (count,))

    return jax.vmap(row)(seed_B, forward_B)


def distribution(logits_BXV: jax.Array, sampling: Sampling) -> jax.Array:
    """Probabilities after temperature, top-k, top-p and min-p, in this order. Temperature 0: all on the likeliest."""
    temperature = sampling.temperature[:, None, None]
    greedy = jax.nn.one_hot(likeliest(logits_BXV), logits_BXV.shape[-1], dtype=jnp.float32)
    p = jax.nn.softmax(logits_BXV / jnp.where(temperature > 0, temperature, 1.0), axis=-1)
    kept = p
    top_k, top_p = sampling.top_k[:, None, None], sampling.top_p[:, None, None]
    kept = jax.lax.cond((sampling.top_k > 0).any(), partial(_top_k, top_k=top_k), lambda p: p, kept)
    kept = jax.lax.cond((sampling.top_p < 1).any(), partial(_top_p, top_p=top_p), lambda p: p, kept)
    least = sampling.min_p[:, None, None] * kept.max(-1, keepdims=True)
    kept = jnp.where(kept >= least, kept, 0.0)
    return jnp.where(temperature > 0, kept / kept.sum(-1, keepdims=True), greedy)


def _top_k(p: jax.Array, top_k: jax.Array) -> jax.Array:
    threshold = _largest_threshold(p, lambda kept: (kept > 0).sum(-1, keepdims=True) >= top_k)
    return jnp.where((top_k == 0) | (p >= threshold), p, 0.0)


def _top_p(p: jax.Array, top_p: jax.Array) -> jax.Array:
    mass = jnp.maximum(top_p, 1e-6) * p.sum(-1, keepdims=True)  # at least one token, also for 0
    threshold = _largest_threshold(p, lambda kept: kept.sum(-1, keepdims=True) >= mass)
    return jnp.where((top_p >= 1) | (p >= threshold), p, 0.0)


def _largest_threshold(p: jax.Array, enough) -> jax.Array:
    """The largest t for which what is left of p at or above t is `enough`, or 0.

    Bisection over the bits of non-negative floats, which order as integers do: some thirty cheap sweeps instead of a
    sort of the vocabulary. Equally likely tokens at the threshold are all kept.
    """

    def halve(_, bounds):
        low, high = bounds  # enough at low, not at high
        middle = low + (high - low) // 2
        fits = enough(jnp.where(p >= jax.lax.bitcast_convert_type(middle, jnp.float32), p, 0.0))
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    low = jnp.zeros((*p.shape[:-1], 1), jnp.int32)
    high = jnp.full_like(low, 0x3F800001)  # the next float above 1
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def draw(weights_BXV: jax.Array, u_BX: jax.Array) -> jax.Array:
    """`[B, X]` ids, each with probability proportional to its weight; the id whose stretch of the sum holds `u`."""
    cumulative = jnp.cumsum(weights_BXV, axis=-1)
    return jnp.argmax(cumulative > u_BX[..., None] * cumulative[..., -1:], axis=-1)
