"""One picture of a sweep: quality against tokens per forward and against tokens a second."""

from collections.abc import Sequence

from mars_jax.evaluation.points import EXACT, FAMILIES, Point, pareto

# Marker, colour, name, and where labels stand: families stay apart for colour-blind readers (Okabe and Ito), in grey,
# and where their points coincide.
LOOKS = {
    "ar": ("*", "#000000", "AR", (0, 0)),
    "probability": ("o", "#0072B2", "probability ≥ τ", (0, 8)),
    "entropy": ("s", "#E69F00", "entropy ≤ nats", (-15, -4)),
    "margin": ("^", "#009E73", "margin ≥", (16, -4)),
    "chain": ("D", "#CC79A7", "exact chain, K drafts", (0, 8)),
    "tree": ("P", "#D55E00", "exact tree, K drafts", (0, -14)),
    "lookup": ("X", "#56B4E9", "exact lookup, K drafts", (0, 17)),
    "tree_lookup": ("p", "#555555", "exact tree and lookup, K drafts each", (0, -23)),
}


def draw(points: Sequence[Point], title: str, quality: str):
    """A matplotlib figure with a panel for each speed. Thresholds are labelled with themselves, exact points with K."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    rates = (("tokens_per_forward", "tokens per forward"), ("tokens_per_second", "tokens per second"))
    for panel, (rate, name) in zip(panels, rates, strict=True):
        _panel(panel, points, rate)
        panel.set_xlabel(name)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(quality)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title)
    return figure


def _panel(panel, points: Sequence[Point], rate: str) -> None:
    front = pareto(points, rate)
    wide = {"color": "#999999", "lw": 6, "alpha": 0.3, "solid_capstyle": "round", "zorder": 0}
    # A step: up to a point's speed its score is to be had.
    panel.step([getattr(p, rate) for p in front], [p.score for p in front], where="pre", label="Pareto front", **wide)
    for family in FAMILIES:
        members = [p for p in points if p.family == family]
        if not members:
            continue
        marker, colour, name, offset = LOOKS[family]
        x, y = [getattr(p, rate) for p in members], [p.score for p in members]
        size, style = 15 if family == "ar" else 7, ":" if family in EXACT else "-"
        panel.plot(x, y, marker=marker, ms=size, color=colour, lw=1.2, ls=style, label=name)
        for point, *at in zip(members, x, y, strict=True):
            text = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": colour}
            panel.annotate(_label(point), at, xytext=offset, **text)
    baseline = next((p for p in points if p.family == "ar"), None)
    if baseline is not None and baseline.stderr is not None:
        low, high = baseline.score - baseline.stderr, baseline.score + baseline.stderr
        panel.axhspan(low, high, color="#000000", alpha=0.06, lw=0, label="AR ± 1 standard error", zorder=-1)


def _label(point: Point) -> str:
    if point.family == "ar":
        return ""
    return str(point.draft) if point.family in EXACT else f"{point.tau:g}"
