"""From chats to batches: encode, cut, pack, shuffle, build the two streams.

Which rows make up global batch number s depends on the data, the seed and s alone. A position in the data is therefore
one integer, the same on every process and for every number of processes, and any batch can be made on its own.
"""

import functools
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from mars_jax.data.config import DataConfig
from mars_jax.data.encoding import DataReport
from mars_jax.data.rows import held_out_rows, training_rows
from mars_jax.errors import UserError
from mars_jax.objective.streams import Batch, Row, StreamConfig, build_streams, empty_row, stack

log = logging.getLogger("mars_jax.data")


@dataclass(frozen=True)
class Pipeline:
    """Batches of one process's share of `rows`.

    A micro-batch is cut into `num_parts` equal parts, and this process makes `parts` of them: a batch's leaves are
    `[accumulation, global_rows / accumulation / num_parts * len(parts), …]`. All parts in order are the same global
    batch whatever their number. `shuffle` draws a new order every epoch. With `epochs` the last batch is filled up with
    empty rows: every row is seen so many times.
    """

    rows: Sequence[Row]
    report: DataReport
    stream: StreamConfig
    global_rows: int
    accumulation: int = 1
    seed: int = 0
    parts: tuple[int, ...] = (0,)
    num_parts: int = 1
    epochs: int | None = None
    shuffle: bool = True

    def __post_init__(self):
        if not self.report.trained_tokens:
            raise UserError(
                f"nothing to train in {self.report}. Expected chats with assistant messages that fit into "
                f"objective.row_length={self.stream.row_length} tokens"
            )
        if self.global_rows % (self.accumulation * self.num_parts):
            raise UserError(
                f"a batch of {self.global_rows} rows cannot be cut into {self.accumulation} micro-batches x "
                f"{self.num_parts} parts"
            )

    @property
    def rows_per_epoch(self) -> int:
        return len(self.rows)

    @property
    def num_batches(self) -> int | None:
        """None: endless."""
        return None if self.epochs is None else math.ceil(self.epochs * len(self.rows) / self.global_rows)

    def batch(self, number: int) -> Batch:
        """This process's share of global batch `number`."""
        size = self.global_rows // self.accumulation // self.num_parts
        places = number * self.global_rows + np.arange(self.global_rows)
        mine = places.reshape(self.accumulation, self.num_parts, size)[:, list(self.parts)]
        rows = stack([self._streams(place) for place in mine.ravel().tolist()])
        return jax.tree.map(lambda leaf: leaf.reshape(self.accumulation, -1, *leaf.shape[1:]), rows)

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
    parts: tuple[int, ...] = (0,),
    num_parts: int = 1,
    epochs: int | None = None,
) -> Pipeline:
    """Shuffled training batches. Raises UserError when the data cannot be read or hold nothing to train."""
    rows, report = training_rows(cfg, stream, tokenizer)
    log.info("%s", report)
    return Pipeline(rows, report, stream, global_batch_rows, accumulation, seed, parts, num_parts, epochs)


def make_eval_pipeline(
    cfg: DataConfig,
    stream: StreamConfig,
    tokenizer,
    *,
    global_batch_rows: int,
    parts: tuple[int, ...] = (0,),
    num_parts: int = 1,
) -> Pipeline:
    """One pass over the held-out chats, in order; the last batch is filled up with empty rows."""
    rows, report = held_out_rows(cfg, stream, tokenizer)
    if not report.trained_tokens:
        raise UserError(
            f"nothing to evaluate on in the held-out chats of {report}. Give data.eval_path (a tenth of data.path is "
            "held out at most, none of fewer than ten chats), or leave evaluation out with train.eval_every=0"
        )
    log.info("%s", report)
    return Pipeline(rows, report, stream, global_batch_rows, parts=parts, num_parts=num_parts, epochs=1, shuffle=False)
