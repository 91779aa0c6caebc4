"""The speeds of `benchmarks.decode` as a table, JSON, a picture and the layout of the paper's wall-clock table."""

import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from mars_jax.benchmarks.decode import ADAPTIVE, Speed

SHOWN_OFFSETS = 4


def table(speeds: Sequence[Speed]) -> str:
    """Plain text, one line a variant and batch size."""
    heads = ("tok/s", "× ar", "tok/fwd", "retention", "same as ar", "compile s")
    lines = [
        f"{'batch':>5}  {'':22}" + "".join(f"{head:>11}" for head in heads) + "  forwards that took ≥ 2, 3, … tokens"
    ]
    for s in speeds:
        cells = (
            f"{s.tokens_per_second:.1f}",
            f"{s.speed_up:.2f}",
            f"{s.tokens_per_forward:.2f}",
            f"{s.retention:.2f}",
            f"{s.same_as_ar:.0%}",
            f"{max(0.0, s.first_seconds - s.seconds):.1f}",
        )
        offsets = "  ".join(f"{share:.0%}" for share in s.accepted_at[1 : SHOWN_OFFSETS + 1])
        lines.append(f"{s.batch:5}  {s.name:22}" + "".join(f"{cell:>11}" for cell in cells) + f"  {offsets}")
    lines.append(
        "tok/s counts returned tokens only, prefill's time included; × ar and retention: at the same batch size; "
        "medians of " + " or ".join(str(n) for n in sorted({s.passes for s in speeds})) + " passes"
    )
    for name in dict.fromkeys(s.name for s in speeds if s.name.endswith(ADAPTIVE)):
        slowest = min((s for s in speeds if s.name == name), key=lambda s: s.speed_up)
        lines.append(f"{name}: at least {slowest.speed_up:.2f} × ar, at batch {slowest.batch}")
    return "\n".join(lines)


def as_json(speeds: Sequence[Speed], about: dict) -> str:
    device = jax.devices()[0]
    records = [
        dataclasses.asdict(s) | {"tokens_per_second": s.tokens_per_second, "tokens_per_forward": s.tokens_per_forward}
        for s in speeds
    ]
    where = {"device": f"{device.platform} {device.device_kind}", "host": platform.machine(), "jax": jax.__version__}
    return json.dumps(about | where | {"speeds": records}, indent=2)


def paper_table(speeds: Sequence[Speed]) -> str:
    """Our AR, recompute and block-cached runs in the layout of the paper's wall-clock table, its numbers beside."""
    from mars_jax.evaluation.paper import SPEED

    lines = [
        f"{'batch':>5}  {'method':22}{'B_cache':>8}{'tok/s':>10}{'speed-up':>10}   ours: {'tok/s':>7}{'speed-up':>10}"
    ]
    for row in SPEED:
        name = "ar" if row.speedup == 1 else f"block {row.cache_block}" if row.cache_block else "recompute"
        ours = [s for s in speeds if s.batch == row.batch and s.name.startswith(name)]
        cells = f"{ours[0].tokens_per_second:>13.1f}{ours[0].speed_up:>9.2f}×" if ours else f"{'not measured':>23}"
        block = row.cache_block or "–"
        lines.append(
            f"{row.batch:5}  {row.method:22}{block:>8}{row.tokens_per_second:>10.1f}{row.speedup:>9.2f}×   {cells}"
        )
    lines.append(
        "Paper: 7B, 256 GSM8K questions, τ = 0.95, against transformers' generate. Ours: this model, these prompts, "
        "this machine, against our own compiled AR loop; compare ratios, never tokens a second."
    )
    return "\n".join(lines)


def draw(speeds: Sequence[Speed], path: Path) -> None:
    """Speed-up over AR by batch size, one line a variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    styles = {"window": "o-", "block": "s--", "verify": "^-", "lookup": "v:", "jacobi": "x:", "recompute": "d:"}
    for name in dict.fromkeys(s.name for s in speeds):
        own = [s for s in speeds if s.name == name]
        axes.plot([s.batch for s in own], [s.speed_up for s in own], styles.get(own[0].mode, "k-"), label=name, ms=4)
    axes.axhline(1.0, color="grey", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size (slots)")
    axes.set_ylabel("tokens a second, times AR")
    axes.set_title("Speed-up over AR decoding at the same batch size")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)
