"""How fast each decode mode is: the same prompts, the same process, modes taken in turns."""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions, Generation, Request
from mars_jax.errors import UserError
from mars_jax.models.loading import LoadedModel

log = logging.getLogger(__name__)

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Variant:
    """A way to decode. name: for tables."""

    name: str
    options: DecodeOptions


def variants(base: DecodeOptions) -> list[Variant]:
    """Every mode, with `base` giving window, score, cut-offs and limits."""

    def options(**changes):
        return dataclasses.replace(base, **changes)

    return [
        Variant("ar", options(mode="ar")),
        *[Variant(f"window τ={tau:g}", options(mode="window", tau=tau)) for tau in (0.95, 0.9, 0.7, 0.5)],
        *[Variant(f"block {n} τ=0.95", options(mode="block", tau=0.95, cache_block=n)) for n in (8, 16, 32, 64)],
        *[
            Variant(f"verify {layout} K={k}", options(mode="verify", layout=layout, draft=k))
            for layout, k in itertools.product(("chain", "tree"), (1, 3))
        ],
        Variant("lookup K=3", options(mode="lookup", draft=3)),
        Variant("jacobi K=3", options(mode="jacobi", draft=3)),
        Variant("recompute τ=0.95", options(mode="recompute", tau=0.95)),
    ]


def select(choices: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """`ar`, always first, and the variants of the named modes. Raises UserError for a mode that is not there."""
    first, *others = choices
    known = {variant.options.mode for variant in choices}
    if unknown := set(names) - known:
        raise UserError(f"--modes: {min(unknown)!r} is not one of {', '.join(sorted(known))}")
    return [first, *[variant for variant in others if variant.options.mode in names]]


@dataclass(frozen=True)
class Speed:
    """A variant at a batch size, over all prompts.

    tokens:        returned tokens. forwards: decoding forwards, summed over rows.
    first_seconds: the first pass, which compiles. seconds: median of the timed passes, prefill included.
    accepted_at:   share of forwards that accepted at least 1, 2, … tokens.
    same_as_ar:    share of prompts with exactly the token ids of `ar`.
    speed_up:      tokens a second over those of `ar` at the same batch size.
    retention:     `speed_up` over tokens a forward: what is left of the gain once steps cost more.
    """

    name: str
    mode: str
    batch: int
    tokens: int
    forwards: int
    first_seconds: float
    seconds: float
    accepted_at: list[float]
    same_as_ar: float
    speed_up: float
    retention: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards


@dataclass
class Passes:
    """Timed passes of one contender."""

    decode: Callable[[], list[tuple[list[int], list[int]]]]  # token ids and run lengths of every prompt
    first_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    results: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def run(self, first: bool) -> None:
        began = time.perf_counter()
        self.results = self.decode()
        took = time.perf_counter() - began
        if first:
            self.first_seconds = took
        else:
            self.seconds.append(took)


def measure(
    model: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    chosen: Sequence[Variant],
    batches: Sequence[int],
    repeats: int,
    transformers_folder: Path | None = None,
) -> list[Speed]:
    """Speeds of the variants, `ar` being the first of them, at every batch size.

    At batch size b, b slots share all prompts. One pass of each warms up and compiles; then `repeats` passes are taken
    in turns, so that whatever else the machine does falls on all alike. With `transformers_folder`, the `generate` of
    transformers joins in.
    """
    speeds = []
    for batch in batches:
        engine = DecodeEngine(model, slots=batch)
        contenders = {v.name: Passes(_through_engine(engine, prompts, v.options)) for v in chosen}
        if transformers_folder is not None:
            limit = chosen[0].options.max_new_tokens
            contenders[TRANSFORMERS] = Passes(_through_transformers(transformers_folder, model, prompts, batch, limit))
        for turn in range(repeats + 1):
            for name, passes in contenders.items():
                passes.run(first=turn == 0)
                log.info("batch %d  %s  pass %d", batch, name, turn)
        modes = {v.name: v.options.mode for v in chosen} | {TRANSFORMERS: "ar"}
        baseline = contenders[chosen[0].name]
        speeds += [_speed(name, modes[name], batch, passes, baseline) for name, passes in contenders.items()]
    return speeds


def _speed(name: str, mode: str, batch: int, passes: Passes, baseline: Passes) -> Speed:
    runs = [length for _, accepted in passes.results for length in accepted]
    tokens = sum(runs)
    rate = tokens / np.median(passes.seconds)
    baseline_rate = sum(len(ids) for ids, _ in baseline.results) / np.median(baseline.seconds)
    same = [ours[0] == theirs[0] for ours, theirs in zip(passes.results, baseline.results, strict=True)]
    return Speed(
        name=name,
        mode=mode,
        batch=batch,
        tokens=tokens,
        forwards=len(runs),
        first_seconds=passes.first_seconds,
        seconds=float(np.median(passes.seconds)),
        accepted_at=[float(np.mean(np.array(runs) >= n)) for n in range(1, max(runs) + 1)],
        same_as_ar=float(np.mean(same)),
        speed_up=float(rate / baseline_rate),
        retention=float(rate / baseline_rate / (tokens / len(runs))),
    )


def _through_engine(engine: DecodeEngine, prompts: Sequence[tuple[int, ...]], options: DecodeOptions) -> Callable:
    requests = [Request(prompt, options) for prompt in prompts]

    def decode():
        results: list[Generation] = engine.generate(requests)
        return [(r.token_ids, r.accepted) for r in results]

    return decode


def _through_transformers(folder: Path, model: LoadedModel, prompts, batch: int, limit: int) -> Callable:
    """Greedy `generate` of the exported checkpoint, `batch` left-padded prompts at a time."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    allowed = np.flatnonzero(np.asarray(model.emit_mask))
    banned = sorted(set(range(len(model.emit_mask))) - set(allowed.tolist()))

    def answer(rows):
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
        attended = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        made = network.generate(
            input_ids=ids,
            attention_mask=attended,
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=list(model.stop_ids),
            pad_token_id=model.stop_ids[0],
            suppress_tokens=banned or None,
        )
        return [_until_stop(row[width:].tolist(), model.stop_ids) for row in made]

    def decode():
        with torch.inference_mode():
            answers = [ids for first in range(0, len(prompts), batch) for ids in answer(prompts[first : first + batch])]
        return [(ids, [1] * len(ids)) for ids in answers]

    return decode


def _until_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    """The ids up to and including the first end token: what follows in a batch is padding."""
    ends = [i for i, token in enumerate(ids) if token in stop_ids]
    return ids[: ends[0] + 1] if ends else ids
