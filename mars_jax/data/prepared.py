"""Rows packed ahead of time: a folder of ArrayRecord shards that training reads row by row.

A shard holds the rows of a fixed number of consecutive chats, so it depends on them and the settings alone: shards can
be written in any order, by any number of workers, and again. Beside each lies a JSON file, written last, that names the
chats it was made from; `prepared.json`, written when all are done, makes the folder readable.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mars_jax.data.encoding import DataReport
from mars_jax.errors import UserError
from mars_jax.objective.streams import Row

INDEX = "prepared.json"
SETTINGS = "settings.json"


@dataclass(frozen=True)
class Settings:
    """What the rows depend on besides the chats. `tokenizer`: see `fingerprint`."""

    row_length: int
    pack: bool
    shard_chats: int
    tokenizer: str


def fingerprint(tokenizer) -> str:
    """Equal for tokenizers that give ordinary text the same ids and chats the same form, whatever tokens were added."""
    added = tokenizer.get_added_vocab()
    vocabulary = sorted((i, token) for token, i in tokenizer.get_vocab().items() if token not in added)
    return hashlib.sha256(json.dumps([vocabulary, tokenizer.chat_template]).encode()).hexdigest()[:16]


def row_to_bytes(row: Row) -> bytes:
    """Numbers of chats and spans, lengths of the chats, spans, tokens: all little-endian int32."""
    lengths = np.bincount(row.segment)[1:]
    parts = [[len(lengths), len(row.spans)], lengths, row.spans.ravel(), row.tokens]
    return np.concatenate(parts).astype("<i4").tobytes()


def row_from_bytes(record: bytes) -> Row:
    numbers = np.frombuffer(record, "<i4").astype(np.int32)
    num_chats, num_spans = numbers[:2].tolist()
    lengths, spans, tokens = np.split(numbers[2:], [num_chats, num_chats + 2 * num_spans])
    return Row(
        tokens=tokens,
        segment=np.repeat(np.arange(1, num_chats + 1, dtype=np.int32), lengths),
        position=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        spans=spans.reshape(-1, 2),
    )


def claim(folder, settings: Settings) -> None:
    """Start the folder, or find that it was started with the same settings. Raises UserError where they differ."""
    path = folder / SETTINGS
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} holds other files: give an empty or a new folder")
        write_json(path, asdict(settings))
    there = json.loads(path.read_text())
    differing = [
        f"{name}={there.get(name)} (now {new})" for name, new in asdict(settings).items() if there.get(name) != new
    ]
    if differing:
        raise UserError(f"{folder} was begun with {', '.join(differing)}: give another folder or the same settings")


def write_shard(folder, number: int, chats: Sequence, rows: Iterable[Row], report: DataReport) -> None:
    """Write shard `number`, the rows of `chats`; it counts as written once all of it is."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from etils import epath

    name = shard_name(number)
    with tempfile.TemporaryDirectory() as scratch:  # the writer knows local files only
        local = Path(scratch) / name
        writer = ArrayRecordWriter(str(local), "group_size:1")
        for row in rows:
            writer.write(row_to_bytes(row))
        writer.close()
        epath.Path(local).copy(folder / f"{name}.partial", overwrite=True)
    for outdated in (folder / INDEX, _sidecar(folder, number)):  # of an earlier run on other chats
        outdated.unlink(missing_ok=True)
    (folder / f"{name}.partial").replace(folder / name)
    write_json(_sidecar(folder, number), {"chats": _digest(chats), "report": asdict(report)})


def is_written(folder, number: int, chats: Sequence) -> bool:
    """Whether the shard is complete and was made from these very chats."""
    sidecar = _sidecar(folder, number)
    return sidecar.exists() and json.loads(sidecar.read_text())["chats"] == _digest(chats)


def write_index(folder, shards: int, source: str, settings: Settings) -> DataReport:
    """Declare the folder complete; the report adds up those of its shards."""
    reports = [DataReport(**json.loads(_sidecar(folder, i).read_text())["report"]) for i in range(shards)]
    report = DataReport.total(source, reports, settings.row_length)
    index = {"settings": asdict(settings), "report": asdict(report), "rows": [r.rows for r in reports]}
    write_json(folder / INDEX, index)
    return report


def write_json(path, value) -> None:
    """Whole or not at all."""
    partial = path.parent / f"{path.name}.partial"
    partial.write_text(json.dumps(value, indent=1))
    partial.replace(path)


def shard_name(number: int) -> str:
    return f"rows-{number:05d}.array_record"


def _sidecar(folder, number: int):
    return folder / f"{shard_name(number)}.json"


def _digest(chats: Sequence) -> str:
    return hashlib.sha256(json.dumps(chats, sort_keys=True).encode()).hexdigest()


class PreparedRows(Sequence):
    """The rows of a prepared folder, read from its shards when asked for."""

    def __init__(self, path: str):
        """Raises UserError where there is no complete folder."""
        from etils import epath

        folder = epath.Path(path)
        if not (folder / INDEX).exists():
            raise UserError(
                f"{path} holds shards but no {INDEX}: run mars_jax.prepare again, it continues where it stopped"
            )
        index = json.loads((folder / INDEX).read_text())
        self.settings = Settings(**index["settings"])
        self.report = DataReport(**index["report"])
        self._counts = index["rows"]
        self._source = self._open(folder)

    def __len__(self) -> int:
        return sum(self._counts)

    def __getitem__(self, index: int) -> Row:
        if index >= len(self):
            raise IndexError(index)  # ends iteration; the source raises ValueError
        return row_from_bytes(self._source[index])

    def _open(self, folder):
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        names = [shard_name(number) for number, count in enumerate(self._counts) if count]
        if "://" in str(folder):  # the reader knows local files only
            self._scratch = tempfile.TemporaryDirectory(prefix="mars-rows-")
            for name in names:
                (folder / name).copy(Path(self._scratch.name) / name)
            folder = Path(self._scratch.name)
        return ArrayRecordDataSource([str(folder / name) for name in names])


def is_prepared(path: str) -> bool:
    """Whether `mars_jax.prepare` has been at work in this folder."""
    from etils import epath

    return path != "synthetic" and (epath.Path(path) / SETTINGS).exists()
