"""Masked attention: the dense reference.

Masks are arguments (`objective.visibility` makes them). Softmax is float32. A query that may see nothing gets zeros,
not NaN, and its gradient is zero.
"""

import math

import jax
import jax.numpy as jnp

# Finite, so that a row without any visible key gives finite exponentials and gradients.
MASKED = -1e30


def _grouped(q_BTHE: jax.Array, num_kv_heads: int) -> jax.Array:
    b, t, h, e = q_BTHE.shape
    return q_BTHE.reshape(b, t, num_kv_heads, h // num_kv_heads, e)


def _scores(q_BTKGE: jax.Array, k_BSKE: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    scale = 1.0 / math.sqrt(q_BTKGE.shape[-1])
    scores = jnp.einsum("BTKGE,BSKE->BKGTS", q_BTKGE, k_BSKE, preferred_element_type=jnp.float32)
    return jnp.where(mask_BTS[:, None, None], scores * scale, MASKED)


def dense_attention(q_BTHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Grouped-query attention with an explicit boolean mask. Returns `[B, T, H, E]` in q's dtype."""
    q_BTKGE = _grouped(q_BTHE, k_BSKE.shape[2])
    scores = _scores(q_BTKGE, k_BSKE, mask_BTS)
    weights = jax.nn.softmax(scores, axis=-1) * mask_BTS.any(-1)[:, None, None, :, None]
    out = jnp.einsum("BKGTS,BSKE->BTKGE", weights.astype(v_BSKE.dtype), v_BSKE, preferred_element_type=jnp.float32)
    return out.reshape(q_BTHE.shape).astype(q_BTHE.dtype)
