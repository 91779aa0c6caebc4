"""Writing a prepared folder: shards of consecutive chats, tokenised and packed by several processes."""

import functools
import itertools
import logging
import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from mars_jax.data.config import DataConfig
from mars_jax.data.encoding import DataReport, encode_all
from mars_jax.data.packing import make_row, pack
from mars_jax.data.prepared import Settings, claim, fingerprint, is_written, write_index, write_shard
from mars_jax.data.sources import Messages, all_chats
from mars_jax.errors import UserError
from mars_jax.objective.streams import StreamConfig

log = logging.getLogger("mars_jax.data")


def prepare(
    cfg: DataConfig, tokenizer: str, out: str, *, row_length: int, shard_chats: int, workers: int
) -> DataReport:
    """Fill the folder `out` with the rows of all chats of `cfg.path`; shards that are there already are kept.

    Neither the number of workers nor interruptions change the rows. Raises UserError when `out` was begun with other
    settings, or when there is nothing to train.
    """
    from etils import epath

    tokenizer = tokenizer_source(tokenizer)
    settings = Settings(row_length, cfg.pack, shard_chats, fingerprint(open_tokenizer(tokenizer)))
    folder = epath.Path(out)
    claim(folder, settings)
    shards = 0
    for done in _in_order(_tasks(cfg, folder, settings, tokenizer), workers):
        shards += 1
        log.info("shard %d %s", shards, "written" if done else "was there")
    report = write_index(folder, shards, cfg.path, settings)
    if not report.trained_tokens:
        raise UserError(f"nothing to train in {report}")
    return report


def tokenizer_source(path: str) -> str:
    """What `open_tokenizer` reads for a run's output folder or a `.gguf` file; other paths are taken as they are."""
    from mars_jax.models import gguf, run_folder

    local = Path(path).expanduser()
    if run_folder.is_run_folder(local):
        return str(local / run_folder.METADATA)
    return str(gguf.unpack(local)[0]) if local.suffix == ".gguf" else path


@functools.lru_cache(maxsize=1)
def open_tokenizer(source: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer {source}: no tokenizer there ({error})") from error


def _tasks(cfg: DataConfig, folder, settings: Settings, tokenizer: str) -> Iterator[tuple]:
    chats = iter(all_chats(cfg))
    for number in itertools.count():
        part = list(itertools.islice(chats, settings.shard_chats))
        if not part:
            return
        yield folder, number, part, cfg.path, settings, tokenizer


def _in_order(tasks: Iterator[tuple], workers: int) -> Iterator[bool]:
    """Results of `_make_shard`, with twice as many tasks in memory as there are workers."""
    if workers == 1:
        yield from (_make_shard(*task) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")  # the parent runs threads, which do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = deque()
        for task in tasks:
            waiting.append(pool.submit(_make_shard, *task))
            if len(waiting) == 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _make_shard(folder, number: int, chats: list[Messages], source: str, settings: Settings, tokenizer: str) -> bool:
    """Write one shard; false where it was there already."""
    if is_written(folder, number, chats):
        return False
    room = StreamConfig("ar_sft", 2, 1, "response", settings.row_length, 0, mask_id=0)
    encoded, counts = encode_all(chats, room, open_tokenizer(tokenizer))
    packed = pack(encoded, room) if settings.pack else [[i] for i in range(len(encoded))]
    rows = (make_row([encoded[i] for i in row]) for row in packed)
    report = DataReport.of(source, len(chats), encoded, counts, len(packed), settings.row_length)
    write_shard(folder, number, chats, rows, report)
    return True
