"""Sums of cross-entropies over loss entries, never holding the logits of a whole row.

Axes: B batch row, T tokens of both streams, M loss entries, C entries of a chunk, D model, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params
from mars_jax.objective.streams import Batch
from mars_jax.objective.visibility import Tokens, visible


class LossSums(NamedTuple):
    """Sums over a batch; divide by the global count of trained tokens. Float32 scalars, per-offset rows `[O]`.

    ar, mask:              weighted cross-entropies of L_AR and L_mask.
    ar_weight:             total weight of predictions with a fully clean history, in both losses (for the AR share).
    total_weight:          total weight of all predictions.
    correct_by_offset, entries_by_offset: top-1 hits and entries, by number of placeholders looked through.
    """

    ar: jax.Array
    mask: jax.Array
    ar_weight: jax.Array
    total_weight: jax.Array
    correct_by_offset: jax.Array
    entries_by_offset: jax.Array


def dense_attend(batch: Batch):
    """`attend` for a batch: the reference, with the whole `[B, T, T]` mask."""
    mask = visible(batch.visibility, batch.visibility)

    def attend(q, k, v):
        return dense_attention(q, k, v, mask)

    return attend


def loss_sums(
    params: Params,
    cfg: ModelConfig,
    batch: Batch,
    *,
    num_offsets: int,
    make_attend=dense_attend,
    dtype=jnp.float32,
    remat: bool = False,
    chunk: int = 256,
    offset_weights: tuple[float, ...] = (),
    distill: float = 0.0,
) -> LossSums:
    """Forward both streams once and sum the losses. `num_offsets`: rows of the per-offset counts (B + 1 is enough).

    offset_weights, distill: see `entry_sums`.
    """
    hidden_BTD = decoder.forward(
        params,
        cfg,
        batch.tokens,
        batch.visibility.position,
        make_attend(batch),
        gate_BT=update_gate(cfg, batch),
        dtype=dtype,
        remat=remat,
    )
    return entry_sums(
        params,
        cfg,
        hidden_BTD,
        batch,
        num_offsets=num_offsets,
        chunk=chunk,
        offset_weights=offset_weights,
        distill=distill,
    )


def update_gate(cfg: ModelConfig, batch: Batch) -> jax.Array | None:
    """`[B, T]`: where a mask-gated low-rank update acts; None if the model has no such update.

    On masks of the noisy stream alone: its copies of prompt tokens are what decoding has as public tokens.
    """
    if cfg.lora is None or not cfg.lora.gated:
        return None
    return (batch.tokens == cfg.lora.gate) & (batch.visibility.group > 0)


def teacher_index(visibility: Tokens, source_BM: jax.Array) -> jax.Array:
    """`[B, M]` index of the clean token where each source stands: it predicts the same token, from clean history."""
    segment, position = (jnp.take_along_axis(a, source_BM, axis=1) for a in (visibility.segment, visibility.position))
    same_segment = visibility.segment[:, None] == segment[..., None]
    same_place = same_segment & (visibility.position[:, None] == position[..., None])
    return jnp.argmax(same_place & (visibility.group == 0)[:, None], axis=-1)


def divergence(teacher_logits: jax.Array, logits: jax.Array) -> jax.Array:
    """KL(teacher, student) over the last axis, in nats; the teacher receives no gradient."""
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits), axis=-1)
    return (jnp.exp(teacher) * (teacher - jax.nn.log_softmax(logits, axis=-1))).sum(-1)


def entry_sums(
    params: Params,
    cfg: ModelConfig,
    hidden_BTD,
    batch: Batch,
    *,
    num_offsets: int,
    chunk: int,
    offset_weights: tuple[float, ...] = (),
    distill: float = 0.0,
) -> LossSums:
    """Losses of the entries from final hidden states; `chunk` entries per row go through the vocabulary at a time.

    offset_weights: factors of the mask loss for offsets 1, 2, …; the last one holds for all beyond, and none means 1.
    distill:        share of the mask loss of placeholders that is, in place of the cross-entropy, the divergence from
                    what the clean stream predicts for the same token.
    """
    count = batch.source.shape[1]
    chunk = min(chunk, count)
    pad = -count % chunk
    fields = (batch.source, batch.target, batch.weight_ar, batch.weight_mask, batch.offset)
    fields = tuple(jnp.pad(f, ((0, 0), (0, pad))) for f in fields)
    chunks = tuple(f.reshape(f.shape[0], -1, chunk).swapaxes(0, 1) for f in fields)

    @jax.checkpoint
    def one_chunk(entries) -> LossSums:
        source, target, weight_ar, weight_mask, offset = entries
        hidden = jnp.take_along_axis(hidden_BTD, source[..., None], axis=1)
        logits = decoder.unembed(params, cfg, hidden)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        used = ((weight_ar + weight_mask) > 0).astype(jnp.float32)
        mask_losses = losses
        if distill:
            teacher = teacher_index(batch.visibility, source)
            clean = jax.lax.stop_gradient(jnp.take_along_axis(hidden_BTD, teacher[..., None], axis=1))
            mixed = (1 - distill) * losses + distill * divergence(decoder.unembed(params, cfg, clean), logits)
            mask_losses = jnp.where(offset > 0, mixed, losses)
        if offset_weights:
            factors = jnp.array((1.0, *offset_weights), jnp.float32)
            weight_mask = weight_mask * factors[jnp.minimum(offset, len(offset_weights))]
        correct = used * (jnp.argmax(logits, axis=-1) == target)
        rows = jax.nn.one_hot(offset, num_offsets, dtype=jnp.float32)
        weight = weight_ar + weight_mask
        return LossSums(
            ar=(losses * weight_ar).sum(),
            mask=(mask_losses * weight_mask).sum(),
            ar_weight=(weight * (offset == 0)).sum(),
            total_weight=weight.sum(),
            correct_by_offset=(rows * correct[..., None]).sum((0, 1)),
            entries_by_offset=(rows * used[..., None]).sum((0, 1)),
        )

    zero = jnp.zeros((), jnp.float32)
    rows = jnp.zeros((num_offsets,), jnp.float32)
    nothing = LossSums(zero, zero, zero, zero, rows, rows)

    def step(total, entries):
        _, _, weight_ar, weight_mask, _ = entries
        used = jnp.any((weight_ar + weight_mask) > 0)  # entries are front-packed: later chunks are often empty
        sums = jax.lax.cond(used, one_chunk, lambda _: nothing, entries)
        return jax.tree.map(jnp.add, total, sums), None

    total, _ = jax.lax.scan(step, nothing, chunks)
    return total


def combine(sums: LossSums, trained: jax.Array, ar_weight: float) -> jax.Array:
    """`(L_mask + ar_weight · L_AR)`, both divided by the trained tokens of the whole global batch."""
    return (sums.mask + ar_weight * sums.ar) / trained
