"""The packed rows of a run: made from chats in memory, or read from a prepared folder."""

import logging
from collections.abc import Sequence

from mars_jax.data.chat import Chat
from mars_jax.data.config import DataConfig
from mars_jax.data.encoding import DataReport, encode_all
from mars_jax.data.packing import best_room, make_row, pack, packed_tokens, placeholder_cost
from mars_jax.data.prepared import PreparedRows, fingerprint, is_prepared
from mars_jax.data.sources import Messages, held_out_chats, training_chats
from mars_jax.errors import UserError
from mars_jax.objective.streams import Row, StreamConfig, noisy_capacity

log = logging.getLogger("mars_jax.data")

SAMPLE = 512  # chats that advice on `noisy_length` is drawn from
WORTH_SAYING = 0.1  # share of a step's tokens that it would save


def training_rows(cfg: DataConfig, stream: StreamConfig, tokenizer) -> tuple[Sequence[Row], DataReport]:
    """Rows to train on, and what became of the chats they were made from."""
    if not is_prepared(cfg.path):
        rows, report = _packed(cfg.path, training_chats(cfg), cfg, stream, tokenizer)
        if cfg.pack and rows.chats:
            advise_room(rows.chats, stream)
        return rows, report
    if cfg.max_rows is not None:
        raise UserError(f"data.max_rows={cfg.max_rows} cannot cut the prepared rows of {cfg.path}: give it to prepare")
    rows = _prepared(cfg.path, cfg, stream, tokenizer)
    return rows, rows.report


def held_out_rows(cfg: DataConfig, stream: StreamConfig, tokenizer) -> tuple[Sequence[Row], DataReport]:
    """Rows to evaluate on."""
    if cfg.eval_path is None and is_prepared(cfg.path):
        raise UserError(f"no chats are held out of the prepared folder {cfg.path}: give data.eval_path")
    if cfg.eval_path is None or not is_prepared(cfg.eval_path):
        return _packed(cfg.eval_path or cfg.path, held_out_chats(cfg), cfg, stream, tokenizer)
    rows = _prepared(cfg.eval_path, cfg, stream, tokenizer)
    return rows, rows.report


class PackedChats(Sequence):
    """Rows of encoded chats held in memory; row i is made when asked for."""

    def __init__(self, chats: Sequence[Chat], rows: Sequence[Sequence[int]]):
        self.chats, self.rows = chats, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return make_row([self.chats[i] for i in self.rows[index]])


def advise_room(chats: Sequence[Chat], stream: StreamConfig) -> None:
    """Say which `objective.noisy_length` would save much work: room for placeholders is computed whether used or not.

    It is advice, not done by itself: a run that is continued on more chats must go on with the same rows.
    """
    if stream.recipe == "ar_sft":
        return
    sample = chats[:: -(-len(chats) // SAMPLE)]
    best = best_room(sample, stream, needed=max(placeholder_cost(chat, stream) for chat in chats))
    saved = 1 - packed_tokens(sample, best) / packed_tokens(sample, stream)
    if saved > WORTH_SAYING:
        log.warning(
            "objective.noisy_length=%d, in place of %d, would pack these chats into %.0f %% fewer tokens a pass",
            best.noisy_length, stream.noisy_length, 100 * saved,
        )  # fmt: skip


def _packed(source: str, chats: Sequence[Messages], cfg: DataConfig, stream: StreamConfig, tokenizer):
    encoded, counts = encode_all(chats, stream, tokenizer)
    packed = pack(encoded, stream) if cfg.pack else [[i] for i in range(len(encoded))]
    report = DataReport.of(source, len(chats), encoded, counts, len(packed), stream.row_length)
    return PackedChats(encoded, packed), report


def _prepared(path: str, cfg: DataConfig, stream: StreamConfig, tokenizer) -> PreparedRows:
    """Raises UserError where the folder was made for another tokenizer or other rows."""
    rows = PreparedRows(path)
    made = rows.settings
    if made.tokenizer != fingerprint(tokenizer):
        raise UserError(f"{path} was prepared with another tokenizer or chat template: prepare it again with this one")
    if made.row_length > stream.row_length:
        raise UserError(
            f"{path} has rows of {made.row_length} tokens, objective.row_length is {stream.row_length}: make them equal"
        )
    if made.pack != cfg.pack:
        raise UserError(f"{path} was prepared with pack={made.pack}, data.pack is {cfg.pack}: make them equal")
    needed = noisy_capacity(stream.recipe, made.row_length, stream.block_size, stream.masks_per_block, stream.anchor)
    if stream.block_fraction == 1.0 and stream.noisy_length < needed:
        raise UserError(
            f"objective.noisy_length={stream.noisy_length}: rows prepared with {made.row_length} tokens may need "
            f"{needed}; leave it out, or lower objective.block_fraction"
        )
    return rows
