"""The two streams of a training row: clean tokens, then the noisy stream's placeholders, and what each must predict.

Host code on numpy arrays, one packed row at a time. The result is a `Batch` row of fixed shape; `visibility.visible`
turns its integers into the attention mask, `losses` its entries into the loss. Source: MARS, sections 3.1 and 3.2.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from mars_jax.objective.visibility import Tokens


@dataclass(frozen=True)
class Row:
    """One row of packed chats (no padding).

    tokens:   `[n]` ids.
    segment:  `[n]` chat number from 1, non-decreasing.
    position: `[n]` position inside the chat, from 0.
    spans:    `[k, 2]` half-open row indices of the trained spans (one an assistant turn), ascending.
    """

    tokens: np.ndarray
    segment: np.ndarray
    position: np.ndarray
    spans: np.ndarray


@dataclass(frozen=True)
class StreamConfig:
    """How a row becomes two streams.

    recipe:          `ar_sft` (no noisy stream), `mars`, `mars_mask_only` or `block_diffusion`.
    block_size:      B of the paper.
    masks_per_block: B-1 (`within`) or B (`shifted`); ignored by `block_diffusion`.
    anchor:          `response` cuts blocks from each span's first token, `sequence` from position 0 of the chat.
    row_length:      clean tokens of a row; noisy_length: placeholders of a row (see `noisy_capacity`).
    block_fraction:  share of the row's blocks trained at a time, drawn fresh; their mask weights grow by its inverse.
    random_offset:   draw where each span's first block ends, so that every cursor position is trained.
    mask_id:         the id of `[MASK]`.
    """

    recipe: str
    block_size: int
    masks_per_block: int
    anchor: str
    row_length: int
    noisy_length: int
    mask_id: int
    block_fraction: float = 1.0
    random_offset: bool = False

    @property
    def shifted(self) -> bool:
        return self.masks_per_block == self.block_size

    @property
    def length(self) -> int:
        """Tokens of both streams in a row (T)."""
        return self.row_length + (0 if self.recipe == "ar_sft" else self.noisy_length)

    @property
    def entries(self) -> int:
        """Loss entries of a row (M): one a trained token and one a placeholder, at most."""
        return self.length


class Batch(NamedTuple):
    """Arrays of a (micro-)batch; leading axis B once rows are stacked.

    tokens:      `[T]` ids of the clean stream, then of the noisy stream, padded.
    visibility:  `Tokens`, each `[T]`.
    source:      `[M]` index into T of the hidden state that predicts.
    target:      `[M]` id to predict.
    weight_ar, weight_mask: `[M]` float32 weights in L_AR and L_mask; both 0 past the last entry.
    offset:      `[M]` number of placeholders the prediction looked through (0: plain AR).
    trained:     `[]` trained tokens of the row, the loss denominator's share.
    """

    tokens: np.ndarray
    visibility: Tokens
    source: np.ndarray
    target: np.ndarray
    weight_ar: np.ndarray
    weight_mask: np.ndarray
    offset: np.ndarray
    trained: np.ndarray


class Block(NamedTuple):
    """Row indices `start … stop-1` whose placeholders see each other."""

    start: int
    stop: int


def noisy_capacity(recipe: str, row_length: int, block_size: int, masks_per_block: int, anchor: str) -> int:
    """Noisy-stream tokens that a full row can need when every block is trained."""
    if recipe == "ar_sft":
        return 0
    within = recipe != "block_diffusion" and masks_per_block < block_size
    if within and anchor == "response":
        return row_length - -(-row_length // block_size)
    return row_length


def cut_blocks(row: Row, cfg: StreamConfig, rng: np.random.Generator) -> list[Block]:
    """The blocks of the row that hold trained tokens, in order. See `anchor` in `StreamConfig`."""
    blocks = []
    for start, stop in row.spans.tolist():
        if cfg.anchor == "response":
            first_cut = start - (int(rng.integers(cfg.block_size)) if cfg.random_offset else 0)
            lowest, highest = start, stop
        else:
            lowest = start - int(row.position[start])
            highest = lowest + int((row.segment == row.segment[start]).sum())
            first_cut = start - int(row.position[start]) % cfg.block_size
        for cut in range(first_cut, stop, cfg.block_size):
            block = Block(max(cut, lowest), min(cut + cfg.block_size, highest))
            if not blocks or blocks[-1] != block:  # two spans may share a block of a sequence anchor
                blocks.append(block)
    return blocks


def _choose_blocks(blocks: list[Block], cfg: StreamConfig, rng: np.random.Generator) -> tuple[list[Block], float]:
    """A uniform subset of the blocks and the weight that keeps the mask loss unbiased."""
    if cfg.block_fraction >= 1.0 or not blocks:
        return blocks, 1.0
    fits = cfg.noisy_length // cfg.block_size
    count = max(1, min(math.ceil(cfg.block_fraction * len(blocks)), fits))
    chosen = sorted(rng.choice(len(blocks), size=count, replace=False).tolist())
    return [blocks[i] for i in chosen], len(blocks) / count


class _Noisy(NamedTuple):
    """The noisy stream: row index of the token stood for, id, group, limit and order of each placeholder."""

    index: np.ndarray
    token: np.ndarray
    group: np.ndarray
    limit: np.ndarray
    order: np.ndarray


class _Entries(NamedTuple):
    """Loss entries; fields as in `Batch`."""

    source: np.ndarray
    target: np.ndarray
    weight_ar: np.ndarray
    weight_mask: np.ndarray
    offset: np.ndarray


_NOTHING = np.zeros(0, np.int32)
_NO_NOISE = _Noisy(*[_NOTHING] * 5)
_NO_ENTRIES = _Entries(*[_NOTHING] * 5)


def build_streams(row: Row, cfg: StreamConfig, rng: np.random.Generator) -> Batch:
    """Both streams and the loss entries of one row, padded to the shapes of `cfg`.

    `rng` draws sampled blocks, offsets and block-diffusion noise; recipes without these do not touch it.
    Raises ValueError when the row exceeds `row_length` or its placeholders exceed `noisy_length`.
    """
    n = len(row.tokens)
    if n > cfg.row_length:
        raise ValueError(f"row has {n} tokens but row_length is {cfg.row_length}: pack or truncate it first")
    trained = np.zeros(n, bool)
    span_end = np.zeros(n, np.int64)  # of the span that holds the token
    for start, stop in row.spans.tolist():
        trained[start:stop] = True
        span_end[start:stop] = stop
    if (row.position[trained] == 0).any():
        raise ValueError("a trained token at position 0 has no left neighbour to predict it: spans must start later")

    noisy, entries, mask_weight = _NO_NOISE, _NO_ENTRIES, np.zeros(n)
    if cfg.recipe != "ar_sft" and trained.any():
        blocks = cut_blocks(row, cfg, rng)
        chosen, scale = _choose_blocks(blocks, cfg, rng)
        if cfg.recipe == "block_diffusion":
            noisy, entries = _diffused_blocks(row, cfg, rng, chosen, scale, trained)
        else:
            noisy, entries = _masked_blocks(row, cfg, chosen, scale, trained, span_end)
            mask_weight = _clean_mask_weights(cfg, blocks, chosen, scale, trained)
    if len(noisy.index) > cfg.noisy_length:
        raise ValueError(
            f"row needs {len(noisy.index)} placeholders but noisy_length is {cfg.noisy_length}: "
            "raise objective.noisy_length or lower objective.block_fraction"
        )
    t = np.flatnonzero(trained)
    ar_weight = 0.0 if cfg.recipe in ("mars_mask_only", "block_diffusion") else 1.0
    clean = _Entries(t - 1, row.tokens[t], np.full(len(t), ar_weight), mask_weight[t], np.zeros(len(t)))
    return _padded(row, cfg, noisy, _Entries(*map(np.concatenate, zip(entries, clean, strict=True))), len(t))


def _spread(blocks: list[Block]):
    """For every token of the blocks, in order: its row index, block number, block's start and block's stop; and the
    place of each block's first token in these arrays."""
    starts, stops = np.array(blocks).T
    sizes = stops - starts
    first = np.cumsum(sizes) - sizes
    number = np.repeat(np.arange(len(blocks)), sizes)
    index = np.arange(sizes.sum()) - first[number] + starts[number]
    return index, number, starts[number], stops[number], first


