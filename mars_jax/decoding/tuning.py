"""How wide to draft here: step costs measured on this machine, combined with what the user's own prompts accept.

One run with the widest shape tells how often the 1st, 2nd, … candidate stands; narrower shapes offer the same
candidates, only fewer of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.decoding.batch import Batch
from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import LAYOUTS, DecodeOptions, Generation, Request
from mars_jax.errors import UserError

WIDTHS = tuple(range(1, 8))
STEPS, REPEATS = 4, 3  # of a timed call; timed calls of each shape
PROMPTS, ANSWER = 8, 64  # most prompts that are decoded to see what they accept, and tokens of each


@dataclass(frozen=True)
class Candidate:
    """A shape of step. options: that ask for it. seconds: one step of all slots. tokens_per_forward: expected."""

    name: str
    options: DecodeOptions
    seconds: float
    tokens_per_forward: float

    @property
    def rate(self) -> float:
        """Expected tokens a second of one row."""
        return self.tokens_per_forward / self.seconds


def expected_tokens(survival: Sequence[float], width: int, layout: str) -> float:
    """Tokens a forward of a narrower shape.

    survival: share of forwards with candidates whose first 1, 2, … of them stand.
    layout:   "chain" starts cold after every forward in which some draft fell; others always have candidates.
    """
    always = 1 + sum(survival[:width])
    if layout != "chain":
        return always
    # A forward with drafts follows one in which all stood, or a cold one; cold ones follow refusals.
    refused = 1 - survival[width - 1]
    return (always + refused) / (1 + refused)


def survival_of(results: Sequence[Generation], width: int) -> list[float]:
    """Shares of forwards whose first 1 … `width` candidates stood; first forwards in `verify`, which have none, apart.

    The last forward of an answer does not count: its run was cut at the end.
    """
    first = 1 if results[0].options.mode == "verify" else 0
    runs = np.array([length for result in results for length in result.accepted[first:-1]])
    return [float((runs > i).mean()) if len(runs) else 0.0 for i in range(1, width + 1)]


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; of equals the first."""
    return max(candidates, key=lambda candidate: candidate.rate)


def tune(
    engine: DecodeEngine,
    prompts: Sequence[Sequence[int]],
    base: DecodeOptions,
    measure: Callable[[DecodeEngine, DecodeOptions, int], float] | None = None,
) -> list[Candidate]:
    """Plain AR and the shapes of `base`'s mode, with their cost here and the tokens that these prompts yield.

    In mode "window" candidates count that are accepted at `base`'s threshold, in "verify" those that are confirmed.
    Left out are shapes that could not win even if they cost no more than the next narrower one. The engine must not
    adapt.
    measure: seconds of a step after so many tokens; `step_seconds` unless given.
    Raises UserError for a mode without a width to choose.
    """
    families = _families(base)
    measure = measure or step_seconds
    results = engine.generate([Request(tuple(prompt), _widest(base)) for prompt in prompts[:PROMPTS]])
    survival = survival_of(results, WIDTHS[-1])
    most = expected_tokens(survival, WIDTHS[-1], "tree")
    context = int(np.mean([r.prompt_tokens + len(r.token_ids) / 2 for r in results]))

    autoregressive = replace(base, mode="ar", lookup=False)
    candidates = [Candidate("ar", autoregressive, measure(engine, autoregressive, context), 1.0)]
    for layout, family in families.items():
        least = 0.0
        for name, options in family.items():
            if most <= least * choose(candidates).rate:
                break
            least = measure(engine, options, context)
            candidates.append(Candidate(name, options, least, expected_tokens(survival, options.width, layout)))
    return candidates


def _families(base: DecodeOptions) -> dict[str, dict[str, DecodeOptions]]:
    """By layout, the shapes of a mode by name, narrow ones first."""
    match base.mode:
        case "window":
            return {"window": {f"window W={w}": replace(base, window=w) for w in WIDTHS}}
        case "verify":
            return {
                layout: {f"verify {layout} K={k}": replace(base, draft=k, layout=layout) for k in WIDTHS}
                for layout in LAYOUTS
            }
        case _:
            raise UserError(f"mode {base.mode!r} has nothing to tune: --tune chooses widths of window and verify")


def _widest(base: DecodeOptions) -> DecodeOptions:
    limit = min(base.max_new_tokens, ANSWER)
    return replace(base, window=WIDTHS[-1], draft=WIDTHS[-1], layout="tree", max_new_tokens=limit)


def step_seconds(engine: DecodeEngine, options: DecodeOptions, context: int) -> float:
    """Median seconds of a step with all slots full, each row after `context` tokens; compilation is not counted."""
    steps = STEPS * (REPEATS + 1)
    room = steps * (options.width + 1)
    context = max(1, min(context, engine.cfg.max_positions - room))
    allowed = np.flatnonzero(np.asarray(engine.vocabulary.emit))
    prompt = np.random.default_rng(0).choice(allowed, context).tolist()
    request = Request(tuple(prompt), replace(options, max_new_tokens=room))
    batch = Batch(engine, [request])
    for row in range(engine.slots):
        batch.insert(row, request, seed=row)
    # Nothing may end a row before the last timed step.
    batch.settings = batch.settings._replace(stop=jnp.full_like(batch.settings.stop, -1))
    batch.make_room(steps)
    jax.block_until_ready(batch.step(STEPS, until_one_finishes=False))
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(batch.step(STEPS, until_one_finishes=False))
        taken.append((time.perf_counter() - began) / STEPS)
    return float(np.median(taken))


def table(candidates: Sequence[Candidate], slots: int) -> str:
    """Plain text, a line a shape, the choice marked."""
    best = choose(candidates)
    lines = [f"{'':2}{'':18}{'ms a step':>11}{'tokens/forward':>16}{'tokens/s':>10}"]
    for c in candidates:
        mark = "*" if c is best else ""
        lines.append(f"{mark:2}{c.name:18}{c.seconds * 1e3:>11.2f}{c.tokens_per_forward:>16.2f}{slots * c.rate:>10.1f}")
    return "\n".join([*lines, f"chosen: {best.name} ({slots} slots; expected, prefill not counted)"])
