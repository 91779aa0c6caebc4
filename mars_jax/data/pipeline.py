"""From chats to batches: encode, cut, pack, shuffle, build the two streams.

Which rows make up global batch number s depends on the data, the seed and s alone. A position in the data is therefore
one integer, the same on every process and for every number of processes, and any batch can be made on its own.
"""

import functools
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from mars_jax.data.chat import Chat, RefusedChatError, encode_chats
from mars_jax.data.config import DataConfig
from mars_jax.data.packing import fit, make_row, pack
from mars_jax.data.sources import Messages, held_out_chats, training_chats
from mars_jax.errors import UserError
from mars_jax.objective.streams import Batch, Row, StreamConfig, build_streams, empty_row, stack

log = logging.getLogger("mars_jax.data")

CHUNK = 512  # chats a call of the tokenizer


@dataclass(frozen=True)
class DataReport:
    """What became of the chats that were read.

    kept includes truncated. dropped: nothing to train, or nothing left of it. refused: by reason, see `data.chat`.
    """

    source: str
    read: int
    kept: int
    truncated: int
    dropped: int
    refused: dict[str, int]
    tokens: int
    trained_tokens: int
    rows: int
    row_length: int

    def __str__(self) -> str:
        refused = "".join(f", {count} refused ({reason})" for reason, count in sorted(self.refused.items()))
        fill = self.tokens / max(1, self.rows * self.row_length)
        return (
            f"data {self.source}: {self.kept} of {self.read} chats kept ({self.truncated} truncated), "
            f"{self.dropped} dropped without anything to train{refused}; "
            f"{self.trained_tokens} of {self.tokens} tokens trained; {self.rows} rows of {self.row_length} ({fill:.0%})"
        )


class PackedChats(Sequence):
    """Rows of encoded chats held in memory; row i is made when asked for."""

    def __init__(self, chats: Sequence[Chat], rows: Sequence[Sequence[int]]):
        self.chats, self.rows = chats, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return make_row([self.chats[i] for i in self.rows[index]])


@dataclass(frozen=True)
class Pipeline:
    """Batches of one process's share of `rows`.

    A batch's leaves are `[accumulation, share, …]`, `share = global_rows / accumulation / process_count`: concatenated
    over the processes along axis 1 they are the same global batch whatever the number of processes. `shuffle` draws a
    new order every epoch. With `epochs` the last batch is filled up with empty rows: every row is seen so many times.
    """

    rows: Sequence[Row]
    report: DataReport
    stream: StreamConfig
    global_rows: int
    accumulation: int
    seed: int
    process_index: int
    process_count: int
    epochs: int | None
    shuffle: bool

    @property
    def rows_per_epoch(self) -> int:
        return len(self.rows)

    @property
    def num_batches(self) -> int | None:
        """None: endless."""
        return None if self.epochs is None else math.ceil(self.epochs * len(self.rows) / self.global_rows)

    def batch(self, number: int) -> Batch:
        """This process's share of global batch `number`."""
        share = self.global_rows // self.accumulation // self.process_count
        places = number * self.global_rows + np.arange(self.global_rows)
        mine = places.reshape(self.accumulation, self.process_count, share)[:, self.process_index]
        rows = stack([self._streams(place) for place in mine.ravel().tolist()])
        return jax.tree.map(lambda leaf: leaf.reshape(self.accumulation, share, *leaf.shape[1:]), rows)

    def _streams(self, place: int) -> Batch:
        """Row number `place` of the endless sequence of epochs."""
        epoch, step = divmod(place, len(self.rows))
        if self.epochs is not None and epoch >= self.epochs:
            return empty_row(self.stream)
        index = int(_order(len(self.rows), self.seed, epoch)[step]) if self.shuffle else step
        return build_streams(self.rows[index], self.stream, np.random.default_rng([self.seed, epoch, index]))

    def iterator(self, start: int = 0):
        """Batches from number `start` on; its position goes through `get_state`/`set_state`.

        With grain installed it is a grain iterator that prepares batches ahead, which `grain.checkpoint` can save.
        """
        try:
            import grain
        except ModuleNotFoundError:
            return PlainIterator(self, start)
        last = sys.maxsize if self.num_batches is None else self.num_batches
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        iterator = iter(grain.MapDataset.range(last).map(self.batch).to_iter_dataset(options))
        iterator.set_state({"next_index": start})
        return iterator


