"""Attention that computes only the tiles in which something is visible, in plain jax.numpy; no `[T, T]` array is held.

The sequence is cut into tiles of `tile` tokens. A list of the (query tile, key tile) pairs in which something is
visible is made once a step from the visibility integers; forward and backward loop over that list, as often as it is
long. The softmax is accumulated tile by tile, and the backward pass recomputes it from the saved log-sum-exp (Rabe and
Staats 2021; Dao et al. 2022).

Axes: B batch row, N tile of a row, t token in a tile, T tokens, K kv heads, G heads per kv head, H = K * G, E head dim.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.models.attention import MASKED
from mars_jax.objective.visibility import Tokens, visible

TILE = 64


class TilePlan(NamedTuple):
    """Which tiles to compute. Every leaf has a leading axis that follows the batch, so a plan shards like its batch.

    tokens: `Tokens`, each `[B, N, t]`; padded up to whole tiles with segment 0.
    pairs:  `[B * N * N]` tile pairs to compute, front-packed, as indices into `[B, N, N]`.
    count:  `[1]` how many of them there are.
    """

    tokens: Tokens
    pairs: jax.Array
    count: jax.Array


def tile_map(tokens_BNt: Tokens) -> jax.Array:
    """`[B, N, N]` True where some query of the first tile sees some key of the second."""

    def queries_tile(q_Bt):
        return visible(jax.tree.map(lambda a: a[:, None], q_Bt), tokens_BNt).any((-2, -1))

    by_tile = jax.tree.map(lambda a: a.swapaxes(0, 1), tokens_BNt)
    return jax.lax.map(queries_tile, by_tile).swapaxes(0, 1)


def plan_tiles(visibility: Tokens, tile: int = TILE) -> TilePlan:
    """The tiles of a batch of rows, from visibility integers `[B, T]`."""
    length = visibility.segment.shape[1]
    tile = min(tile, length)
    padded = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, -length % tile))), visibility)
    tokens = jax.tree.map(lambda a: a.reshape(a.shape[0], -1, tile), padded)
    useful = tile_map(tokens).reshape(-1)
    (pairs,) = jnp.nonzero(useful, size=useful.size, fill_value=0)
    return TilePlan(tokens, pairs.astype(jnp.int32), useful.sum(dtype=jnp.int32)[None])


def _tiled(x_BTXE: jax.Array, heads: int, tile: int) -> jax.Array:
    """`[B, T, X, E]` as `[B * N, heads, X / heads * t, E]`: query heads of one kv head are stacked into one matrix."""
    length = x_BTXE.shape[1]
    x = jnp.pad(x_BTXE, ((0, 0), (0, -length % tile), (0, 0), (0, 0)))
    b, padded, x_heads, e = x.shape
    x = x.reshape(b, padded // tile, tile, heads, x_heads // heads, e)
    return x.transpose(0, 1, 3, 4, 2, 5).reshape(b * padded // tile, heads, -1, e)


def _untiled(x: jax.Array, like_BTXE: jax.Array, tile: int) -> jax.Array:
    b, length, heads, e = like_BTXE.shape
    kv_heads = x.shape[1]
    x = x.reshape(b, -1, kv_heads, heads // kv_heads, tile, e).transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(b, -1, heads, e)[:, :length].astype(like_BTXE.dtype)


def _pair(plan: TilePlan, step: jax.Array):
    """Query tile, key tile (rows of the tiled arrays) and mask `[t, t]` of one step of the loop."""
    _, n, _ = plan.tokens.segment.shape
    row, pair = jnp.divmod(plan.pairs[step], n * n)
    i, j = row * n + pair // n, row * n + pair % n
    flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), plan.tokens)
    mask = visible(jax.tree.map(lambda a: a[i], flat), jax.tree.map(lambda a: a[j], flat))
    return i, j, mask


def _scores(q, k, mask):
    """Scaled, masked float32 scores `[K, G * t, t]`."""
    scores = jnp.einsum("KqE,KsE->Kqs", q, k, preferred_element_type=jnp.float32)
    groups = q.shape[1] // mask.shape[0]
    return jnp.where(jnp.tile(mask, (groups, 1)), scores / math.sqrt(q.shape[-1]), MASKED)


def _forward(q_BTHE, k_BTKE, v_BTKE, plan: TilePlan):
    tile, kv_heads = plan.tokens.segment.shape[-1], k_BTKE.shape[2]
    q, k, v = (_tiled(x, kv_heads, tile) for x in (q_BTHE, k_BTKE, v_BTKE))

    def step(index, state):
        peak, total, out = state
        i, j, mask = _pair(plan, index)
        scores = _scores(q[i], k[j], mask)
        new_peak = jnp.maximum(peak[i], scores.max(-1))
        # A query with no visible key so far has new_peak = MASKED and would weigh its masked keys by exp(0).
        weights = jnp.where(scores > MASKED, jnp.exp(scores - new_peak[..., None]), 0.0)
        decay = jnp.exp(peak[i] - new_peak)
        mixed = jnp.einsum("Kqs,KsE->KqE", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
        return (
            peak.at[i].set(new_peak),
            total.at[i].set(total[i] * decay + weights.sum(-1)),
            out.at[i].set(out[i] * decay[..., None] + mixed),
        )

    rows = q.shape[:-1]
    start = (jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros(q.shape, jnp.float32))
    peak, total, out = jax.lax.fori_loop(0, plan.count[0], step, start)
    seen = total > 0
    safe_total = jnp.where(seen, total, 1.0)
    out = _untiled(out / safe_total[..., None], q_BTHE, tile)
    # +inf makes the recomputed weights of a query that sees nothing exp(-inf) = 0.
    log_total = jnp.where(seen, peak + jnp.log(safe_total), jnp.inf)
    return out, log_total


@jax.custom_vjp
def blockwise_attention(q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array, plan: TilePlan) -> jax.Array:
    """Grouped-query attention over the planned tiles. Returns `[B, T, H, E]` in q's dtype; equals `dense_attention`.

    A query that may see nothing gets zeros and zero gradient. Softmax and accumulators are float32.
    """
    return _forward(q_BTHE, k_BTKE, v_BTKE, plan)[0]


def _save(q, k, v, plan):
    out, log_total = _forward(q, k, v, plan)
    return out, (q, k, v, plan, out, log_total)


def _backward(saved, grad_BTHE):
    q_BTHE, k_BTKE, v_BTKE, plan, out_BTHE, log_total = saved
    tile, kv_heads = plan.tokens.segment.shape[-1], k_BTKE.shape[2]
    q, k, v, out, grad = (_tiled(x, kv_heads, tile) for x in (q_BTHE, k_BTKE, v_BTKE, out_BTHE, grad_BTHE))
    scale = 1.0 / math.sqrt(q.shape[-1])
    # Row sums of weights * d_weights, without the weights.
    shared = jnp.einsum("...E,...E->...", out, grad, preferred_element_type=jnp.float32)

    def step(index, grads):
        dq, dk, dv = grads
        i, j, mask = _pair(plan, index)
        weights = jnp.exp(_scores(q[i], k[j], mask) - log_total[i][..., None])
        d_weights = jnp.einsum("KqE,KsE->Kqs", grad[i], v[j], preferred_element_type=jnp.float32)
        d_scores = (weights * (d_weights - shared[i][..., None]) * scale).astype(q.dtype)
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        return (
            dq.at[i].add(product("Kqs,KsE->KqE", d_scores, k[j])),
            dk.at[j].add(product("Kqs,KqE->KsE", d_scores, q[i])),
            dv.at[j].add(product("Kqs,KqE->KsE", weights.astype(grad.dtype), grad[i])),
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    dq, dk, dv = jax.lax.fori_loop(0, plan.count[0], step, zeros)
    return _untiled(dq, q_BTHE, tile), _untiled(dk, k_BTKE, tile), _untiled(dv, v_BTKE, tile), None


blockwise_attention.defvjp(_save, _backward)


def make_attend(batch, tile: int = TILE):
    """`attend` for a batch, as `objective.losses.dense_attend`: the same numbers for the cost of the useful tiles."""
    plan = plan_tiles(batch.visibility, tile)

    def attend(q, k, v):
        return blockwise_attention(q, k, v, plan)

    return attend
