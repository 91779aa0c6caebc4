"""The costs of `benchmarks.train` as a table, JSON and a picture, each relative to packed SFT."""

import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from mars_jax.benchmarks.train import Cost

RELATIVE = ("flops", "bytes", "memory", "seconds")


def ratios(costs: Sequence[Cost]) -> dict[str, dict[str, float]]:
    """`{variant: {measure: times packed SFT}}`; measures that were not taken are left out."""
    base = costs[0]
    return {c.name: {m: getattr(c, m) / getattr(base, m) for m in RELATIVE if getattr(c, m) is not None} for c in costs}


def table(costs: Sequence[Cost]) -> str:
    """Plain text, one line a variant."""
    times_sft = ratios(costs)
    heads = "".join(f"{head:>18}" for head in ("TFLOP", "GB moved", "peak GB", "seconds"))
    lines = [f"{'':28}{'rows':>6}{'tokens':>8}{'noisy':>8}{heads}{'tiles/useful':>14}"]
    for c in costs:
        cells = [
            _cell(c.flops / 1e12, times_sft[c.name]["flops"]),
            _cell(c.bytes / 1e9, times_sft[c.name]["bytes"]),
            _cell(c.memory / 1e9, times_sft[c.name]["memory"]),
            "-" if c.seconds is None else _cell(c.seconds, times_sft[c.name]["seconds"]),
        ]
        line = f"{c.label:28}{c.rows:6}{c.row_tokens:8}{c.noisy_length:8}" + "".join(f"{cell:>18}" for cell in cells)
        lines.append(line + f"{c.tiles_computed / c.tiles_useful:>14.2f}")
    lines.append(
        f"{costs[0].trained_tokens} trained tokens each; in brackets: times packed SFT; "
        "FLOPs are those of matrix products in the compiled program;\n"
        "noisy: the objective.noisy_length that packs these chats into the fewest tokens"
    )
    return "\n".join(lines)


def _cell(value: float, ratio: float) -> str:
    return f"{value:.3f} ({ratio:.2f}x)"


def as_json(costs: Sequence[Cost]) -> str:
    device = jax.devices()[0]
    return json.dumps(
        {
            "device": f"{device.platform} {device.device_kind}",
            "host": platform.machine(),
            "jax": jax.__version__,
            "costs": [dataclasses.asdict(c) for c in costs],
            "times_sft": ratios(costs),
        },
        indent=2,
    )


def draw(costs: Sequence[Cost], path: Path) -> None:
    """Bars of every measure relative to packed SFT."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times_sft = ratios(costs)
    measures = [m for m in RELATIVE if m in times_sft[costs[0].name]]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(costs)
    for i, c in enumerate(costs):
        places = [m + (i - (len(costs) - 1) / 2) * width for m in range(len(measures))]
        bars = axes.bar(places, [times_sft[c.name][m] for m in measures], width, label=c.label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(measures)), measures)
    axes.set_ylabel("times packed SFT")
    axes.set_title(f"Cost of one training step on the same {costs[0].trained_tokens} trained tokens")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
