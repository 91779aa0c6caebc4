"""The model as decoding sees it: hidden states, keys and values of a step's few tokens against a cache.

Axes as in `models.decoder`, and N = B * T: activations between matrices are feature-major, `x_DN` (see `weights`).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from mars_jax.decoding.weights import Weights
from mars_jax.models.attention import MASKED
from mars_jax.models.config import ModelConfig
from mars_jax.models.decoder import rms_norm
from mars_jax.models.rope import rotate, rotation
from mars_jax.objective.visibility import Tokens, public, visible

CHUNK = 1 << 19  # int8 weights that a CPU widens at a time, about


class Network(Protocol):
    """What the decoding loop needs of a model; hashable, for it is a static argument."""

    def init_cache(self, batch: int, slots: int) -> Any: ...

    def grow(self, cache, slots: int):
        """The cache with room for `slots` tokens a row."""
        ...

    def forward(self, weights, tokens_BT: jax.Array, visibility: Tokens, cache, cursor_B: jax.Array):
        """`(hidden_BTD, kv)` of tokens that see each other and, unless None, the cache's slots below the cursor."""
        ...

    def write(self, cache, kv, row_B: jax.Array, cursor_B: jax.Array, count_B: jax.Array):
        """The cache with the first `count` entries of `kv` in these rows' slots from their cursors on."""
        ...

    def logits(self, weights, hidden_BXD: jax.Array) -> jax.Array:
        """Float32 logits `[B, X, V]`."""
        ...


@dataclass(frozen=True)
class DecoderNetwork:
    """The decoder of `models.decoder`, computed for few tokens from `weights.decode_weights`.

    Its cache is a tuple over layers of keys `[B, K, E, S]` and values `[B, K, S, E]`, as their products want them.
    """

    cfg: ModelConfig
    dtype: Any = jnp.float32

    def init_cache(self, batch: int, slots: int):
        k, e = self.cfg.num_kv_heads, self.cfg.head_dim
        return tuple(
            (jnp.zeros((batch, k, e, slots), self.dtype), jnp.zeros((batch, k, slots, e), self.dtype))
            for _ in range(self.cfg.num_layers)
        )

    def grow(self, cache, slots: int):
        def pad(array, axis):
            widths = [(0, 0)] * 4
            widths[axis] = (0, slots - array.shape[axis])
            return jnp.pad(array, widths)

        return tuple((pad(k_BKES, 3), pad(v_BKSE, 2)) for k_BKES, v_BKSE in cache)

    def forward(self, weights: Weights, tokens_BT, visibility: Tokens, cache, cursor_B):
        batch, width = tokens_BT.shape
        masks = _masks(visibility, cache, cursor_B)
        rope = rotation(self.cfg, visibility.position)
        x_DN = weights["embedding"][tokens_BT.reshape(-1)].T.astype(self.dtype)
        gate_N = None
        if self.cfg.lora is not None and self.cfg.lora.gated:
            gate_N = ((tokens_BT == self.cfg.lora.gate) & (visibility.group > 0)).reshape(-1)
        linear = partial(_linear, gate_N=gate_N)
        kv = []
        for i, w in enumerate(weights["layers"]):
            q, k, v = self._qkv(w, x_DN, rope, (batch, width), linear)
            kv.append((k, v))
            out_BTHE = _attention(q, k, v, None if cache is None else cache[i], masks)
            x_DN = x_DN + linear(w["output"], out_BTHE.reshape(batch * width, -1).T)
            gate_FN, up_FN = jnp.split(linear(w["gate_up"], self._norm(x_DN, w["mlp_norm"])), 2)
            x_DN = x_DN + linear(w["down"], jax.nn.silu(gate_FN) * up_FN)
        hidden_DN = self._norm(x_DN, weights["final_norm"])
        return hidden_DN.T.reshape(batch, width, -1), tuple(kv)

    def _norm(self, x_DN, scale_D):
        x32 = x_DN.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=0, keepdims=True) + self.cfg.norm_eps)
        return (normed * scale_D[:, None]).astype(x_DN.dtype)

    def _qkv(self, w: Weights, x_DN, rope, shape, linear):
        cfg = self.cfg
        qkv_XN = linear(w["qkv"], self._norm(x_DN, w["attention_norm"]))
        heads = qkv_XN.T.reshape(*shape, cfg.num_heads + 2 * cfg.num_kv_heads, cfg.head_dim)
        q, k, v = jnp.split(heads, [cfg.num_heads, cfg.num_heads + cfg.num_kv_heads], axis=2)
        if cfg.qk_norm:
            q, k = rms_norm(q, w["query_norm"], cfg.norm_eps), rms_norm(k, w["key_norm"], cfg.norm_eps)
        return rotate(q, *rope), rotate(k, *rope), v

    def write(self, cache, kv, row_B, cursor_B, count_B):
        shape = kv[0][0].shape[:2]
        row_BR = jnp.broadcast_to(row_B[:, None], shape)
        index_BR = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        # Entries that are not kept aim past the last slot and are dropped: nothing is clamped onto good slots.
        slot_BR = jnp.where(index_BR < count_B[:, None], cursor_B[:, None] + index_BR, cache[0][1].shape[2])
        return tuple(
            (
                k_BKES.at[row_BR, :, :, slot_BR].set(k, mode="drop"),
                v_BKSE.at[row_BR, :, slot_BR].set(v, mode="drop"),
            )
            for (k_BKES, v_BKSE), (k, v) in zip(cache, kv, strict=True)
        )

    def logits(self, weights: Weights, hidden_BXD):
        batch, count, _ = hidden_BXD.shape
        head = weights.get("head", {"kernel": weights["embedding"]})
        logits_VN = _product(head, hidden_BXD.reshape(batch * count, -1).T)
        return logits_VN.T.reshape(batch, count, -1)