class PlainIterator:
    """The batches of a pipeline one after the other, with the state of grain's iterator."""

    def __init__(self, pipeline: Pipeline, start: int):
        self.pipeline, self.next_index = pipeline, start

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        if self.pipeline.num_batches is not None and self.next_index >= self.pipeline.num_batches:
            raise StopIteration
        self.next_index += 1
        return self.pipeline.batch(self.next_index - 1)

    def get_state(self) -> dict[str, int]:
        return {"next_index": self.next_index}

    def set_state(self, state: dict[str, int]) -> None:
        self.next_index = state["next_index"]


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def make_pipeline(
    cfg: DataConfig,
    stream: StreamConfig,
    tokenizer,
    *,
    global_batch_rows: int,
    seed: int,
    accumulation: int = 1,
    process_index: int = 0,
    process_count: int = 1,
    epochs: int | None = None,
) -> Pipeline:
    """Shuffled training batches. Raises UserError when the data cannot be read or hold nothing to train."""
    rows, report = _rows(cfg.path, training_chats(cfg), cfg, stream, tokenizer)
    return _pipeline(
        rows, report, stream, global_batch_rows, accumulation, seed, process_index, process_count, epochs, shuffle=True
    )


def make_eval_pipeline(
    cfg: DataConfig,
    stream: StreamConfig,
    tokenizer,
    *,
    global_batch_rows: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Pipeline:
    """One pass over the held-out chats, in order; the last batch is filled up with empty rows."""
    rows, report = _rows(cfg.eval_path or cfg.path, held_out_chats(cfg), cfg, stream, tokenizer)
    return _pipeline(
        rows, report, stream, global_batch_rows, 1, 0, process_index, process_count, epochs=1, shuffle=False
    )


def _pipeline(rows, report, stream, global_rows, accumulation, seed, process_index, process_count, epochs, shuffle):
    log.info("%s", report)
    if not report.trained_tokens:
        raise UserError(
            f"nothing to train in {report}. Expected chats with assistant messages that fit into "
            f"objective.row_length={stream.row_length} tokens"
        )
    if global_rows % (accumulation * process_count):
        raise UserError(
            f"a batch of {global_rows} rows cannot be cut into {accumulation} micro-batches x {process_count} processes"
        )
    return Pipeline(
        rows, report, stream, global_rows, accumulation, seed, process_index, process_count, epochs, shuffle
    )


def _rows(source: str, chats: Sequence[Messages], cfg: DataConfig, stream: StreamConfig, tokenizer):
    encoded, counts = encode_all(chats, stream, tokenizer)
    packed = pack(encoded, stream) if cfg.pack else [[i] for i in range(len(encoded))]
    report = DataReport(
        source=source,
        read=len(chats),
        kept=len(encoded),
        truncated=counts.pop("truncated"),
        dropped=counts.pop("dropped"),
        refused=dict(counts),
        tokens=sum(len(chat.tokens) for chat in encoded),
        trained_tokens=sum(chat.trained for chat in encoded),
        rows=len(packed),
        row_length=stream.row_length,
    )
    return PackedChats(encoded, packed), report


def encode_all(chats: Sequence[Messages], stream: StreamConfig, tokenizer) -> tuple[list[Chat], Counter]:
    """The chats that have something to train, cut to a row, and counts: `truncated`, `dropped`, reasons of refusal."""
    kept: list[Chat] = []
    counts = Counter(truncated=0, dropped=0)
    last_log = time.monotonic()
    for start in range(0, len(chats), CHUNK):
        if time.monotonic() - last_log > 10:
            log.info("encoded %d of %d chats", start, len(chats))
            last_log = time.monotonic()
        for chat in encode_chats(chats[start : start + CHUNK], tokenizer):
            if isinstance(chat, RefusedChatError):
                counts[chat.reason] += 1
            elif (fitted := fit(chat, stream)) is None:
                counts["dropped"] += 1
            else:
                counts["truncated"] += fitted.trained < chat.trained
                kept.append(fitted)
    return kept, counts
