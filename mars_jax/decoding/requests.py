"""What a caller asks for and what it gets: requests, their options and their results."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from mars_jax.decoding.settings import SCORES, SOURCES
from mars_jax.errors import UserError

MODES = ("ar", "window", "verify", "block", "recompute", "jacobi", "lookup", "diffusion")
EXACT_MODES = ("verify", "jacobi", "lookup")
LAYOUTS = ("chain", "tree")
WIDEST, LONGEST_BLOCK = 1024, 65_536  # every one of so many tokens is part of each step
NO_BIAS_PAST = 1e4  # far beyond any logit, and far from that of ids which are never emitted


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode one request. Raises UserError for a value out of range.

    mode:           "ar" one token a forward. "window" trusts candidates whose score passes. "verify" checks them and
                    gives exactly what "ar" gives, as do "lookup" (drafts from the text so far) and "jacobi" (guesses
                    corrected until they agree). "block" is "window" over the paper's block cache, "recompute"
                    without a cache. "diffusion" fills blocks of `window` placeholders in any order, for models trained
                    with the recipe `block_diffusion`.
    tau:            threshold of the score in window, block, recompute and diffusion: at least it for `probability` and
                    `margin` (1 or more: exactly one token a forward), at most it, in nats, for `entropy`.
    gate_first:     whether an unsure first token ends a run.
    window:         placeholders a forward (W).
    cache_block:    tokens of a cache block in mode "block".
    draft:          drafts a forward (K) in the exact modes.
    layout:         in mode "verify", "chain" puts placeholders after the last draft, "tree" after every possible stop.
    lookup:         in mode "verify", check as many drafts from the text so far beside those of the placeholders; of the
                    two chains the longer one that stands is taken. At temperature 0 only.
    max_new_tokens: most tokens returned, end token included.
    min_new_tokens: no end token and no stop string before so many tokens.
    stop:           texts that end the answer; it is cut before the first that is completed.
    temperature:    0 takes the likeliest token; otherwise tokens are drawn, after `top_k` (0: all), `top_p` (1: all)
                    and `min_p` (0: all) in this order. Scores are those of the untempered distribution.
    seed:           of the draws, and of jacobi's guesses; None draws one. A row's draws depend on nothing but its own
                    seed and text.
    repetition_penalty: divides positive, multiplies negative logits of tokens in prompt and output.
    presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once, and for each occurrence.
    logprobs:       None, or for how many likeliest ids log-probabilities are returned beside the chosen token's.
    logit_bias:     token id to a number that is added to its logit.
    """

    mode: str = "window"
    tau: float = 0.9
    score: str = "probability"
    gate_first: bool = False
    window: int = 3
    cache_block: int = 16
    draft: int = 3
    layout: str = "tree"
    lookup: bool = False
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self):
        for name, allowed in (("mode", MODES), ("score", SCORES), ("layout", LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        for name, most in (("window", WIDEST), ("draft", WIDEST), ("cache_block", LONGEST_BLOCK)):
            _number(name, getattr(self, name), int, least=1, most=most)
        _number("max_new_tokens", self.max_new_tokens, int, least=1)
        for name in ("min_new_tokens", "top_k"):
            _number(name, getattr(self, name), int, least=0, most=LARGEST_INTEGER)
        for name in ("tau", "temperature"):
            _number(name, getattr(self, name), float, least=0)
        for name in ("top_p", "min_p"):
            _number(name, getattr(self, name), float, least=0, most=1)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), float, least=-100, most=100)
        _number("repetition_penalty", self.repetition_penalty, float, least=0.01)
        if self.seed is not None:
            _number("seed", self.seed, int, least=0, most=2**32 - 1)
        if self.logprobs is not None:
            _number("logprobs", self.logprobs, int, least=0, most=100)
        for token_id, value in self.logit_bias.items():
            _number(f"logit_bias[{token_id}]", value, float, least=-NO_BIAS_PAST, most=NO_BIAS_PAST)
        if self.mode == "diffusion" and (self.adjusted or self.logprobs is not None or self.gate_first):
            raise UserError(
                "mode 'diffusion' fills places in any order: it has no penalties, bias, min_new_tokens, logprobs or "
                "gate_first"
            )
        if not isinstance(self.lookup, bool):
            raise UserError(f"lookup={self.lookup!r}: expected true or false")
        if self.lookup and self.mode != "verify":
            raise UserError(f"lookup beside placeholders belongs to mode 'verify', not to {self.mode!r}")
        if self.lookup and self.sampled:
            raise UserError(
                f"lookup beside placeholders needs temperature 0, not {self.temperature:g}: taking the longer of two "
                "drawn chains would not be sampling"
            )
        if not isinstance(self.stop, list | tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"stop={self.stop!r}: expected a list of texts, none of them empty")
        object.__setattr__(self, "stop", tuple(self.stop))

    @property
    def exact(self) -> bool:
        return self.mode in EXACT_MODES

    @property
    def source(self) -> str:
        """Of drafts."""
        return self.mode if self.mode in SOURCES else "masks"

    @property
    def width(self) -> int:
        """Placeholders or drafts in use."""
        return {"ar": 0}.get(self.mode, self.draft if self.exact else self.window)

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    @property
    def adjusted(self) -> bool:
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.min_new_tokens or self.logit_bias) or penalties != (1.0, 0.0, 0.0)


OPTION_NAMES = tuple(f.name for f in fields(DecodeOptions))


LARGEST_INTEGER = 2**30  # with a prompt's length added it still fits int32
LARGEST_FLOAT32 = 3.4028234e38  # what the device computes with; beyond it a number becomes infinite


def _number(name: str, value, kind: type, least: float, most: float = LARGEST_FLOAT32):
    fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not fits or not least <= value <= most:
        what = "an integer" if kind is int else "a number"
        bounded = most < LARGEST_FLOAT32 or (fits and value > most)
        limits = f"from {least} to {most}" if bounded else f"of at least {least}"
        raise UserError(f"{name}={value!r}: expected {what} {limits}")


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to decode it."""

    token_ids: tuple[int, ...]
    options: DecodeOptions = field(default_factory=DecodeOptions)

    def __post_init__(self):
        if not self.token_ids:
            raise UserError("the prompt has no tokens: decoding needs at least one to start from")


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and of the likeliest ids at its place, by id.

    from_placeholder: it is that of the placeholder which predicted the token, not the autoregressive one.
    """

    logprob: float
    top: dict[int, float]
    from_placeholder: bool


@dataclass(frozen=True)
class Generation:
    """One request's result.

    token_ids:     what was generated, the end token included.
    text:          the tokens as text, special tokens left out, cut before a stop string.
    accepted:      tokens committed by each decoding forward; prefill is not counted.
    finish_reason: "stop" after an end token or a stop string, else "length".
    logprobs:      one entry a token if the options ask for them, else None.
    """

    token_ids: list[int]
    text: str
    accepted: list[int]
    finish_reason: str
    prompt_tokens: int
    options: DecodeOptions
    logprobs: list[TokenLogprob] | None = None

    @property
    def forwards(self) -> int:
        return len(self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        return len(self.token_ids) / len(self.accepted)
