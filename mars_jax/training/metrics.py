"""Figures of a run: `metrics.jsonl` always, TensorBoard and wandb where wanted; one writer, on process 0."""

import importlib.util
import json
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

log = logging.getLogger(__name__)


def to_host(metrics: dict[str, jax.Array]) -> dict[str, Any]:
    """Device metrics of `training.step` as plain numbers, once they are there.

    `accuracy` has one value an offset, None where there was no entry.
    """
    host = jax.device_get(metrics)
    correct, entries = host.pop("correct_by_offset"), host.pop("entries_by_offset")
    values = {name: value.item() for name, value in host.items()}
    values["accuracy"] = [round(float(c / n), 6) if n else None for c, n in zip(correct, entries, strict=True)]
    return values


def peak_memory_bytes() -> int:
    """Most memory in use so far: of the fullest local device, or of this process where devices do not tell (CPU)."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    whole = lines[:-1]  # every whole line ends with a newline
    return [json.loads(line) for line in whole if line]


def goodput(lines: list[dict[str, Any]]) -> float:
    """Share of the logged time that went into steps, not into compiling, waiting for data, evaluating or saving."""
    steps = sum(line["step_seconds"] for line in lines if line["split"] == "train")
    waiting = sum(line["data_seconds"] for line in lines if line["split"] == "train")
    others = sum(line["seconds"] for line in lines if line["split"] != "train")
    return (steps - waiting) / max(steps + others, 1e-9)


class MetricsLog:
    """Writes figures by step. A line is `{"split": "train"|"eval"|"event", "step": …, figures…}`.

    Continuing from a checkpoint first drops what an interrupted run wrote after it: each step appears once.
    """

    def __init__(self, folder: Path, start_step: int, tensorboard: bool, wandb_project: str | None, config: dict):
        self.path = folder / "metrics.jsonl"
        self.file = self.tensorboard = self.wandb = None
        if jax.process_index() != 0:
            return
        kept = [line for line in read_metrics(self.path) if line["step"] <= start_step] if start_step else []
        partial = self.path.with_suffix(".jsonl.tmp")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, self.path)
        self.file = self.path.open("a", encoding="utf-8", buffering=1)
        if tensorboard and importlib.util.find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            self.tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)
        elif tensorboard:
            log.info("tensorboardX is not installed: figures go to %s only", self.path)
        if wandb_project is not None:
            import wandb

            self.wandb = wandb.init(project=wandb_project, dir=folder, config=config, name=folder.name, resume="allow")

    def write(self, split: str, step: int, values: dict[str, Any]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"split": split, "step": step, **_finite(values)}) + "\n")
        scalars = {f"{split}/{name}": value for name, value in _scalars(values).items()}
        if self.tensorboard is not None:
            for name, value in scalars.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(scalars, step=step)

    def close(self) -> None:
        for sink in (self.file, self.tensorboard):
            if sink is not None:
                sink.close()
        if self.wandb is not None:
            self.wandb.finish()


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity: they become their names."""

    def plain(value):
        return str(value) if isinstance(value, float) and not np.isfinite(value) else value

    return {name: plain(value) for name, value in values.items()}


def _scalars(values: dict[str, Any]) -> dict[str, float]:
    """Numbers, with lists spread out by index, for the sinks that plot."""
    flat = {}
    for name, value in values.items():
        many = value if isinstance(value, list) else [value]
        names = [f"{name}_{i}" for i in range(len(many))] if isinstance(value, list) else [name]
        flat |= {n: v for n, v in zip(names, many, strict=True) if isinstance(v, int | float)}
    return flat
