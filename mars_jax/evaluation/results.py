"""A results file of `evaluate`, read back."""

import json
from dataclasses import dataclass
from pathlib import Path

from mars_jax.errors import UserError
from mars_jax.evaluation.paper import COLUMNS


@dataclass(frozen=True)
class Missing:
    """A number that is not there, and why."""

    reason: str


Cell = float | Missing


@dataclass(frozen=True)
class Run:
    """What a table needs of one evaluation. Scores are percentages by `paper.COLUMNS`."""

    path: Path
    label: str
    parameters: int
    batch_size: int
    options: dict
    limit: float | None
    scores: dict[str, Cell]
    decode: dict

    @property
    def mode(self) -> str:
        return describe_mode(self.options)

    @property
    def average(self) -> Cell:
        absent = [column for column, score in self.scores.items() if isinstance(score, Missing)]
        if absent:
            return Missing(f"the average is over all six sets; {self.label} ({self.mode}) lacks {', '.join(absent)}")
        return sum(self.scores.values()) / len(self.scores)

    @property
    def tokens_per_forward(self) -> Cell:
        rate = self.decode["total"]["tokens_per_forward"]
        return Missing("nothing was generated") if rate is None else rate


def describe_mode(options: dict) -> str:
    """How answers were decoded, as tables and curves name it."""
    mode = options["mode"]
    if mode == "ar":
        return "ar"
    if mode == "verify":
        return f"exact {options['layout']} K={options['draft']}" + (" + lookup" if options.get("lookup") else "")
    if mode in ("jacobi", "lookup"):
        return f"{mode} K={options['draft']}"
    score = {"probability": "τ", "entropy": "entropy≤", "margin": "margin≥"}[options["score"]]
    threshold = f"{score}={options['tau']:g}" if score == "τ" else f"{score}{options['tau']:g}"
    if mode == "diffusion":
        return "block diffusion" + (f" {threshold}" if options["tau"] < 1 else "")
    where = {"window": "", "block": f", block cache {options['cache_block']}", "recompute": ", no cache"}[mode]
    return threshold + (", gated" if options["gate_first"] else "") + where


def read_run(path: Path) -> Run:
    """A `Run` from a `results.json` or the folder that holds it."""
    path = path / "results.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        run, decode = found["run"], found["decode"]
        return Run(
            path=path,
            label=run["label"],
            parameters=run["parameters"],
            batch_size=run["batch_size"],
            options=decode["settings"],
            limit=run["conditions"]["limit"],
            scores={column: _score(found, column) for column in COLUMNS},
            decode=decode,
        )
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a results file of `python -m mars_jax.evaluate` ({error!r})") from None


def _score(found: dict, column: str) -> Cell:
    task, metric = COLUMNS[column]
    scores = found["results"].get(task)
    if scores is not None:
        return 100 * scores[metric]
    reason = found["run"]["skipped"].get(task, "it was not among the tasks")
    return Missing(f"{found['run']['label']} has no {column} ({task}): {reason}")
