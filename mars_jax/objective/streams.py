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


class _Entries:
    """Loss entries under construction."""

    def __init__(self):
        self.rows: list[list[float]] = []

    def add(self, source: int, target: int, weight_ar: float, weight_mask: float, offset: int):
        if weight_ar or weight_mask:
            self.rows.append([source, target, weight_ar, weight_mask, offset])


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
    if trained.any() and (row.position[trained] == 0).any():
        raise ValueError("a trained token at position 0 has no left neighbour to predict it: spans must start later")

    noisy: list[tuple[int, int, int, int, int]] = []  # (row index, token, group, limit, order)
    entries = _Entries()
    ar_weight = 0.0 if cfg.recipe in ("mars_mask_only", "block_diffusion") else 1.0
    mask_weight = np.zeros(n)  # weight in L_mask of the clean stream's prediction of each trained token

    if cfg.recipe != "ar_sft":
        blocks = cut_blocks(row, cfg, rng)
        chosen, scale = _choose_blocks(blocks, cfg, rng)
        if cfg.recipe == "block_diffusion":
            _add_diffused_blocks(row, cfg, rng, chosen, scale, trained, noisy, entries)
        else:
            _add_masked_blocks(row, cfg, chosen, scale, trained, span_end, noisy, entries)
            mask_weight = _clean_mask_weights(row, cfg, blocks, chosen, scale, trained)
    if len(noisy) > cfg.noisy_length:
        raise ValueError(
            f"row needs {len(noisy)} placeholders but noisy_length is {cfg.noisy_length}: "
            "raise objective.noisy_length or lower objective.block_fraction"
        )
    for t in np.flatnonzero(trained).tolist():
        entries.add(t - 1, int(row.tokens[t]), ar_weight, float(mask_weight[t]), 0)
    return _padded(row, cfg, noisy, entries, int(trained.sum()))


def _add_masked_blocks(row, cfg, blocks, scale, trained, span_end, noisy, entries):
    """Causal placeholders; the one standing at p predicts p+1."""
    for group, (start, stop) in enumerate(blocks, 1):
        targets = np.arange(start + 1, stop + 1 if cfg.shifted else stop)
        targets = targets[targets < len(trained)]
        targets = targets[trained[targets] & (row.segment[targets] == row.segment[start])]
        if cfg.anchor == "response":
            targets = targets[targets < span_end[start]]
        if not len(targets):
            continue
        placeholders_seen = 0
        wanted = set(targets.tolist())
        for p in range(start, int(targets[-1])):
            if trained[p]:
                placeholders_seen += 1
            token = cfg.mask_id if trained[p] else int(row.tokens[p])
            if p + 1 in wanted:
                entries.add(cfg.row_length + len(noisy), int(row.tokens[p + 1]), 0.0, scale, placeholders_seen)
            noisy.append((p, token, group, int(row.position[start]), int(row.position[p])))


def _clean_mask_weights(row, cfg, blocks, chosen, scale, trained) -> np.ndarray:
    """Weight in L_mask of clean-stream predictions.

    within: the first token of each chosen block. shifted: tokens that follow a block without trained tokens (only a
    sequence anchor has them); the reference predicts them from a noisy copy of the clean stream: the same number.
    """
    weights = np.zeros(len(trained))
    if not cfg.shifted:
        for block in chosen:
            weights[block.start] = scale * trained[block.start]
    elif cfg.anchor == "sequence":
        ends = {block.stop for block in blocks}
        for block in blocks:
            if block.start not in ends:
                weights[block.start] = float(trained[block.start])
    return weights


def _add_diffused_blocks(row, cfg, rng, blocks, scale, trained, noisy, entries):
    """Bidirectional blocks, each with its random mask rate; a placeholder predicts its own token (arXiv 2503.09573)."""
    for group, (start, stop) in enumerate(blocks, 1):
        rate = float(rng.uniform(1e-3, 1.0))
        masked = trained[start:stop] & (rng.random(stop - start) < rate)
        for p in range(start, stop):
            token = int(row.tokens[p])
            if masked[p - start]:
                entries.add(cfg.row_length + len(noisy), token, 0.0, scale / rate, int(masked.sum()))
                token = cfg.mask_id
            noisy.append((p, token, group, int(row.position[start]), 0))


def _padded(row: Row, cfg: StreamConfig, noisy, entries: _Entries, trained: int) -> Batch:
    clean_pad = cfg.row_length - len(row.tokens)
    table = np.array(noisy, np.int32).reshape(-1, 5)
    index, noisy_tokens, group, limit, order = table.T
    noisy_pad = cfg.length - cfg.row_length - len(table)

    def both(clean, noisy_values):
        parts = [clean, np.zeros(clean_pad), noisy_values, np.zeros(noisy_pad)]
        return np.concatenate(parts).astype(np.int32)

    visibility = Tokens(
        segment=both(row.segment, row.segment[index]),
        position=both(row.position, row.position[index]),
        group=both(np.zeros(len(row.tokens)), group),
        limit=both(row.position + 1, limit),
        order=both(row.position, order),
    )
    columns = np.zeros((5, cfg.entries))
    filled = np.array(entries.rows, np.float64).reshape(-1, 5)
    columns[:, : len(filled)] = filled.T
    source, target, weight_ar, weight_mask, offset = columns
    return Batch(
        tokens=both(row.tokens, noisy_tokens),
        visibility=visibility,
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        weight_ar=weight_ar.astype(np.float32),
        weight_mask=weight_mask.astype(np.float32),
        offset=offset.astype(np.int32),
        trained=np.asarray(trained, np.int32),
    )


def stack(rows: list[Batch]) -> Batch:
    """Rows of one batch on a leading axis B."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def empty_row(cfg: StreamConfig) -> Batch:
    """A row of padding: contributes nothing to any sum."""
    nothing = np.zeros(0, np.int32)
    return _padded(Row(nothing, nothing, nothing, np.zeros((0, 2), np.int32)), cfg, [], _Entries(), 0)
