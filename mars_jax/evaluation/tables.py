"""The paper's tables with our runs beside its rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mars_jax.evaluation import paper
from mars_jax.evaluation.paper import COLUMNS, PaperRow
from mars_jax.evaluation.results import Cell, Missing, Run


@dataclass(frozen=True)
class Table:
    """Rows of text, numbers and `Missing`; `digits` says how to write the numbers of each column."""

    title: str
    header: tuple[str, ...]
    digits: tuple[int, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    note: str = ""


SIZES = {"0.5B": 0.5e9, "7B": 7e9}
QUALITY_NOTE = (
    "Percentages: IFEval prompt-level strict accuracy, BBH and MMLU-Pro exact match of the extracted answer, GPQA and "
    "GSM8K the flexible extraction, HumanEval pass@1; 0-shot but for BBH (3-shot), at most 256 new tokens. Our "
    "checkpoints stand beside the paper's nearest size: compare within a source, not across."
)


def quality_table(title: str, rows: Sequence[PaperRow], runs: Sequence[Run]) -> Table:
    """Each of the paper's rows, followed by our runs of that label and mode; runs that the paper lacks come last."""
    header = ("checkpoint", "source", "mode", *COLUMNS, "average", "tokens/forward")
    lines, used = [], set()
    for row in rows:
        lines.append((row.label, f"paper {row.size}", row.mode, *row.scores, row.average, row.tokens_per_forward))
        matches = [run for run in runs if _same(row, run)]
        used.update(run.path for run in matches)
        lines += [_line(run) for run in matches]
        if not matches:
            why = Missing(f"no results file labelled {row.label!r} with mode {row.mode} near {row.size}")
            lines.append((row.label, "ours", row.mode, *[why] * (len(COLUMNS) + 2)))
    lines += [_line(run) for run in runs if run.path not in used]
    return Table(title, header, (0, 0, 0, *[1] * (len(COLUMNS) + 1), 2), tuple(lines), QUALITY_NOTE)


def _line(run: Run) -> tuple[str | Cell, ...]:
    amount = "" if run.limit is None else f", first {run.limit:g} a task"
    source = f"ours {readable(run.parameters)}{amount}"
    return (run.label, source, run.mode, *run.scores.values(), run.average, run.tokens_per_forward)


def _same(row: PaperRow, run: Run) -> bool:
    def plain(mode: str) -> str:  # τ = 1 takes one token a forward: the answers are those of mode ar
        return "ar" if mode == "τ=1" else mode

    same_size = row.size == nearest_size(run.parameters)
    return same_size and (row.label, plain(row.mode)) == (run.label, plain(run.mode))


def nearest_size(parameters: int) -> str:
    return min(SIZES, key=lambda size: abs(math.log(SIZES[size] / parameters)))


def readable(parameters: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return str(parameters)


def speed_table(runs: Sequence[Run]) -> Table:
    """Tokens a second on GSM8K by batch size, against mode ar of the same checkpoint and batch."""
    header = ("batch", "source", "mode", "tokens/s", "seconds", "against AR")
    lines: list[tuple] = []
    timed = [run for run in runs if _gsm8k(run)]
    for batch in sorted({row.batch for row in paper.SPEED} | {run.batch_size for run in timed}):
        for row in paper.SPEED:
            if row.batch == batch:
                cache = "" if row.cache_block is None else f" {row.cache_block}"
                lines.append(
                    (str(batch), "paper 7B", row.method + cache, row.tokens_per_second, row.seconds, row.speedup)
                )
        ours = [run for run in timed if run.batch_size == batch]
        lines += [_speed_line(run, ours) for run in ours]
        if not ours:
            why = Missing(f"no results file with GSM8K at batch size {batch}")
            lines.append((str(batch), "ours", "–", why, why, why))
    note = (
        "GSM8K. The paper: 256 questions, τ = 0.95, against Hugging Face `generate`. Ours: against our own compiled AR "
        "loop, a harder baseline; seconds include prefill and compilation."
    )
    return Table("Wall clock", header, (0, 0, 0, 1, 1, 2), tuple(lines), note)


def _gsm8k(run: Run) -> dict | None:
    return run.decode["tasks"].get(COLUMNS["GSM8K"][0])


def _speed_line(run: Run, ours: Sequence[Run]) -> tuple:
    did = _gsm8k(run)
    twins = [other for other in ours if (other.label, other.limit, other.mode) == (run.label, run.limit, "ar")]
    against: Cell = Missing(f"no ar run of {run.label} at batch size {run.batch_size} with the same questions")
    if twins:
        against = did["tokens_per_second"] / _gsm8k(twins[0])["tokens_per_second"]
    source = f"ours {readable(run.parameters)}, {did['answers']} questions"
    return (str(run.batch_size), source, f"{run.label}, {run.mode}", did["tokens_per_second"], did["seconds"], against)


def all_tables(runs: Sequence[Run]) -> list[Table]:
    return [
        quality_table("Quality and tokens per forward", paper.MAIN, runs),
        quality_table(
            "Ablation: the AR loss by block size", paper.ABLATION, [r for r in runs if r.mode in ("ar", "τ=1")]
        ),
        speed_table(runs),
    ]
