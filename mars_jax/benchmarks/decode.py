"""How fast each decode mode is: the same prompts, the same process, modes taken in turns."""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mars_jax.benchmarks.records import Records
from mars_jax.benchmarks.transformers_decode import through_transformers
from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.errors import UserError
from mars_jax.models.loading import LoadedModel

log = logging.getLogger(__name__)

TRANSFORMERS = "transformers"
ADAPTIVE = "adapt"

# Token ids and run lengths of every prompt.
Decode = Callable[[], list[tuple[list[int], list[int]]]]


@dataclass(frozen=True)
class Variant:
    """A way to decode. name: for tables. adapt: leave drafts out while they do not pay."""

    name: str
    options: DecodeOptions
    adapt: bool = False


def variants(base: DecodeOptions) -> list[Variant]:
    """Every mode, with `base` giving window, score, cut-offs and limits."""

    def options(**changes):
        return dataclasses.replace(base, **changes)

    verify = [
        Variant(f"verify {layout} K={k}", options(mode="verify", layout=layout, draft=k))
        for layout, k in itertools.product(("chain", "tree"), (1, 3))
    ]
    return [
        Variant("ar", options(mode="ar")),
        *[Variant(f"window τ={tau:g}", options(mode="window", tau=tau)) for tau in (0.95, 0.9, 0.7, 0.5)],
        *[Variant(f"block {n} τ=0.95", options(mode="block", tau=0.95, cache_block=n)) for n in (8, 16, 32, 64)],
        *verify,
        *[Variant(f"{v.name} {ADAPTIVE}", v.options, adapt=True) for v in verify if v.options.layout == "tree"],
        Variant("verify tree K=3 lookup", options(mode="verify", layout="tree", draft=3, lookup=True)),
        Variant("lookup K=3", options(mode="lookup", draft=3)),
        Variant("jacobi K=3", options(mode="jacobi", draft=3)),
        Variant("recompute τ=0.95", options(mode="recompute", tau=0.95)),
    ]


def select(choices: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """`ar`, always first, and for every name the variant that is called so, or all whose names begin with it.

    Raises UserError for a name that fits none. "tau" may stand for "τ".
    """
    wanted = {choices[0].name}
    for name in (name.strip().replace("tau", "τ") for name in names):
        fitting = [v.name for v in choices if v.name == name] or [v.name for v in choices if v.name.startswith(name)]
        if not name or not fitting:
            raise UserError(f"--variants: {name!r} is none of {', '.join(v.name for v in choices)}")
        wanted.update(fitting)
    return [variant for variant in choices if variant.name in wanted]


@dataclass(frozen=True)
class Speed:
    """A variant at a batch size, over all prompts.

    tokens:        returned tokens. forwards: decoding forwards, summed over rows.
    first_seconds: the first pass, which compiles. seconds: median of the timed passes, prefill included.
    passes:        timed passes.
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
    passes: int
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


def measure(
    model: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    chosen: Sequence[Variant],
    batches: Sequence[int],
    repeats: int,
    records: Records,
    transformers_folder: Path | None = None,
) -> None:
    """Record passes of the variants at every batch size until each has been timed `repeats` times.

    At batch size b, b slots share all prompts. One pass of each warms up and compiles; then timed passes are taken
    in turns, so that whatever else the machine does falls on all alike. With `transformers_folder`, the `generate` of
    transformers joins in.
    """
    modes = {v.name: v.options.mode for v in chosen} | {TRANSFORMERS: "ar"}
    names = [v.name for v in chosen] + [TRANSFORMERS] * (transformers_folder is not None)
    for batch in batches:
        missing = {name: repeats - len(records.of("pass", batch=batch, name=name, first=False)) for name in names}
        missing = {name: count for name, count in missing.items() if count > 0}
        if not missing:
            continue
        engine = DecodeEngine(model, slots=batch)
        contenders = {v.name: _through_engine(engine, prompts, v) for v in chosen if v.name in missing}
        if TRANSFORMERS in missing:
            limit = chosen[0].options.max_new_tokens
            contenders[TRANSFORMERS] = through_transformers(transformers_folder, model, prompts, batch, limit)
        for turn in range(max(missing.values()) + 1):
            for name, decode in contenders.items():
                if turn <= missing[name]:
                    _pass(records, decode, name=name, mode=modes[name], batch=batch, first=turn == 0)


def _pass(records: Records, decode: Decode, **about) -> None:
    began = time.perf_counter()
    results = decode()
    seconds = time.perf_counter() - began
    records.add("pass", **about, seconds=seconds, results=results)
    log.info("batch %d  %s  %s%.1f s", about["batch"], about["name"], "first pass " * about["first"], seconds)


def speeds(records: Records) -> list[Speed]:
    """Of everything recorded that was timed at least once, and `ar` with it; by batch size."""
    recorded = dict.fromkeys((entry["batch"], entry["name"]) for entry in records.of("pass"))
    found = []
    for batch in sorted({batch for batch, _ in recorded}):
        passes = {
            name: records.of("pass", batch=batch, name=name) for size, name in recorded if size == batch
        }  # fmt: skip
        timed = {name: own for name, own in passes.items() if not own[-1]["first"]}
        if "ar" in timed:
            found += [_speed(own, timed["ar"]) for own in timed.values()]
    return found


def _speed(passes: Sequence[dict], baseline: Sequence[dict]) -> Speed:
    def median_seconds(passes):
        return float(np.median([entry["seconds"] for entry in passes if not entry["first"]]))

    results, expected = passes[-1]["results"], baseline[-1]["results"]
    runs = np.array([length for _, accepted in results for length in accepted])
    tokens, seconds = int(runs.sum()), median_seconds(passes)
    speed_up = tokens / seconds / (sum(len(ids) for ids, _ in expected) / median_seconds(baseline))
    return Speed(
        **{key: passes[0][key] for key in ("name", "mode", "batch")},
        tokens=tokens,
        forwards=len(runs),
        first_seconds=passes[0]["seconds"],
        seconds=seconds,
        passes=sum(not entry["first"] for entry in passes),
        accepted_at=[float(np.mean(runs >= n)) for n in range(1, runs.max() + 1)],
        same_as_ar=float(np.mean([own[0] == ar[0] for own, ar in zip(results, expected, strict=True)])),
        speed_up=speed_up,
        retention=speed_up / (tokens / len(runs)),
    )


def _through_engine(engine: DecodeEngine, prompts: Sequence[tuple[int, ...]], variant: Variant) -> Decode:
    requests = [Request(prompt, variant.options) for prompt in prompts]

    def decode():
        engine.adapt = variant.adapt
        return [(result.token_ids, result.accepted) for result in engine.generate(requests)]

    return decode
