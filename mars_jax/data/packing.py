"""Rows of a fixed length filled with whole chats.

A row has room for so many clean tokens and so many placeholders (`StreamConfig.row_length`, `noisy_length`); both
budgets are kept. Chats become segments, which never see one another, so packing changes no loss.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mars_jax.data.chat import Chat
from mars_jax.objective.streams import Row, StreamConfig

OPEN_ROWS = 2048  # rows a chat is tried on: bounds the time per chat
NOISY_STEP = 16  # between two lengths that `best_room` tries


def fit(chat: Chat, cfg: StreamConfig) -> Chat | None:
    """The chat cut to what one row can hold; None when nothing trained is left of it.

    Tokens after the last trained one go in any case: nothing that is trained sees them.
    """
    low, high = 0, min(cfg.row_length, _last_trained(chat))
    if placeholder_cost(cut(chat, high), cfg) <= placeholder_budget(cfg):
        low = high
    while low < high:  # the cost never falls with the length
        middle = (low + high + 1) // 2
        if placeholder_cost(cut(chat, middle), cfg) <= placeholder_budget(cfg):
            low = middle
        else:
            high = middle - 1
    result = cut(chat, low)
    return result if result.trained else None


def cut(chat: Chat, length: int) -> Chat:
    """The chat's first `length` tokens, up to the last trained one among them."""
    spans = np.minimum(chat.spans, length)
    spans = spans[spans[:, 0] < spans[:, 1]]
    return Chat(chat.tokens[: spans[-1, 1] if len(spans) else 0], spans)


def _last_trained(chat: Chat) -> int:
    return int(chat.spans[-1, 1]) if len(chat.spans) else 0


def placeholder_budget(cfg: StreamConfig) -> float:
    """What the costs of a row's chats may add up to: placeholders, or blocks where only a share of them is trained."""
    return cfg.noisy_length // cfg.block_size if cfg.block_fraction < 1.0 else cfg.noisy_length


def placeholder_cost(chat: Chat, cfg: StreamConfig) -> float:
    """A bound on what `build_streams` needs for the chat, in the units of `placeholder_budget`."""
    if cfg.recipe == "ar_sft":
        return 0
    size = cfg.block_size
    if cfg.anchor == "response":
        spans = chat.spans
    else:  # blocks lie on a grid from the chat's first token and take in untrained neighbours
        grid = {(start // size, -(-stop // size)) for start, stop in chat.spans.tolist()}
        covered = sorted({block for first, last in grid for block in range(first, last)})
        spans = np.array([(b * size, min((b + 1) * size, len(chat.tokens))) for b in covered]).reshape(-1, 2)
    lengths = spans[:, 1] - spans[:, 0]
    if cfg.block_fraction < 1.0:
        return cfg.block_fraction * float((-(-lengths // size)).sum())
    if cfg.recipe == "block_diffusion" or cfg.shifted:
        return int(lengths.sum())
    return int((lengths - -(-lengths // size)).sum())


def pack(chats: Sequence[Chat], cfg: StreamConfig) -> list[list[int]]:
    """Which chats share a row: best fit, longest chat first. Indices into `chats`, which must have gone through `fit`.

    Depends on nothing but its arguments; every chat is in exactly one row.
    """
    lengths = np.array([len(chat.tokens) for chat in chats], np.int64)
    costs = np.array([placeholder_cost(chat, cfg) for chat in chats], np.float64)
    rows: list[list[int]] = []
    open_rows = np.zeros(0, np.int64)
    free_tokens, free_cost = np.zeros(len(chats), np.int64), np.zeros(len(chats))
    for chat in np.argsort(-lengths, kind="stable").tolist():
        fits = (free_tokens[open_rows] >= lengths[chat]) & (free_cost[open_rows] >= costs[chat])
        if fits.any():
            room = np.where(fits, free_tokens[open_rows], cfg.row_length + 1)
            row = int(open_rows[room.argmin()])
        else:
            row = len(rows)
            rows.append([])
            free_tokens[row], free_cost[row] = cfg.row_length, placeholder_budget(cfg)
            open_rows = np.append(open_rows, row)
        rows[row].append(chat)
        free_tokens[row] -= lengths[chat]
        free_cost[row] -= costs[chat]
        if len(open_rows) > OPEN_ROWS:
            open_rows = np.delete(open_rows, free_tokens[open_rows].argmin())
    return rows


def best_room(chats: Sequence[Chat], cfg: StreamConfig, needed: float | None = None) -> StreamConfig:
    """`cfg` with the `noisy_length` that packs the chats, none of them cut, into the fewest tokens of both streams.

    needed: the largest `placeholder_cost` of all chats where these are only a sample.
    """
    needed = max(placeholder_cost(chat, cfg) for chat in chats) if needed is None else needed
    if cfg.block_fraction < 1.0:
        needed = math.ceil(needed) * cfg.block_size  # counted in blocks
    least = -(-int(needed) // NOISY_STEP) * NOISY_STEP
    lengths = [*range(least, cfg.row_length, NOISY_STEP), cfg.row_length]
    return min((dataclasses.replace(cfg, noisy_length=n) for n in lengths), key=lambda s: packed_tokens(chats, s))


def packed_tokens(chats: Sequence[Chat], cfg: StreamConfig) -> int:
    """Tokens of both streams, empty places included, in the rows of these chats."""
    return len(pack(chats, cfg)) * cfg.length


def make_row(chats: Sequence[Chat]) -> Row:
    """The chats one after another, as segments 1, 2, …"""
    lengths = [len(chat.tokens) for chat in chats]
    starts = np.cumsum([0, *lengths[:-1]])
    return Row(
        tokens=np.concatenate([chat.tokens for chat in chats]),
        segment=np.repeat(np.arange(1, len(chats) + 1, dtype=np.int32), lengths),
        position=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        spans=np.concatenate([chat.spans + start for chat, start in zip(chats, starts, strict=True)]).astype(np.int32),
    )
