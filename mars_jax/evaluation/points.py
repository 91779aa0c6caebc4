"""The points of a sweep: settings to measure, and what was measured."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mars_jax.decoding.requests import DecodeOptions
from mars_jax.evaluation.paper import COLUMNS
from mars_jax.evaluation.results import describe_mode

FAMILIES = ("ar", "probability", "entropy", "margin", "chain", "tree", "lookup", "tree_lookup")
EXACT = ("chain", "tree", "lookup", "tree_lookup")  # their answers are those of ar
DRAFTS = range(1, 8)
THRESHOLDS = {
    "probability": (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5),
    "entropy": (0.05, 0.1, 0.2, 0.4, 0.8, 1.2),  # nats
    "margin": (0.95, 0.9, 0.8, 0.7, 0.5, 0.3),
}


@dataclass(frozen=True)
class Setting:
    """A point to be measured: its family and the options that make it."""

    family: str
    options: dict

    @property
    def name(self) -> str:
        return describe_mode(asdict(DecodeOptions(**self.options)))

    @property
    def folder(self) -> str:
        """A plain name for its files, such as `probability-0.95` or `tree-3`."""
        value = self.options.get("tau", self.options.get("draft"))
        return self.family if value is None else f"{self.family}-{value:g}"


def settings(families: Sequence[str], window: int) -> list[Setting]:
    """What to measure, `ar` first. `window` is that of the thresholds' families."""
    found = []
    for family in FAMILIES:
        if family not in families:
            continue
        if family == "ar":
            found.append(Setting(family, {"mode": "ar"}))
        elif family in THRESHOLDS:
            shared = {"mode": "window", "score": family, "window": window}
            found += [Setting(family, {**shared, "tau": tau}) for tau in THRESHOLDS[family]]
        elif family == "lookup":
            found += [Setting(family, {"mode": "lookup", "draft": draft}) for draft in DRAFTS]
        elif family == "tree_lookup":
            both = {"mode": "verify", "layout": "tree", "lookup": True}
            found += [Setting(family, {**both, "draft": draft}) for draft in DRAFTS]
        else:
            found += [Setting(family, {"mode": "verify", "layout": family, "draft": draft}) for draft in DRAFTS]
    return found


@dataclass(frozen=True)
class Point:
    """One measured setting. `score` in percent is the mean over the tasks; `stderr` is its standard error, if known."""

    family: str
    name: str
    tau: float | None
    draft: int | None
    score: float
    stderr: float | None
    tokens_per_forward: float
    tokens_per_second: float
    answers: int
    tokens: int
    forwards: int
    seconds: float


def measured(setting: Setting, results: dict) -> Point:
    """The point that a setting's results make."""
    scores, errors = zip(*(_headline(results, task) for task in _top_level(results)), strict=True)
    known = all(isinstance(error, float) for error in errors)
    total = results["decode"]["total"]
    return Point(
        family=setting.family,
        name=setting.name,
        tau=setting.options.get("tau"),
        draft=setting.options.get("draft"),
        score=100 * sum(scores) / len(scores),
        stderr=100 * sum(e * e for e in errors) ** 0.5 / len(errors) if known else None,
        **{
            key: total[key]
            for key in ("tokens_per_forward", "tokens_per_second", "answers", "tokens", "forwards", "seconds")
        },
    )


def _top_level(results: dict) -> list[str]:
    """Tasks and groups that are no part of a group."""
    members = {name for children in results["group_subtasks"].values() for name in children}
    return [name for name in results["results"] if name not in members]


def _headline(results: dict, task: str) -> tuple[float, float | str]:
    """The score of a task that its table shows, else its first metric; and the standard error."""
    scores = results["results"][task]
    known = dict(COLUMNS.values())
    metric = known.get(task) or next(key for key in scores if "," in key and "_stderr" not in key)
    name, filtered = metric.split(",")
    return scores[metric], scores.get(f"{name}_stderr,{filtered}", "N/A")


def pareto(points: Sequence[Point], rate: str) -> list[Point]:
    """The points that no other beats in both the score and the rate, by rising rate."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-getattr(p, rate), -p.score)):
        if not best or point.score > best[-1].score:
            best.append(point)
    return best[::-1]


def write_points(points: Sequence[Point], about: dict, folder: Path) -> None:
    """`points.json` (with `about`) and `points.csv`."""
    rows = [asdict(point) for point in points]
    text = json.dumps({**about, "points": rows}, indent=2, ensure_ascii=False, default=str)
    (folder / "points.json").write_text(text + "\n", encoding="utf-8")
    with (folder / "points.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
