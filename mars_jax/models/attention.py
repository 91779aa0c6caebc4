"""Masked attention: the dense reference and the cached form used in decoding.

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


def cached_attention(
    q_BTHE: jax.Array,
    k_BTKE: jax.Array,
    v_BTKE: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    cache_mask_BTS: jax.Array,
    new_mask_BTT: jax.Array,
) -> jax.Array:
    """Attention over cached keys (`k_BSKE`, `v_BSKE`, only read) and this call's own keys, in one softmax."""
    k_cache_BSKE, v_cache_BSKE = cache
    q_BTKGE = _grouped(q_BTHE, k_BTKE.shape[2])
    old = _scores(q_BTKGE, k_cache_BSKE, cache_mask_BTS)
    new = _scores(q_BTKGE, k_BTKE, new_mask_BTT)
    peak = jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True))
    # Masked scores give exp(MASKED - peak) = 0 unless a row sees nothing at all: the products with the mask cover that.
    old = jnp.exp(old - peak) * cache_mask_BTS[:, None, None]
    new = jnp.exp(new - peak) * new_mask_BTT[:, None, None]
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)
    inverse = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)

    def mix(weights, v):
        return jnp.einsum(
            "BKGTS,BSKE->BTKGE", (weights * inverse).astype(v.dtype), v, preferred_element_type=jnp.float32
        )

    out = mix(old, v_cache_BSKE) + mix(new, v_BTKE)
    return out.reshape(q_BTHE.shape).astype(q_BTHE.dtype)
