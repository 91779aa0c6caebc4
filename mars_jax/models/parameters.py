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
LORA_NAMES = ("lora_a", "lora_b")


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. `axes` names the logical axis of every dimension, for sharding rules."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str  # "normal", "uniform", "zeros" or "ones", see `init_parameters`


def _matrix(*dims: tuple[int, str | None], init: str = "normal") -> ParameterSpec:
    return ParameterSpec(tuple(n for n, _ in dims), tuple(a for _, a in dims), init)


def _vector(dim: tuple[int, str | None], init: str) -> ParameterSpec:
    return ParameterSpec((dim[0],), (dim[1],), init)


def layer_specs(cfg: ModelConfig) -> Params:
    """Specs of one layer, without the leading layer axis."""
    d = (cfg.hidden_size, "embed")
    f = (cfg.intermediate_size, "mlp")
    q = (cfg.num_heads * cfg.head_dim, "heads")
    kv = (cfg.num_kv_heads * cfg.head_dim, "kv_heads")

    def linear(name, inputs, outputs, bias):
        specs = {"kernel": _matrix(inputs, outputs)}
        if bias:
            specs["bias"] = _vector(outputs, "zeros")
        if cfg.lora is not None and name in cfg.lora.targets:
            rank = (cfg.lora.rank, None)
            specs["lora_a"] = _matrix(inputs, rank, init="uniform")
            specs["lora_b"] = _matrix(rank, outputs, init="zeros")  # so that the model starts unchanged
        return specs

    attention = {
        "query": linear("query", d, q, cfg.qkv_bias),
        "key": linear("key", d, kv, cfg.qkv_bias),
        "value": linear("value", d, kv, cfg.qkv_bias),
        "output": linear("output", q, d, cfg.output_bias),
    }
    if cfg.qk_norm:
        attention["query_norm"] = {"scale": _vector((cfg.head_dim, None), "ones")}
        attention["key_norm"] = {"scale": _vector((cfg.head_dim, None), "ones")}
    return {
        "attention": attention,
        "attention_norm": {"scale": _vector((cfg.hidden_size, None), "ones")},
        "mlp": {
            "gate": linear("gate", d, f, cfg.mlp_bias),
            "up": linear("up", d, f, cfg.mlp_bias),
            "down": linear("down", f, d, cfg.mlp_bias),
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
    return _initial(key, parameter_specs(cfg), dtype, std)


def init_lora(key: jax.Array, cfg: ModelConfig, dtype=jnp.float32) -> Params:
    """Fresh low-rank updates, which change nothing yet: `lora_a` uniform within ±1/√inputs, as in PEFT, `lora_b` 0."""
    return _initial(key, split(parameter_specs(cfg))[1], dtype)


def _initial(key: jax.Array, specs: Params, dtype, std: float = 0.02) -> Params:
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)

    def initial(key, spec):
        match spec.init:
            case "normal":
                values = std * jax.random.normal(key, spec.shape, jnp.float32)
            case "uniform":
                bound = spec.shape[-2] ** -0.5
                values = jax.random.uniform(key, spec.shape, jnp.float32, -bound, bound)
            case "zeros" | "ones":
                values = jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0)
        return values.astype(dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [initial(k, s) for k, s in zip(keys, leaves, strict=True)])


def split(params: Params) -> tuple[Params | None, Params]:
    """`(frozen, trained)` of a tree like the parameters: low-rank updates are trained if there are any, else all is."""
    paths = [path[-1].key for path, _ in jax.tree.leaves_with_path(params, is_leaf=is_spec)]
    if not any(name in LORA_NAMES for name in paths):
        return None, params
    return _pick(params, lambda name: name not in LORA_NAMES), _pick(params, lambda name: name in LORA_NAMES)


def join(frozen: Params | None, trained: Params) -> Params:
    """The tree that `split` took apart."""
    if frozen is None:
        return trained
    both = dict(frozen)
    for name, value in trained.items():
        both[name] = join(frozen[name], value) if name in frozen else value
    return both


def _pick(tree: Params, wanted) -> Params:
    """The leaves with these names, without the dicts that become empty."""
    picked = {k: _pick(v, wanted) if isinstance(v, dict) else v for k, v in tree.items()}
    return {k: v for k, v in picked.items() if (v if isinstance(v, dict) else wanted(k))}
