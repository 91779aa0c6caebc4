"""Low-rank updates folded into the weights they change.

A mask-gated update cannot be folded in: no matrix acts on placeholders only.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mars_jax.errors import UserError
from mars_jax.models.config import Lora
from mars_jax.models.parameters import LORA_NAMES, Params

if TYPE_CHECKING:
    from mars_jax.models.loading import LoadedModel


def merge(params: Params, lora: Lora) -> Params:
    """The parameters with every update added to its kernel, in float32 precision, and gone."""
    if "lora_a" in params:
        update = jnp.matmul(
            params["lora_a"].astype(jnp.float32), params["lora_b"].astype(jnp.float32), precision="highest"
        )
        kernel = params["kernel"]
        merged = (kernel.astype(jnp.float32) + lora.scale * update).astype(kernel.dtype)
        return {name: params[name] for name in params if name not in LORA_NAMES} | {"kernel": merged}
    return {name: merge(value, lora) if isinstance(value, dict) else value for name, value in params.items()}


def merged(model: "LoadedModel") -> "LoadedModel":
    """The model with its update folded into the weights. Raises UserError for one that acts on placeholders only."""
    lora = model.cfg.lora
    if lora is None:
        return model
    if lora.gated:
        raise UserError(
            "a mask-gated LoRA cannot be merged into the weights: it acts on placeholders only, and a merged matrix "
            "would act on every token; export it as an adapter (--adapter)"
        )
    return replace(model, cfg=replace(model.cfg, lora=None), params=merge(model.params, lora), adapter=None)


@jax.jit
def fingerprint(params: Params) -> jax.Array:
    """Uint32 that changes with the weights, whatever float type holds them and however they are sharded."""

    def one(leaf):
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        return jnp.sum(bits, dtype=jnp.uint32)

    # Each array counts with an odd factor of its own, or weights that move between arrays would go unnoticed.
    return sum(jnp.uint32(2 * i + 1) * one(leaf) for i, leaf in enumerate(jax.tree.leaves(params)))
