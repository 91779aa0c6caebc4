"""What to train on: the `data` section of a run's configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """Where chats come from and how they fill rows.

    path:          `synthetic` (the embedded generator), a JSONL file, a folder made by `mars_jax.prepare`, a folder or
                   hub name of a Hugging Face data set (`hf:name` where a path has that name), or `tfds:name`.
    subset, split: configuration and split of a hub or tfds data set.
    prompt_column, answer_column: columns of data sets that have no `messages`; by default `prompt`/`answer` or
                   `question`/`answer`.
    max_rows:      chats read at most; of `synthetic`: chats made.
    pack:          several chats a row; false: one chat a row.
    eval_path:     held-out chats, read like `path`; by default chats are taken out of `path`.
    eval_split:    split of `eval_path`.
    eval_rows:     held-out chats at most, and at most a tenth of those of `path` where they come from there; 0: none.
    """

    path: str = "synthetic"
    subset: str | None = None
    split: str = "train"
    prompt_column: str | None = None
    answer_column: str | None = None
    max_rows: int | None = None
    pack: bool = True
    eval_path: str | None = None
    eval_split: str = "test"
    eval_rows: int = 256

    def __post_init__(self):
        if (self.prompt_column is None) != (self.answer_column is None):
            raise ValueError("give both of prompt_column and answer_column, or neither")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows={self.max_rows} must be at least 1")
        if self.eval_rows < 0:
            raise ValueError(f"eval_rows={self.eval_rows} must not be negative")
