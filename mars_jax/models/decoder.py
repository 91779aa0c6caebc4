"""The decoder: a Flax NNX holder of parameters and pure functions that compute with them.

Axes: B batch row, T tokens, D model, H heads, K kv heads, E head dim, F mlp, V vocabulary,
L layers.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from mars_jax.models import parameters
from mars_jax.models.config import Lora, ModelConfig
from mars_jax.models.parameters import Params
from mars_jax.models.rope import rotate, rotation

# attend(q_BTHE, k_BTKE, v_BTKE) -> out_BTHE
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Decoder(nnx.Module):
    """Holds the parameters as `nnx.Param`s in the tree of `parameter_specs`. Use `params()` and the functions below."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.cfg = cfg
        tree = parameters.init_parameters(rngs.params(), cfg, dtype)
        self.tree = nnx.data(jax.tree.map(nnx.Param, tree))

    def params(self) -> Params:
        """The parameters as a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))["tree"]


def _on_last_axis(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A `[D]` vector shaped to broadcast against `x` `[..., D]` (ranks are never promoted silently in this project)."""
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMS normalisation over the last axis, in float32; the result has x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * _on_last_axis(scale.astype(jnp.float32), x)).astype(x.dtype)


def _linear(x: jax.Array, p: Params, lora: Lora | None = None, gate: jax.Array | None = None) -> jax.Array:
    """`x @ kernel (+ bias)` in x's dtype, with the low-rank update of `p` if it has one.

    gate: bool, as x without its last axis, where a mask-gated update acts; without it such an update acts nowhere.
    """
    y = x @ p["kernel"].astype(x.dtype)
    if "bias" in p:
        y = y + _on_last_axis(p["bias"].astype(x.dtype), y)
    if "lora_a" not in p or (lora.gated and gate is None):
        return y
    updated = y + (x @ p["lora_a"].astype(x.dtype)) @ p["lora_b"].astype(x.dtype) * lora.scale
    return jnp.where(gate[..., None], updated, y) if lora.gated else updated


def _heads(x_BTX: jax.Array, head_dim: int) -> jax.Array:
    return x_BTX.reshape(*x_BTX.shape[:2], -1, head_dim)


def layer(x_BTD, p: Params, cfg: ModelConfig, rope, attend: Attend, gate_BT=None) -> jax.Array:
    """One transformer layer, `[B, T, D]` to the same."""
    attention = p["attention"]
    linear = partial(_linear, lora=cfg.lora, gate=gate_BT)
    h = rms_norm(x_BTD, p["attention_norm"]["scale"], cfg.norm_eps)
    q = _heads(linear(h, attention["query"]), cfg.head_dim)
    k = _heads(linear(h, attention["key"]), cfg.head_dim)
    v = _heads(linear(h, attention["value"]), cfg.head_dim)
    if cfg.qk_norm:
        q = rms_norm(q, attention["query_norm"]["scale"], cfg.norm_eps)
        k = rms_norm(k, attention["key_norm"]["scale"], cfg.norm_eps)
    q, k = rotate(q, *rope), rotate(k, *rope)
    out = attend(q, k, v)
    x_BTD = x_BTD + linear(out.reshape(*x_BTD.shape[:2], -1), attention["output"])
    h = rms_norm(x_BTD, p["mlp_norm"]["scale"], cfg.norm_eps)
    h = jax.nn.silu(linear(h, p["mlp"]["gate"])) * linear(h, p["mlp"]["up"])
    return x_BTD + linear(h, p["mlp"]["down"])


def embed(params: Params, tokens_BT: jax.Array, dtype) -> jax.Array:
    return params["embedding"]["table"][tokens_BT].astype(dtype)


def unembed(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Float32 logits `[..., V]` of final hidden states `[..., D]` (already normed)."""
    if cfg.tie_embeddings:
        table = params["embedding"]["table"].astype(hidden.dtype)
        return jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)
    kernel = params["head"]["kernel"].astype(hidden.dtype)
    return jnp.einsum("...D,DV->...V", hidden, kernel, preferred_element_type=jnp.float32)


def forward(
    params: Params,
    cfg: ModelConfig,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    attend: Attend,
    *,
    gate_BT: jax.Array | None = None,
    dtype=jnp.float32,
    remat: bool = False,
) -> jax.Array:
    """Final hidden states `[B, T, D]` (after the last norm) of a forward without a cache.

    `attend` is called with rotated queries and keys. With `remat`, each layer is recomputed in the backward pass.
    Mask-gated updates (`cfg.lora`) act where `gate_BT` (bool) says; without it they do not act at all.
    """
    rope = rotation(cfg, positions_BT)

    def body(x, p):
        return layer(x, p, cfg, rope, attend, gate_BT), None

    body = jax.checkpoint(body) if remat else body
    x, _ = jax.lax.scan(body, embed(params, tokens_BT, dtype), params["layers"])
    return rms_norm(x, params["final_norm"]["scale"], cfg.norm_eps)
