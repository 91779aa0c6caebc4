"""Local files that stand for the evaluation sets of the hub, in the layout in which their authors publish them.

gsm8k/{train,test}.jsonl, ifeval/input_data.jsonl, bbh/<subset>.json, mmlu_pro/test.jsonl.gz, mt_bench/question.jsonl,
humaneval/HumanEval.jsonl, mbpp/mbpp.jsonl, gpqa/gpqa_{main,diamond,extended}.csv (to be had from its authors only).
"""

import csv
import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path

from mars_jax.errors import UserError

Splits = dict[str, list[dict]]


def existing(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path}: no such file. `evaluate --help` shows the layout that --data-dir expects")
    return path


def read_lines(path: Path) -> list[dict]:
    """The values of a JSON-lines file, `.gz` or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(existing(path), "rt", encoding="utf-8", newline="\n") as file:  # texts hold U+2028: never splitlines
        return [json.loads(line) for line in file if line.strip()]


def _gsm8k(folder: Path, _) -> Splits:
    return {split: read_lines(folder / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")}


def _ifeval(folder: Path, _) -> Splits:
    return {"train": read_lines(folder / "ifeval" / "input_data.jsonl")}  # the hub calls its only split so


def _humaneval(folder: Path, _) -> Splits:
    return {"test": read_lines(folder / "humaneval" / "HumanEval.jsonl")}


def _mbpp(folder: Path, _) -> Splits:
    rows = read_lines(folder / "mbpp" / "mbpp.jsonl")
    borders = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}
    return {name: [r for r in rows if first <= r["task_id"] <= last] for name, (first, last) in borders.items()}


def _bbh(folder: Path, subset: str) -> Splits:
    text = existing(folder / "bbh" / f"{subset}.json").read_text(encoding="utf-8")
    return {"test": json.loads(text)["examples"]}


@functools.lru_cache(maxsize=1)  # fourteen tasks are cut from this one file
def _mmlu_pro(folder: Path, _) -> Splits:
    return {"test": read_lines(folder / "mmlu_pro" / "test.jsonl.gz")}


def _gpqa(folder: Path, subset: str) -> Splits:
    path = folder / "gpqa" / f"{subset}.csv"
    if not path.exists():
        raise UserError(
            f"{path}: no such file. The authors of GPQA ask that it not be put online in plain text: get it from them "
            "(github.com/idavidrein/gpqa) and put the csv file there"
        )
    with path.open(encoding="utf-8", newline="") as file:
        return {"train": list(csv.DictReader(file))}


# By the hub name that the harness's definitions give; called with the folder and the name of the subset.
READERS: dict[str, Callable[[Path, str | None], Splits]] = {
    "openai/gsm8k": _gsm8k,
    "google/IFEval": _ifeval,
    "openai/openai_humaneval": _humaneval,
    "google-research-datasets/mbpp": _mbpp,
    "SaylorTwift/bbh": _bbh,
    "TIGER-Lab/MMLU-Pro": _mmlu_pro,
    "Idavidrein/gpqa": _gpqa,
}