def _masked_blocks(row, cfg, blocks, scale, trained, span_end) -> tuple[_Noisy, _Entries]:
    """Causal placeholders; the one standing at p predicts p+1. Those after a block's last target are not built."""
    p, number, start, stop, first = _spread(blocks)
    target = np.minimum(p + 1, len(trained) - 1)
    predicts = (p + 1 < len(trained)) & trained[target] & (row.segment[target] == row.segment[p])
    predicts &= (target < stop) | cfg.shifted
    if cfg.anchor == "response":
        predicts &= target < span_end[start]
    last = np.maximum.reduceat(np.where(predicts, p, -1), first)
    seen = np.cumsum(trained[p])
    seen -= (seen[first] - trained[p[first]])[number]

    kept = p <= last[number]
    token = np.where(trained[p], cfg.mask_id, row.tokens[p])
    columns = (p, token, number + 1, row.position[start], row.position[p])
    noisy = _Noisy(*(column[kept] for column in columns))
    predicts, target, seen = predicts[kept], target[kept], seen[kept]
    source = cfg.row_length + np.flatnonzero(predicts)
    zero, weight = np.zeros(len(source)), np.full(len(source), scale)
    return noisy, _Entries(source, row.tokens[target[predicts]], zero, weight, seen[predicts])


def _clean_mask_weights(cfg, blocks, chosen, scale, trained) -> np.ndarray:
    """Weight in L_mask of clean-stream predictions.

    within: the first token of each chosen block. shifted: tokens that follow a block without trained tokens (only a
    sequence anchor has them); the reference predicts them from a noisy copy of the clean stream: the same number.
    """
    weights = np.zeros(len(trained))
    if not cfg.shifted:
        starts = [block.start for block in chosen]
        weights[starts] = scale * trained[starts]
    elif cfg.anchor == "sequence":
        starts = sorted({block.start for block in blocks} - {block.stop for block in blocks})
        weights[starts] = trained[starts]
    return weights


