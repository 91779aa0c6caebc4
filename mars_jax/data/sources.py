"""Chats from files, Hugging Face data sets, tensorflow-datasets or the embedded generator, as lists of messages."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np

from mars_jax.data.config import DataConfig
from mars_jax.data.prepared import is_prepared
from mars_jax.data.synthetic import make_chats
from mars_jax.errors import UserError

Messages = list[dict]

SYNTHETIC_ROWS = 20_000
COLUMN_PAIRS = (("prompt", "answer"), ("question", "answer"))


def training_chats(cfg: DataConfig) -> list[Messages]:
    """The chats to train on. Raises UserError naming file and line, or the data set, when they cannot be read."""
    chats = list(all_chats(cfg))
    held_out = set() if cfg.eval_path or cfg.path == "synthetic" else set(_held_out(len(chats), cfg))
    return [chat for i, chat in enumerate(chats) if i not in held_out]


def held_out_chats(cfg: DataConfig) -> list[Messages]:
    """The chats to evaluate on, none of them in `training_chats`; the same ones whatever the run's seed."""
    if cfg.eval_path is not None and cfg.eval_path != "synthetic":
        return list(islice(read_chats(cfg.eval_path, cfg.eval_split, cfg), cfg.eval_rows))
    if "synthetic" in (cfg.path, cfg.eval_path):
        return make_chats("held_out", cfg.eval_rows)
    chats = list(all_chats(cfg))
    return [chats[i] for i in _held_out(len(chats), cfg)]


def all_chats(cfg: DataConfig) -> Iterator[Messages]:
    """The chats of `path` one after the other, held-out ones among them (but `synthetic` has a split for those)."""
    if cfg.path == "synthetic":
        return iter(make_chats("train", cfg.max_rows or SYNTHETIC_ROWS))
    return islice(read_chats(cfg.path, cfg.split, cfg), cfg.max_rows)


def _held_out(count: int, cfg: DataConfig) -> list[int]:
    """Which of so many chats are held out: the same for every run, so that a second stage trains on none of them."""
    return sorted(np.random.default_rng(0).choice(count, min(cfg.eval_rows, count // 10), replace=False).tolist())


def read_chats(path: str, split: str, cfg: DataConfig) -> Iterator[Messages]:
    """All chats of a JSONL file or data set, in order."""
    for where, row in _rows(path, split, cfg.subset):
        yield as_messages(row, where, cfg)


def _rows(path: str, split: str, subset: str | None) -> Iterator[tuple[str, Mapping]]:
    """`(where, row)`, `where` naming the row in error messages."""
    from etils import epath

    if path.startswith("tfds:"):
        return _tfds_rows(path.removeprefix("tfds:"), split, subset)
    if path.startswith("hf:"):
        return _hub_rows(path.removeprefix("hf:"), split, subset)
    location = epath.Path(path)
    if is_prepared(path):
        raise UserError(f"data path {path} holds prepared rows; chats are needed here")
    if location.is_dir():
        return _folder_rows(location, split)
    if location.exists():
        return _jsonl_rows(location)
    if path.count("/") == 1 and not path.endswith((".jsonl", ".json")):
        return _hub_rows(path, split, subset)
    raise UserError(f"data path {path!r}: no such file, and not of the form owner/name, hf:name or tfds:name")


def _jsonl_rows(location) -> Iterator[tuple[str, Mapping]]:
    with location.open("rb") as file:  # bytes: cut at line feeds only, as text may hold U+2028 and the like
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{location}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # of the JSON or of its UTF-8; nested without end
                raise UserError(f"{where}: not a JSON object ({error})") from error
            yield where, row


def _folder_rows(location, split: str) -> Iterator[tuple[str, Mapping]]:
    import datasets

    try:
        data = datasets.load_from_disk(str(location))
    except FileNotFoundError:
        return _hub_rows(str(location), split, None)
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise UserError(f"data path {location}: no split {split!r}, only {', '.join(data)}")
        data = data[split]
    return ((f"{location}, row {i}", row) for i, row in enumerate(data))


def _hub_rows(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Mapping]]:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        data = datasets.load_dataset(name, subset, split=split)
    except (FileNotFoundError, ConnectionError, ValueError, DatasetsError) as error:
        raise UserError(f"data set {name!r} (subset {subset!r}, split {split!r}): {error}") from error
    return ((f"{name}[{split}], row {i}", row) for i, row in enumerate(data))


def _tfds_rows(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Mapping]]:
    import tensorflow_datasets as tfds

    full = f"{name}/{subset}" if subset else name
    try:
        data = tfds.data_source(full, split=split)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise UserError(f"tfds data set {full!r} (split {split!r}): {error}") from error
    return ((f"tfds:{full}[{split}], row {i}", _decoded(data[i])) for i in range(len(data)))


def _decoded(value):
    """tfds gives text as bytes, and sequences of records as records of sequences."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_decoded(item) for item in value]
    return value


def as_messages(row: Mapping, where: str, cfg: DataConfig) -> Messages:
    """The row's `messages`, or one user and one assistant message from its two columns."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected an object with named columns, found {type(row).__name__}")
    if row.get("tools"):
        raise UserError(f"{where}: tool descriptions are not rendered, so these chats would be learned without them")
    pairs = COLUMN_PAIRS if cfg.prompt_column is None else ((cfg.prompt_column, cfg.answer_column),)
    if cfg.prompt_column is None and "messages" in row:
        return _checked(row["messages"], where)
    for prompt, answer in pairs:
        if prompt in row and answer in row:
            texts = {"user": row[prompt], "assistant": row[answer]}
            return _checked([{"role": role, "content": text} for role, text in texts.items()], where)
    wanted = " or ".join(f"{p}/{a}" for p, a in pairs)
    raise UserError(
        f"{where}: no `messages` and no {wanted}, only {', '.join(map(str, row))}; "
        "name the columns by data.prompt_column and data.answer_column"
    )


def _checked(messages, where: str) -> Messages:
    if isinstance(messages, Mapping) and all(isinstance(values, list | tuple) for values in messages.values()):
        # a sequence of records that came as a record of sequences
        columns = [(key, list(values)) for key, values in messages.items()]
        messages = [dict(zip(messages, values, strict=True)) for values in zip(*(v for _, v in columns), strict=True)]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a list of objects with role and content")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"{where}: message {i} must have a role and a content, found {str(message)[:80]}")
    return messages
