"""Every parameter described once: shape, logical axes and initializer.

Shapes, shardings (`parallel.rules`), initial values and the Hugging Face table all derive from `parameter_specs`.
Matrices are stored `[in, out]`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mars_jax.models.config import ModelConfig

Params = dict[str, Any]  # nested dict of arrays


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. `axes` names the logical axis of every dimension, for sharding rules."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str  # "normal", "zeros" or "ones"


def _matrix(*dims: tuple[int, str]) -> ParameterSpec:
    return ParameterSpec(tuple(n for n, _ in dims), tuple(a for _, a in dims), "normal")


def _vector(dim: tuple[int, str | None], init: str) -> ParameterSpec:
    return ParameterSpec((dim[0],), (dim[1],), init)


def layer_specs(cfg: ModelConfig) -> Params:
    """Specs of one layer, without the leading layer axis."""
    d = (cfg.hidden_size, "embed")
    f = (cfg.intermediate_size, "mlp")
    q = (cfg.num_heads * cfg.head_dim, "heads")
    kv = (cfg.num_kv_heads * cfg.head_dim, "kv_heads")

    def linear(inputs, outputs, bias):
        specs = {"kernel": _matrix(inputs, outputs)}
        if bias:
            specs["bias"] = _vector(outputs, "zeros")
        return specs

    attention = {
        "query": linear(d, q, cfg.qkv_bias),
        "key": linear(d, kv, cfg.qkv_bias),
        "value": linear(d, kv, cfg.qkv_bias),
        "output": linear(q, d, cfg.output_bias),
    }
    if cfg.qk_norm:
        attention["query_norm"] = {"scale": _vector((cfg.head_dim, None), "ones")}
        attention["key_norm"] = {"scale": _vector((cfg.head_dim, None), "ones")}
    return {
        "attention": attention,
        "attention_norm": {"scale": _vector((cfg.hidden_size, None), "ones")},
        "mlp": {
            "gate": linear(d, f, cfg.mlp_bias),
            "up": linear(d, f, cfg.mlp_bias),
            "down": linear(f, d, cfg.mlp_bias),
        },
        "mlp_norm": {"scale": _vector((cfg.hidden_size, None), "ones")},
    }


def is_spec(x) -> bool:
    return isinstance(x, ParameterSpec)


def parameter_specs(cfg: ModelConfig) -> Params:
    """Specs of the whole model; parameters under `layers` carry a leading axis of `num_layers`."""

    def stack(spec):
        return ParameterSpec((cfg.num_layers, *spec.shape), ("layer", *spec.axes), spec.init)

    specs = {
        "embedding": {"table": _matrix((cfg.vocab_size, "vocab"), (cfg.hidden_size, "embed"))},
        "layers": jax.tree.map(stack, layer_specs(cfg), is_leaf=is_spec),
        "final_norm": {"scale": _vector((cfg.hidden_size, None), "ones")},
    }
    if not cfg.tie_embeddings:
        specs["head"] = {"kernel": _matrix((cfg.hidden_size, "embed"), (cfg.vocab_size, "vocab"))}
    return specs


def parameter_shapes(cfg: ModelConfig, dtype=jnp.float32) -> Params:
    """`jax.ShapeDtypeStruct` of every parameter."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), parameter_specs(cfg), is_leaf=is_spec)


def init_parameters(key: jax.Array, cfg: ModelConfig, dtype=jnp.float32, std: float = 0.02) -> Params:
    """Fresh parameters: normal(0, `std`) matrices, zero biases, unit norm scales."""
    leaves, treedef = jax.tree.flatten(parameter_specs(cfg), is_leaf=is_spec)

    def initial(key, spec):
        if spec.init == "normal":
            return (std * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [initial(k, s) for k, s in zip(keys, leaves, strict=True)])
