"""The whole loop with the real trainer: two processes, preempted twice, end where an undisturbed run ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.commands import ROOT, environment

from mars_jax.models.loading import load

STEPS = 150


def start_pod(folder: Path, cache: Path) -> subprocess.Popen:
    run = (f"output_dir={folder}/run", f"train.steps={STEPS}", "train.save_every=50", "train.keep=2")
    return subprocess.Popen(
        [
            sys.executable,
            "launch/local/pod.py",
            *("--processes", "2", "--max-failures", "0", "--state", folder / "state"),
            *("--", "--config", "tests/launch/data/run.yaml", *run),
        ],
        cwd=ROOT,
        # Every life compiles the same step.
        env=environment(JAX_COMPILATION_CACHE_DIR=str(cache), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"),
        stderr=subprocess.PIPE,
        text=True,
    )


def trained_steps(folder: Path) -> list[int]:
    log = folder / "run/metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record["step"] for record in records if record["split"] == "train"]


def wait_for_step(folder: Path, step: int, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while max(trained_steps(folder), default=0) < step:
        assert time.monotonic() < deadline, (folder / "state/worker-0.log").read_text()[-2000:]
        time.sleep(0.1)


def finish(pod: subprocess.Popen, folder: Path) -> str:
    _, log = pod.communicate(timeout=600)
    assert pod.returncode == 0, log + (folder / "state/worker-0.log").read_text()[-2000:]
    return log


@pytest.mark.slow
def test_preempted_twice_it_ends_in_the_same_parameters(tmp_path):
    undisturbed = tmp_path / "undisturbed"
    assert "preempted" not in finish(start_pod(undisturbed, tmp_path / "cache"), undisturbed)

    preempted = tmp_path / "preempted"
    pod = start_pod(preempted, tmp_path / "cache")
    for step, victim in ((10, 1), (80, 0)):  # before the first regular checkpoint, and between two
        wait_for_step(preempted, step)
        os.kill(int((preempted / f"state/worker-{victim}.pid").read_text()), signal.SIGTERM)
    log = finish(pod, preempted)
    assert log.count("preempted") == 2, log
    assert not list((preempted / "state").glob("*.pid"))

    assert trained_steps(preempted) == trained_steps(undisturbed) == list(range(1, STEPS + 1))
    same = jax.tree.map(
        lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)),
        load(str(undisturbed / "run")).params,
        load(str(preempted / "run")).params,
    )
    assert all(jax.tree.leaves(same)), same
