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
    """Tokens per forward of the exact mode against what a step costs and against the AR loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6), sharey=True, layout="constrained")
    measures = (("tokens of both streams per step", "tokens_per_step"), ("held-out AR loss, nats per token", "loss_ar"))
    for axis, (label, measure) in zip(axes, measures, strict=True):
        for result in results:
            if "tree" in result.decoding:
                point = getattr(result, measure), result.decoding["tree"].tokens_per_forward
                axis.plot(*point, "o")
                axis.annotate(result.name, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"tokens per forward, exact mode (tree of {WIDTH} drafts)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
