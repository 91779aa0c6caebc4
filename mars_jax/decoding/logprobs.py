"""Log-probabilities of committed tokens, on request.

They are of the model's own distribution over the ids that may be emitted: no temperature, no penalties. In the exact
modes that is the autoregressive distribution. In the modes that trust candidates, every token of a run but its first
was predicted by a placeholder, and so is its log-probability.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Logprobs(NamedTuple):
    """chosen: float32 `[B, N]`. top_ids, top: `[B, N, n]`, the n likeliest ids and their log-probabilities."""

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


def empty(batch: int, capacity: int, count: int) -> Logprobs:
    shape = (batch, capacity)
    return Logprobs(jnp.zeros(shape), jnp.zeros((*shape, count), jnp.int32), jnp.zeros((*shape, count)))


def of_run(
    next_BXV: jax.Array, ahead_BWV: jax.Array, confirmed_B: jax.Array, run_BM: jax.Array, count: int
) -> Logprobs:
    """Log-probabilities `[B, M]` of a run: confirmed drafts and the first new token, then candidates."""
    index_BM = jnp.broadcast_to(jnp.arange(run_BM.shape[1]), run_BM.shape)
    from_placeholder_BM = index_BM > confirmed_B[:, None]
    source_BM = jnp.where(from_placeholder_BM, next_BXV.shape[1] + index_BM - confirmed_B[:, None] - 1, index_BM)
    logits = jnp.concatenate([next_BXV, ahead_BWV], axis=1)
    logits_BMV = jnp.take_along_axis(logits, source_BM[..., None], axis=1, mode="clip")
    logprobs = jax.nn.log_softmax(logits_BMV, axis=-1)
    chosen = jnp.take_along_axis(logprobs, run_BM[..., None], axis=-1)[..., 0]
    top, top_ids = jax.lax.top_k(logprobs, count)
    return Logprobs(chosen, top_ids.astype(jnp.int32), top)
