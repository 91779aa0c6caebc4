"""A picture of a run: its curves, from `metrics.jsonl`."""

import logging
from pathlib import Path

from mars_jax.training.metrics import goodput, read_metrics

log = logging.getLogger(__name__)


def draw_report(folder: Path) -> Path | None:
    """Write `report.png` beside `metrics.jsonl`; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        log.info("matplotlib is not installed: no report.png")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_metrics(folder / "metrics.jsonl")
    train = [line for line in lines if line["split"] == "train"]
    held_out = [line for line in lines if line["split"] == "eval"]
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    for name in ("loss", "loss_ar", "loss_mask"):
        _curve(axes[0, 0], train, name, label=name.replace("_", " "))
        _curve(axes[0, 0], held_out, name, label=f"held-out {name.replace('_', ' ')}", marker="o", linestyle="--")
    axes[0, 0].set_title("loss per trained token (nats)")
    for offset in range(max((len(line["accuracy"]) for line in train), default=0)):
        points = [(line["step"], line["accuracy"][offset]) for line in train if line["accuracy"][offset] is not None]
        if points:
            axes[0, 1].plot(*zip(*points, strict=True), label=f"after {offset} placeholders")
    axes[0, 1].set_title("next-token accuracy by placeholders looked through")
    _curve(axes[1, 0], train, "trained_tokens_per_second", label="trained tokens/s")
    axes[1, 0].set_title(f"throughput (goodput {goodput(lines):.0%})")
    _curve(axes[1, 1], train, "grad_norm", label="gradient norm")
    axes[1, 1].set_title("gradient norm and learning rate")
    rate = axes[1, 1].twinx()
    _curve(rate, train, "learning_rate", label="learning rate", color="tab:orange")
    for axis in axes.flat:
        axis.set_xlabel("step")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    path = folder / "report.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _curve(axis, lines: list[dict], name: str, **style) -> None:
    points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    if points:
        axis.plot(*zip(*points, strict=True), **style)
