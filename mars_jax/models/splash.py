"""Attention on TPU by JAX's splash kernel, with the mask computed inside the kernel.

Splash computes a mask from a static function of a per-query integer and the key's index, and from equality of segment
ids. The visibility of a training row depends on its data, yet in a row laid out as `objective.streams` does, each query
sees two runs of key indices of its segment: the public tokens before a limit, and a stretch of its own group. Both
runs fit the bits of the query's integer, so no mask is ever stored, and tiles without a visible pair are skipped.

Layouts supported: all of `objective.streams` (public tokens first, each chat's and each group's tokens adjacent and in
order) with rows of at most 8064 tokens in both streams and groups of at most 32. Anything else belongs to
`models.blockwise`.

Axes: B batch row, N tile of a row, t token in a tile, T tokens, S keys, K kv heads, H heads, E head dim.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from mars_jax.models.blockwise import tile_map
from mars_jax.objective.visibility import Tokens

LANES = 128  # the kernel's tiles are multiples of this
INDEX_BITS, SPAN_BITS = 13, 5  # two indices and a length in the 31 bits of a non-negative int32
MAX_LENGTH = (1 << INDEX_BITS) - LANES
MAX_GROUP = 1 << SPAN_BITS


class SplashPlan(NamedTuple):
    """What the kernel needs of a batch; every leaf has the leading axis B. T is padded up to whole tiles.

    segment: `[B, T]` int32.
    runs:    `[B, T]` int32, the keys each query sees, encoded by `encode_runs`.
    useful:  `[B, N, N]` int32, 1 where a tile holds a visible pair.
    """

    segment: jax.Array
    runs: jax.Array
    useful: jax.Array


def encode_runs(limit: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Keys `0 … limit-1` and `start … start+count-1` in one int32; `count` is 1 … 32."""
    return limit | (start << INDEX_BITS) | ((count - 1) << (2 * INDEX_BITS))


def in_runs(runs: jax.Array, key_index: jax.Array) -> jax.Array:
    """Whether the key lies in one of the encoded runs: the mask function that is compiled into the kernel."""
    index_mask = (1 << INDEX_BITS) - 1
    limit, start = runs & index_mask, (runs >> INDEX_BITS) & index_mask
    span = runs >> (2 * INDEX_BITS)
    return (key_index < limit) | ((key_index >= start) & (key_index <= start + span))


def visible_runs(tokens: Tokens) -> jax.Array:
    """`[B, T]` encoded runs of visible keys. Padding sees itself: the kernel divides by the sum of the weights."""
    index_S = jnp.arange(tokens.segment.shape[1], dtype=jnp.int32)[None, None, :]
    query = jax.tree.map(lambda a: a[:, :, None], tokens)
    key = jax.tree.map(lambda a: a[:, None, :], tokens)
    same_segment = (key.segment == query.segment) & (key.segment > 0)
    public = same_segment & (key.group == 0)
    first = jnp.where(public, index_S, index_S.size).min(-1)
    seen = (public & (key.position < query.limit)).sum(-1, dtype=jnp.int32)
    grouped = tokens.group > 0
    own = same_segment & (key.group == query.group) & (key.order <= query.order)
    start = jnp.where(grouped, jnp.where(own, index_S, index_S.size).min(-1), index_S[0])
    count = jnp.where(grouped, own.sum(-1, dtype=jnp.int32), 1)
    return encode_runs(jnp.where(seen > 0, first + seen, 0), start, count)


def plan_tiles(visibility: Tokens, tile: int = LANES) -> SplashPlan:
    """Mask information of a batch of rows. Raises ValueError for rows that are too long to encode."""
    length = visibility.segment.shape[1]
    padded_length = length + -length % tile
    if padded_length > MAX_LENGTH:
        raise ValueError(
            f"splash attention encodes at most {MAX_LENGTH} tokens a row, both streams together, but got {length}: "
            "use objective.attention=blockwise or shorter rows"
        )
    tokens = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, padded_length - length))), visibility)
    useful = tile_map(jax.tree.map(lambda a: a.reshape(a.shape[0], -1, tile), tokens))
    itself = jnp.eye(padded_length // tile, dtype=bool)[None]
    return SplashPlan(tokens.segment, visible_runs(tokens), (useful | itself).astype(jnp.int32))


def _mask_info(plan: SplashPlan, query_axis_moves: bool) -> MaskInfo:
    """One row's tiles. A skipped tile names the tile before it, so that nothing new is fetched for it."""
    axis = 0 if query_axis_moves else 1
    index = jax.lax.broadcasted_iota(jnp.int32, plan.useful.shape, axis)
    fetched = jax.lax.cummax(jnp.where(plan.useful > 0, index, 0), axis)
    return MaskInfo(
        data_next=fetched[None],
        mask_next=None,
        block_mask=plan.useful[None],
        partial_mask_blocks=None,
        q_sequence=plan.runs,
    )


def splash_attention(
    q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array, plan: SplashPlan, *, interpret: bool = False
) -> jax.Array:
    """Grouped-query attention by the splash kernel. Returns `[B, T, H, E]` in q's dtype; equals `dense_attention`.

    Padding gets zeros and zero gradient. `interpret` runs the kernel's program on any device, slowly.
    """
    length, padded = q_BTHE.shape[1], plan.segment.shape[1]
    tile = padded // plan.useful.shape[-1]

    def heads_first(x_BTXE):
        return jnp.pad(x_BTXE, ((0, 0), (0, padded - length), (0, 0), (0, 0))).swapaxes(1, 2)

    def one_row(q_HTE, k_KTE, v_KTE, plan):
        attention = kernel.SplashAttentionKernel(
            fwd_mask_info=_mask_info(plan, query_axis_moves=False),
            dq_mask_info=_mask_info(plan, query_axis_moves=False),
            dkv_mask_info=_mask_info(plan, query_axis_moves=True),
            block_sizes=kernel.BlockSizes(*(tile,) * 8),
            is_mqa=False,
            save_residuals=False,
            mask_value=kernel.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            residual_checkpoint_name=None,
            mask_function=in_runs,
            interpret=interpret,
        )
        return attention(q_HTE, k_KTE, v_KTE, kernel.SegmentIds(plan.segment, plan.segment))

    scaled = (q_BTHE * (1.0 / math.sqrt(q_BTHE.shape[-1]))).astype(q_BTHE.dtype)  # the kernel does not scale scores
    out = jax.vmap(one_row)(heads_first(scaled), heads_first(k_BTKE), heads_first(v_BTKE), plan)
    out = out.swapaxes(1, 2)[:, :length]
    return jnp.where(plan.segment[:, :length, None, None] > 0, out, 0)


def make_attend(batch, tile: int = LANES, interpret: bool = False):
    """`attend` for a batch, as `objective.losses.dense_attend`, on TPU."""
    plan = plan_tiles(batch.visibility, tile)

    def attend(q, k, v):
        return splash_attention(q, k, v, plan, interpret=interpret)

    return attend
