"""Rotary position embeddings, half-split pairs as in Hugging Face checkpoints."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.models.config import ModelConfig, RopeScaling


def inverse_frequencies(cfg: ModelConfig) -> np.ndarray:
    """`[E/2]` float32 angular frequencies, with Llama-3 scaling where the config asks for it."""
    exponents = np.arange(0, cfg.head_dim, 2, dtype=np.float32) / cfg.head_dim
    frequencies = (1.0 / cfg.rope_theta**exponents).astype(np.float32)
    return frequencies if cfg.rope_scaling is None else scale_frequencies(frequencies, cfg.rope_scaling)


def scale_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama-3 scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    ratio = scaling.original_max_position / wavelengths
    blend = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)  # 0: long wavelengths, fully scaled; 1: short ones, untouched
    return ((1 - blend) * frequencies / scaling.factor + blend * frequencies).astype(np.float32)


def rotation(cfg: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float32 cosines and sines, each `[B, T, 1, E/2]`."""
    angles = positions_BT[..., None, None].astype(jnp.float32) * inverse_frequencies(cfg)[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHE: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs `(x[i], x[i + E/2])`; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHE.dtype)
