"""Which candidates are taken: trusted by score, confirmed by the model's own choice, cut at an end."""

import jax
import jax.numpy as jnp

from mars_jax.decoding.settings import Settings
from mars_jax.decoding.state import LENGTH, RUNNING, STOP


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """int32 indices along one axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def leading(flags_BX: jax.Array) -> jax.Array:
    """Number of leading True entries of each row."""
    return jnp.cumprod(flags_BX.astype(jnp.int32), axis=1).sum(axis=1)


def passes(logits_BXV: jax.Array, tokens_BX: jax.Array, settings: Settings) -> jax.Array:
    """Whether each candidate's score reaches its row's threshold. `[B, X]` bool.

    `logits_BXV` are untempered and float32, hugely negative where an id may not be emitted. With `probability` and
    `margin`, tau >= 1 passes nothing, also where a softmax rounds to 1.
    """
    log_p = jax.nn.log_softmax(logits_BXV, axis=-1)
    p = jnp.exp(log_p)
    probability = jnp.take_along_axis(p, tokens_BX[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.where(p > 0, p * log_p, 0.0), axis=-1)
    best = jnp.argmax(p, axis=-1)
    second = jnp.max(jnp.where(iota(p.shape, 2) == best[..., None], 0.0, p), axis=-1)
    margin = jnp.max(p, axis=-1) - second

    tau = settings.tau[:, None]
    reachable = tau < 1.0
    by_kind = [reachable & (probability >= tau), entropy <= tau, reachable & (margin >= tau)]
    return jnp.stack(by_kind)[settings.score, jnp.arange(tau.shape[0])]


def cut(run_BM: jax.Array, count_B: jax.Array, room_B: jax.Array, stop_BE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cut each run at its first end token and at `room` tokens.

    Returns the count that is left and whether an end token is its last.
    """
    index_BM = iota(run_BM.shape, 1)
    is_stop_BM = (run_BM[:, :, None] == stop_BE[:, None, :]).any(-1)
    count_B = jnp.minimum(count_B, room_B)
    is_stop_BM &= index_BM < count_B[:, None]
    stopped_B = is_stop_BM.any(1)
    return jnp.where(stopped_B, jnp.argmax(is_stop_BM, axis=1) + 1, count_B), stopped_B


def finish(stopped_B: jax.Array, length_B: jax.Array, limit_B: jax.Array) -> jax.Array:
    return jnp.where(stopped_B, STOP, jnp.where(length_B >= limit_B, LENGTH, RUNNING))
