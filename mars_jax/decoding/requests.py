"""What a caller asks for and what it gets: requests, their options and their results."""

from dataclasses import dataclass, field, fields

import numpy as np

from mars_jax.decoding.settings import SCORES
from mars_jax.errors import UserError

MODES = ("ar", "window", "verify", "block", "recompute")
LAYOUTS = ("chain", "tree")


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode one request. Raises UserError for a value out of range.

    mode:           "ar" one token a forward. "window" trusts candidates whose score passes. "verify" checks them and
                    gives exactly what "ar" gives. "block" is "window" over the paper's block cache, "recompute"
                    without a cache.
    tau:            threshold of the score in window, block and recompute: at least it for `probability` and `margin`
                    (1 or more: exactly one token a forward), at most it, in nats, for `entropy`.
    gate_first:     whether an unsure first token ends a run.
    window:         placeholders a forward (W).
    cache_block:    tokens of a cache block in mode "block".
    draft:          drafts a forward (K) in mode "verify".
    layout:         "chain" puts placeholders after the last draft, "tree" after every possible stop.
    max_new_tokens: most tokens returned, end token included.
    """

    mode: str = "window"
    tau: float = 0.9
    score: str = "probability"
    gate_first: bool = False
    window: int = 3
    cache_block: int = 16
    draft: int = 3
    layout: str = "tree"
    max_new_tokens: int = 256

    def __post_init__(self):
        _one_of("mode", self.mode, MODES)
        _one_of("score", self.score, SCORES)
        _one_of("layout", self.layout, LAYOUTS)
        _at_least("tau", self.tau, 0)
        for name in ("window", "draft", "cache_block", "max_new_tokens"):
            _at_least(name, getattr(self, name), 1)


OPTION_NAMES = tuple(f.name for f in fields(DecodeOptions))


def _one_of(name, value, allowed):
    if value not in allowed:
        raise UserError(f"{name}={value!r}: expected one of {', '.join(allowed)}")


def _at_least(name, value, least):
    if not isinstance(value, int | float) or not value >= least:
        raise UserError(f"{name}={value!r}: expected a number of at least {least}")


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to decode it."""

    token_ids: tuple[int, ...]
    options: DecodeOptions = field(default_factory=DecodeOptions)

    def __post_init__(self):
        if not self.token_ids:
            raise UserError("a prompt has no tokens: decoding needs at least one to start from")


@dataclass(frozen=True)
class Generation:
    """One request's result.

    token_ids:     what was generated, the end token included.
    text:          the tokens as text, special tokens left out.
    accepted:      tokens committed by each decoding forward; prefill is not counted.
    finish_reason: "stop" after an end token, else "length".
    """

    token_ids: list[int]
    text: str
    accepted: list[int]
    finish_reason: str
    prompt_tokens: int
    options: DecodeOptions

    @property
    def forwards(self) -> int:
        return len(self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        return len(self.token_ids) / len(self.accepted)


def run_lengths(forward_X: np.ndarray) -> list[int]:
    """Run lengths from the number of the forward that committed each token."""
    return np.bincount(forward_X).tolist()
