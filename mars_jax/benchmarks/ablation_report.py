"""The results of `benchmarks.ablation` as a Markdown table, JSON and a picture."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from mars_jax.benchmarks.ablation import VARIANTS, WIDTH, Decoding, Result
from mars_jax.training.checkpoint import code_version

HEADER = (
    "variant",
    "tokens/step",
    "s/step",
    "AR loss",
    "AR right",
    "accuracy at 1 / 2 / 3",
    "tree took 1 / 2 / 3",
    "tree tok/fwd",
    "window tok/fwd",
    "window right",
    "own width: tree, window",
)


def table(results: Sequence[Result]) -> str:
    """Markdown, a line a variant, and what has not been run."""
    lines = [HEADER, ("---", *["---:"] * (len(HEADER) - 1)), *(_cells(result) for result in results)]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    missing = [v.name for v in VARIANTS if v.name not in {result.name for result in results}]
    return text + (f"\n\nNot run: {', '.join(missing)}." if missing else "")


def _cells(result: Result) -> tuple[str, ...]:
    tree = result.decoding.get("tree")
    window = result.decoding.get("window") or result.decoding.get("diffusion")
    return (
        result.name,
        f"{result.tokens_per_step}",
        f"{result.seconds_per_step:.2f}",
        f"{result.loss_ar:.4f}",
        f"{result.decoding['ar'].right_answers:.0%}",
        _shares(result.accuracy[1 : WIDTH + 1]),
        _shares(drafts_taken(tree)) if tree else "—",
        f"{tree.tokens_per_forward:.2f}" if tree else "—",
        f"{window.tokens_per_forward:.2f}" if window else "—",
        f"{window.right_answers:.0%}" if window else "—",
        _own_width(result),
    )


def drafts_taken(decoding: Decoding) -> list[float]:
    """Share of forwards that took the candidate at offset 1, 2, … (that at offset 0 always is)."""
    shares = decoding.acceptance_by_offset[1 : WIDTH + 1]
    return shares + [0.0] * (WIDTH - len(shares))


def _shares(values: Sequence[float | None]) -> str:
    return " / ".join("—" if value is None else f"{value:.0%}" for value in values)


def _own_width(result: Result) -> str:
    if "tree_own" not in result.decoding:
        return ""
    own = result.decoding
    return f"{own['tree_own'].tokens_per_forward:.2f}, {own['window_own'].tokens_per_forward:.2f}"


def as_json(results: Sequence[Result]) -> str:
    device = jax.devices()[0]
    about = {
        "code": code_version(),
        "device": f"{device.platform} {device.device_kind}",
        "host": platform.machine(),
        "jax": jax.__version__,
    }
    return json.dumps({**about, "results": [asdict(result) for result in results]}, indent=1)


def draw(results: Sequence[Result], path: Path) -> None:
    """Tokens per forward of the exact mode against what training cost and against the AR loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = sorted(
        (result for result in results if "tree" in result.decoding),
        key=lambda result: -result.decoding["tree"].tokens_per_forward,
    )
    heights = [result.decoding["tree"].tokens_per_forward for result in shown]
    measures = {
        "thousand tokens of both streams, all steps": [tokens_computed(result) / 1000 for result in shown],
        "held-out AR loss, nats per token": [result.loss_ar for result in shown],
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6), sharey=True, layout="constrained")
    for axis, (label, values) in zip(axes, measures.items(), strict=True):
        axis.plot(values, heights, "o")
        for result, point, place in zip(shown, zip(values, heights, strict=True), spread(heights), strict=True):
            axis.annotate(
                result.name, point, (1.03, place), textcoords=("axes fraction", "data"), fontsize=8, va="center",
                arrowprops={"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.5, "relpos": (0, 0.5)},
            )  # fmt: skip
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"tokens per forward, exact mode (tree of {WIDTH} drafts)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def tokens_computed(result: Result) -> int:
    return result.tokens_per_step * result.settings["train"]["steps"]


def spread(falling: Sequence[float], lines: int = 32) -> list[float]:
    """Where to write labels that belong at these heights, at least one of `lines` lines apart."""
    places: list[float] = []
    gap = (max(falling, default=0.0) - min(falling, default=0.0)) / lines
    for height in falling:
        places.append(min(height, places[-1] - gap) if places else height)
    return places