def _linear(w: Weights, x_IN: jax.Array, gate_N: jax.Array | None) -> jax.Array:
    """gate_N: the placeholders, where a mask-gated update of `w` acts."""
    y_ON = _product(w, x_IN)
    y_ON = (y_ON + w["bias"] if "bias" in w else y_ON).astype(x_IN.dtype)  # a float32 bias would widen what follows
    if "lora" not in w:
        return y_ON
    update_ON = _widened(w["lora"]["b"], _widened(w["lora"]["a"], x_IN).astype(x_IN.dtype)).astype(x_IN.dtype)
    return jnp.where(gate_N[None], y_ON + update_ON, y_ON)


def _product(w: Weights, x_IN: jax.Array) -> jax.Array:
    """Float32 `kernel @ x`; a kernel of a narrower type is widened as it is read."""
    kernel_OI = w["kernel"]
    if kernel_OI.dtype != jnp.int8:
        return jax.lax.platform_dependent(kernel_OI, x_IN, cpu=_widened_evenly, default=_widened)
    return jax.lax.platform_dependent(kernel_OI, x_IN, cpu=_widened_by_chunks, default=_widened) * w["scale"]


def _widened(kernel_OI: jax.Array, x_IN: jax.Array) -> jax.Array:
    return jnp.matmul(kernel_OI.astype(x_IN.dtype), x_IN, preferred_element_type=jnp.float32)


def _widened_evenly(kernel_OI: jax.Array, x_IN: jax.Array) -> jax.Array:
    """With columns in multiples of eight, which XLA's CPU products handle a fifth faster than those in between."""
    columns = x_IN.shape[1]
    if columns <= 5:
        return _widened(kernel_OI, x_IN)
    return _widened(kernel_OI, jnp.pad(x_IN, ((0, 0), (0, -columns % 8))))[:, :columns]


def _widened_by_chunks(kernel_OI: jax.Array, x_IN: jax.Array) -> jax.Array:
    """Chunks that stay in a core's cache: else XLA widens all kernels at once and keeps them."""
    outputs, columns = kernel_OI.shape[0], x_IN.shape[1]
    if columns == 1:  # the matrix-vector product would widen each number on its own, many times as slow
        x_IN = jnp.concatenate([x_IN, x_IN], axis=1)
    least = max(2, kernel_OI.size // CHUNK)
    chunks = next(n for n in range(least, outputs + 1) if outputs % n == 0)
    y_CON = jax.lax.map(lambda k: _widened(k, x_IN), kernel_OI.reshape(chunks, outputs // chunks, -1))
    return y_CON.reshape(outputs, -1)[:, :columns]


def _masks(visibility: Tokens, cache, cursor_B):
    """Who sees whom: `(cached_BTS or None, own_BTT)`."""
    own_BTT = visible(visibility, visibility)
    if cache is None:
        return None, own_BTT
    batch, _, slots, _ = cache[0][1].shape
    slot_BS = jnp.broadcast_to(jnp.arange(slots), (batch, slots))
    filled = public((slot_BS < cursor_B[:, None]).astype(jnp.int32), slot_BS)
    return visible(visibility, filled), own_BTT


def _attention(q_BTHE, k_BTKE, v_BTKE, cache, masks) -> jax.Array:
    """`models.attention.dense_attention` over cached and own keys in one softmax, without repeating heads."""
    batch, width, heads, head_dim = q_BTHE.shape
    kv_heads = k_BTKE.shape[2]
    grouped = (batch, width, kv_heads, heads // kv_heads, head_dim)
    # Queries of one kv head side by side: a batch of plain matrix products over (B, K).
    q_BKXE = q_BTHE.reshape(grouped).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)

    def scores(keys_BKES, mask_BTS):
        s = jnp.matmul(q_BKXE, keys_BKES, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
        s = s.reshape(batch, kv_heads, -1, width, s.shape[-1])
        return jnp.where(mask_BTS[:, None, None], s, MASKED).reshape(batch, kv_heads, -1, s.shape[-1])

    parts = [(scores(k_BTKE.transpose(0, 2, 3, 1), masks[1]), v_BTKE.transpose(0, 2, 1, 3))]
    if cache is not None:
        parts.append((scores(cache[0], masks[0]), cache[1]))
    peak = jnp.max(jnp.stack([s.max(-1) for s, _ in parts]), axis=0)[..., None]
    # A padding query sees nothing and gets some finite average; nobody reads it.
    weights = [jnp.exp(s - peak) for s, _ in parts]
    total = sum(w.sum(-1, keepdims=True) for w in weights)
    out = sum(
        jnp.matmul(w.astype(v.dtype), v, preferred_element_type=jnp.float32)
        for w, (_, v) in zip(weights, parts, strict=True)
    )
    out_BKGTE = (out / total).reshape(batch, kv_heads, -1, width, head_dim)
    return out_BKGTE.transpose(0, 3, 1, 2, 4).reshape(batch, width, -1).astype(q_BTHE.dtype)