def _diffused_blocks(row, cfg, rng, blocks, scale, trained) -> tuple[_Noisy, _Entries]:
    """Bidirectional blocks, each with a random mask rate; a placeholder predicts its own token (arXiv 2503.09573)."""
    p, number, start, _, first = _spread(blocks)
    rate = rng.uniform(1e-3, 1.0, len(blocks))[number]
    masked = trained[p] & (rng.random(len(p)) < rate)
    token = np.where(masked, cfg.mask_id, row.tokens[p])
    noisy = _Noisy(p, token, number + 1, row.position[start], np.zeros(len(p)))
    source = cfg.row_length + np.flatnonzero(masked)
    count = np.add.reduceat(masked.astype(int), first)[number]
    zero = np.zeros(len(source))
    return noisy, _Entries(source, row.tokens[p[masked]], zero, scale / rate[masked], count[masked])


def _padded(row: Row, cfg: StreamConfig, noisy: _Noisy, entries: _Entries, trained: int) -> Batch:
    clean_pad = np.zeros(cfg.row_length - len(row.tokens))
    noisy_pad = np.zeros(cfg.length - cfg.row_length - len(noisy.index))

    def both(clean, noisy_values):
        return np.concatenate([clean, clean_pad, noisy_values, noisy_pad]).astype(np.int32)

    visibility = Tokens(
        segment=both(row.segment, row.segment[noisy.index]),
        position=both(row.position, row.position[noisy.index]),
        group=both(np.zeros(len(row.tokens)), noisy.group),
        limit=both(row.position + 1, noisy.limit),
        order=both(row.position, noisy.order),
    )
    used = (entries.weight_ar > 0) | (entries.weight_mask > 0)

    def column(values, dtype):
        result = np.zeros(cfg.entries, dtype)
        result[: used.sum()] = values[used]
        return result

    return Batch(
        tokens=both(row.tokens, noisy.token),
        visibility=visibility,
        source=column(entries.source, np.int32),
        target=column(entries.target, np.int32),
        weight_ar=column(entries.weight_ar, np.float32),
        weight_mask=column(entries.weight_mask, np.float32),
        offset=column(entries.offset, np.int32),
        trained=np.asarray(trained, np.int32),
    )


def stack(rows: list[Batch]) -> Batch:
    """Rows of one batch on a leading axis B."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def empty_row(cfg: StreamConfig) -> Batch:
    """A row of padding: contributes nothing to any sum."""
    row = Row(_NOTHING, _NOTHING, _NOTHING, np.zeros((0, 2), np.int32))
    return _padded(row, cfg, _NO_NOISE, _NO_ENTRIES, 0)
