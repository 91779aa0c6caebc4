"""Parameters laid out once for decoding, where a step has few tokens and reading the weights is what it costs.

On CPU, XLA multiplies `[out, in] @ [in, tokens]` up to twice as fast as `[tokens, in] @ [in, out]` when tokens are few:
the weights need no repacking. So matrices are transposed, those that read the same input are joined, and layers are
separate arrays (a scan would copy each layer's weights out of the stack at every step).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params

Weights = dict[str, Any]  # nested dict of arrays; "layers" is a tuple


def _joined(*linears: Params) -> Weights:
    """`kernel [out, in]` (and `bias [out, 1]`) of several linear maps of one input."""
    joined = {"kernel": jnp.concatenate([p["kernel"].T for p in linears])}
    if "bias" in linears[0]:
        joined["bias"] = jnp.concatenate([p["bias"] for p in linears])[:, None]
    return joined


def _layer(p: Params) -> Weights:
    attention, mlp = p["attention"], p["mlp"]
    norms = {name: attention[name]["scale"] for name in ("query_norm", "key_norm") if name in attention}
    return {
        "attention_norm": p["attention_norm"]["scale"],
        "qkv": _joined(attention["query"], attention["key"], attention["value"]),
        "output": _joined(attention["output"]),
        "mlp_norm": p["mlp_norm"]["scale"],
        "gate_up": _joined(mlp["gate"], mlp["up"]),
        "down": _joined(mlp["down"]),
        **norms,
    }


@partial(jax.jit, static_argnums=(1, 2))
def decode_weights(params: Params, cfg: ModelConfig, dtype=jnp.float32) -> Weights:
    """The weights of `parameter_specs(cfg)`-shaped params (layers stacked), in `dtype`; norm scales stay float32."""
    table = params["embedding"]["table"]
    layers = tuple(_layer(jax.tree.map(lambda a, i=i: a[i], params["layers"])) for i in range(cfg.num_layers))
    weights = {
        "embedding": table,
        "layers": layers,
        "final_norm": params["final_norm"]["scale"],
        "head": table if cfg.tie_embeddings else params["head"]["kernel"].T,
    }

    def cast(path, a):
        return a.astype(jnp.float32 if path[-1].key.endswith("norm") else dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)
