"""What holds for every script in launch/: clean, helpful, and harmless under --dry-run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import ROOT, launch

CONFIG = "tests/launch/data/run.yaml"  # committed, as the roads that copy the last commit ask for
TRAIN = ("--", "--config", CONFIG, "output_dir=gs://bucket/runs/a")
WHERE = ("--name", "mars", "--zone", "us-east5-a", "--slice", "v6e:4x4")
CLUSTER = ("--name", "mars", "--cluster", "c", "--slice", "v6e:4x4", "--image", "registry/mars:1")

# Each script with arguments that are complete.
ROADS = {
    "tpu_vm/tpu_vm.sh": ("up", *WHERE),
    "gce/slice.sh": ("up", *WHERE),
    "gke/gke.sh": ("submit",),
    "gke/gcluster.sh": (*CLUSTER, "--location", "us-east5"),
    "gke/xpk.sh": (*CLUSTER, "--zone", "us-east5-b"),
    "gpu/slurm.sh": ("--nodes", "2", "--gpus-per-node", "8", "--time", "1:00:00"),
    "gpu/node.sh": (),
    "local/pod.py": (),
}
SHELL_FILES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "launch").rglob("*")
    if path.suffix == ".sh" or (path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash"))
)


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    assert shellcheck, "install the dev extra: it brings shellcheck"
    found = subprocess.run([shellcheck, *SHELL_FILES], cwd=ROOT, text=True, capture_output=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "launch/tpu_vm/tpu_vm.sh" in SHELL_FILES and "launch/gpu/job.sbatch" in SHELL_FILES


@pytest.mark.parametrize("script", [*ROADS, "gke/render.py", "gpu/job.sbatch", "worker.sh", "setup_host.sh"])
def test_help_shows_an_example_and_touches_nothing(script, tools):
    result = launch(script, "--help", tools=tools)
    assert result.returncode == 0, result.stderr
    assert f"launch/{script} " in result.stdout
    assert tools.calls() == []


@pytest.mark.parametrize("script", ROADS)
def test_dry_run_calls_no_tool_and_ends_in_the_trainer(script, tools):
    result = launch(script, *ROADS[script], "--dry-run", *TRAIN, tools=tools)
    assert result.returncode == 0, result.stderr
    assert tools.calls() == []
    assert "worker.sh" in result.stdout or "job.sbatch" in result.stdout
    assert "output_dir=gs://bucket/runs/a" in result.stdout


def test_worker_dry_run_shows_the_command_every_road_ends_in():
    result = launch("worker.sh", "--dry-run", "--config", CONFIG, "train.steps=3")
    assert result.stdout == f"{sys.executable} -m mars_jax.train --config {CONFIG} train.steps=3\n"


def test_batch_script_dry_run_shows_what_its_tasks_run(tools):
    result = launch("gpu/job.sbatch", "--dry-run", "--config", CONFIG, tools=tools)
    assert result.stdout.endswith(f" --wait=300 {ROOT}/launch/worker.sh --config {CONFIG}\n")
    assert tools.calls() == []


@pytest.mark.parametrize("script", ROADS)
def test_unknown_option_is_wrong_input(script, tools):
    result = launch(script, *ROADS[script], "--colour", "blue", *TRAIN, tools=tools)
    assert result.returncode == 2
    assert "--colour" in result.stderr
    assert tools.calls() == []


@pytest.mark.parametrize("script", ROADS)
def test_without_a_config_nothing_starts(script, tools):
    result = launch(script, *ROADS[script], tools=tools)
    assert result.returncode == 2
    assert "no --config FILE after '--'" in result.stderr
    assert tools.calls() == []


@pytest.mark.parametrize("script", [s for s in ROADS if s != "local/pod.py"])
def test_a_config_that_is_not_there_is_named(script, tools):
    result = launch(script, *ROADS[script], "--", "--config", "configs/no.yaml", "output_dir=gs://b/a", tools=tools)
    assert result.returncode == 2
    assert "configs/no.yaml" in result.stderr
    assert not any("create" in call or "apply" in call or "submit" in call for call in tools.calls())


@pytest.mark.parametrize("script", ["tpu_vm/tpu_vm.sh", "gce/slice.sh", "gke/gke.sh", "gke/gcluster.sh", "gke/xpk.sh"])
def test_output_on_a_disk_that_goes_away_is_refused(script, tools):
    result = launch(script, *ROADS[script], "--", "--config", CONFIG, "output_dir=runs/a", tools=tools)
    assert result.returncode == 2
    assert "output_dir=gs://BUCKET/PATH" in result.stderr
    assert tools.calls() == []


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("tpu_vm/tpu_vm.sh", ("create", "--name", "mars", "--zone", "z", "--slice", "v5e"), "v5e:16x16"),
        ("tpu_vm/tpu_vm.sh", ("create", "--name", "mars", "--zone", "z", "--slice", "tpu7x:2x2x2"), "launch/gke/"),
        ("tpu_vm/tpu_vm.sh", ("create", "--name", "Mars!", "--zone", "z", "--slice", "v5e:4x4"), "Mars!"),
        ("tpu_vm/tpu_vm.sh", ("create", "--zone", "z", "--slice", "v5e:4x4"), "--name is missing"),
        ("tpu_vm/tpu_vm.sh", ("create", "--name", "--zone", "z"), "--name needs a value"),
        ("tpu_vm/tpu_vm.sh", ("create", *WHERE, "--spot", "--reserved"), "choose one"),
        ("tpu_vm/tpu_vm.sh", ("create", *WHERE, "--poll", "soon"), "whole number"),
        ("tpu_vm/tpu_vm.sh", ("fly", *WHERE), "unknown command fly: expected one of up create wait"),
        ("tpu_vm/tpu_vm.sh", WHERE, "no command: expected one of up create wait"),
        ("gke/gke.sh", ("submit", "--set"), "--set needs a value"),
        ("gpu/slurm.sh", ("--spot", "--nodes", "2"), "unknown option --spot"),
        ("gpu/node.sh", ("--estimate",), "unknown option --estimate"),
        ("gpu/node.sh", ("gpus", "0"), "unknown option gpus"),
        ("gce/slice.sh", ("create", "--name", "mars", "--zone", "z", "--slice", "v5e:4x4"), "v5p, v6e and tpu7x"),
        ("gce/slice.sh", ("create", *WHERE, "--spot", "--reservation", "r"), "choose one"),
        ("gpu/slurm.sh", ("--nodes", "two", "--gpus-per-node", "8", "--time", "1:00"), "whole number"),
        ("gpu/node.sh", ("--gpus", "all", "--", "--config", CONFIG), "--gpus all"),
        ("local/pod.py", ("--processes", "0", "--", "--config", CONFIG), "at least 1"),
    ],
)
def test_wrong_input_is_named_before_anything_is_asked(script, arguments, named, tools):
    result = launch(script, *arguments, tools=tools)
    assert result.returncode == 2, result.stderr
    assert named in result.stderr
    assert tools.calls() == []


def test_a_missing_tool_is_named(tmp_path):
    result = launch("gpu/slurm.sh", *ROADS["gpu/slurm.sh"], *TRAIN, PATH="/usr/bin:/bin")
    assert result.returncode == 2
    assert "sbatch is not on PATH" in result.stderr
