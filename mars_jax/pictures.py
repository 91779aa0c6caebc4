"""Pictures of decoding: how many tokens a forward yields, and which forward yielded which text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#8ecae6", "#ffd166", "#95d5b2", "#e0b1cb")


def decoding_picture(
    path: Path,
    tokens_per_forward: Mapping[str, float],
    runs: Mapping[str, Sequence[int]],
    samples: Mapping[str, Sequence[str]],
) -> None:
    """Write a PNG. Mappings go by mode: mean tokens per forward, every forward's run, a sample's texts by forward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(12, 4 + 2.2 * len(samples)), constrained_layout=True)
    grid = figure.add_gridspec(1 + len(samples), 2, height_ratios=[3, *[2] * len(samples)])
    _bars(figure.add_subplot(grid[0, 0]), tokens_per_forward)
    _run_lengths(figure.add_subplot(grid[0, 1]), runs)
    for row, (mode, texts) in enumerate(samples.items(), 1):
        axes = figure.add_subplot(grid[row, :])
        axes.set_title(f"{mode}: {len(texts)} forwards, one colour each", loc="left", fontsize=10)
        _coloured_text(axes, texts)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes, tokens_per_forward: Mapping[str, float]) -> None:
    bars = axes.bar(list(tokens_per_forward), list(tokens_per_forward.values()), color=COLOURS)
    axes.bar_label(bars, fmt="%.2f")
    axes.margins(y=0.12)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_title("tokens per forward")


def _run_lengths(axes, runs: Mapping[str, Sequence[int]]) -> None:
    width = 0.8 / len(runs)
    for i, (mode, lengths) in enumerate(runs.items()):
        counts = Counter(lengths)
        xs = sorted(counts)
        shares = [counts[x] / len(lengths) for x in xs]
        axes.bar([x + (i - (len(runs) - 1) / 2) * width for x in xs], shares, width, label=mode, color=COLOURS[i])
    axes.set_xticks(range(1, 1 + max(max(lengths) for lengths in runs.values())))
    axes.set_title("share of forwards that yield so many tokens")
    axes.legend()


def _coloured_text(axes, texts: Sequence[str], columns: int = 100) -> None:
    """Monospaced text on a grid of characters, wrapped at `columns`."""
    line, column = 0, 0
    for i, text in enumerate(texts):
        for character in text:
            if character == "\n" or column == columns:
                line, column = line + 1, 0
            if character != "\n":
                axes.add_patch(_cell(column, line, COLOURS[i % len(COLOURS)]))
                axes.text(column + 0.5, line + 0.5, character, family="monospace", ha="center", va="center", fontsize=8)
                column += 1
    axes.set_xlim(0, columns)
    axes.set_ylim(max(line + 1, 4), 0)
    axes.axis("off")


def _cell(column: int, line: int, colour: str):
    from matplotlib.patches import Rectangle

    return Rectangle((column, line), 1, 1, color=colour, linewidth=0)
