"""A plain causal forward over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention


@functools.partial(jax.jit, static_argnums=1)
def causal_logits(params, cfg, tokens_BT) -> jax.Array:
    """Float32 logits `[B, T, V]`."""
    length = tokens_BT.shape[1]
    mask = jnp.tril(jnp.ones((1, length, length), bool))

    def attend(q, k, v):
        return dense_attention(q, k, v, mask)

    hidden = decoder.forward(params, cfg, jnp.asarray(tokens_BT), jnp.arange(length)[None], attend)
    return decoder.unembed(params, cfg, hidden)


def random_tokens(vocab_size: int, length: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, vocab_size, (1, length)).astype(np.int32)
