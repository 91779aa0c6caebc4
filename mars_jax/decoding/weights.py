"""Parameters laid out once for decoding, where a step has few tokens and reading the weights is what it costs.

On CPU, XLA multiplies `[out, in] @ [in, tokens]` up to twice as fast as `[tokens, in] @ [in, out]` when tokens are few:
the weights need no repacking. So matrices are transposed, those that read the same input are joined, and layers are
separate arrays (a scan would copy each layer's weights out of the stack at every step).

Fewer bytes are read where matrices are stored in bfloat16 or int8; products widen them to the activations' type.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.models.lora import merge
from mars_jax.models.parameters import Params

Weights = dict[str, Any]  # nested dict of arrays; "layers" is a tuple

# How weights can be stored: the `dtype` and `quantize` of `decode_weights`.
STORAGE = {"float32": (jnp.float32, False), "bfloat16": (jnp.bfloat16, False), "int8": (jnp.float32, True)}


def _joined(*linears: Params, scale: float = 1.0) -> Weights:
    """`kernel [out, in]` (and `bias [out, 1]`, `lora`) of several linear maps of one input."""
    joined = {"kernel": jnp.concatenate([p["kernel"].T for p in linears])}
    if "bias" in linears[0]:
        joined["bias"] = jnp.concatenate([p["bias"] for p in linears])[:, None]
    if any("lora_a" in p for p in linears):
        none = [jnp.zeros((p["kernel"].shape[1], 0)) for p in linears]
        b = [scale * p["lora_b"].T if "lora_b" in p else empty for p, empty in zip(linears, none, strict=True)]
        a = jnp.concatenate([p["lora_a"].T for p in linears if "lora_a" in p])
        joined["lora"] = {"a": a, "b": jax.scipy.linalg.block_diag(*b)}
    return joined


def _layer(p: Params, scale: float) -> Weights:
    attention, mlp = p["attention"], p["mlp"]
    joined = partial(_joined, scale=scale)
    norms = {name: attention[name]["scale"] for name in ("query_norm", "key_norm") if name in attention}
    return {
        "attention_norm": p["attention_norm"]["scale"],
        "qkv": joined(attention["query"], attention["key"], attention["value"]),
        "output": joined(attention["output"]),
        "mlp_norm": p["mlp_norm"]["scale"],
        "gate_up": joined(mlp["gate"], mlp["up"]),
        "down": joined(mlp["down"]),
        **norms,
    }


def stored_weights(params: Params, cfg: ModelConfig, storage: str) -> Weights:
    """`decode_weights` by the name of a storage; UserError for any other name."""
    if storage not in STORAGE:
        raise UserError(f"weights={storage!r}: expected one of {', '.join(STORAGE)}")
    return decode_weights(params, cfg, *STORAGE[storage])


def _quantized(linear: Weights) -> Weights:
    """`kernel` as int8 and `scale` float32 `[out, 1]`: a row is its integers times its scale, the largest is 127."""
    kernel = linear["kernel"].astype(jnp.float32)
    peak = jnp.max(jnp.abs(kernel), axis=1, keepdims=True)
    scale = jnp.where(peak > 0, peak, 1.0) / 127
    return linear | {"kernel": jnp.round(kernel / scale).astype(jnp.int8), "scale": scale}


@partial(jax.jit, static_argnums=(1, 2, 3))
def decode_weights(params: Params, cfg: ModelConfig, dtype=jnp.float32, quantize: bool = False) -> Weights:
    """The weights of `parameter_specs(cfg)`-shaped params (layers stacked), in `dtype`; norm scales stay float32.

    quantize: store matrices as int8 with a float32 scale for every output; embedding, norms and biases stay as they
        are, and so does a tied head, for it is the embedding.

    A low-rank update is merged into the matrices; a mask-gated one, which placeholders alone use, comes beside them as
    `lora`: `a [ranks, in]` and `b [out, ranks]`, its scale included.
    """
    scale = 1.0
    if cfg.lora is not None:
        scale = cfg.lora.scale
        params = params if cfg.lora.gated else merge(params, cfg.lora)
    layers = tuple(_layer(jax.tree.map(lambda a, i=i: a[i], params["layers"]), scale) for i in range(cfg.num_layers))
    weights = {
        "embedding": params["embedding"]["table"],
        "layers": layers,
        "final_norm": params["final_norm"]["scale"],
    }
    if not cfg.tie_embeddings:
        weights["head"] = {"kernel": params["head"]["kernel"].T}

    def cast(path, a):
        return a.astype(jnp.float32 if path[-1].key.endswith("norm") else dtype)

    weights = jax.tree_util.tree_map_with_path(cast, weights)
    return jax.tree.map(lambda w: _quantized(w) if quantize and _is_linear(w) else w, weights, is_leaf=_is_linear)


def without_updates(weights: Weights) -> Weights:
    """The same arrays for steps without placeholders, which compute what the base model does."""

    def bare(w):
        return {name: w[name] for name in w if name != "lora"} if _is_linear(w) else w

    return jax.tree.map(bare, weights, is_leaf=_is_linear)


def _is_linear(weights) -> bool:
    return isinstance(weights, dict) and "kernel" in weights
