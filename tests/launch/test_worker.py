import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers.commands import ROOT, environment, launch
from helpers.stub_trainer import make_stub_trainer


def start(folder: Path, cue: dict, steps: int) -> subprocess.Popen:
    """A worker around the stub, returned once the stub has installed its signal handler."""
    stub = make_stub_trainer(folder, steps)
    (folder / "cues.json").write_text(json.dumps({"0:0": cue}))
    worker = subprocess.Popen([ROOT / "launch/worker.sh", "--config", "c.yaml"], env=environment(PYTHON=stub))
    wait_for(folder / "ready-0-0")
    return worker


def wait_for(path: Path, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def test_the_trainer_gets_the_arguments_word_by_word(tmp_path):
    stub = make_stub_trainer(tmp_path / "stub", steps=0)
    result = launch("worker.sh", "--config", "a b.yaml", "data.path=x y*", PYTHON=stub)
    assert result.returncode == 0
    argv = json.loads((tmp_path / "stub/life-0-0").read_text())["argv"]
    assert argv == ["-m", "mars_jax.train", "--config", "a b.yaml", "data.path=x y*"]


@pytest.mark.parametrize("code", [1, 2, 75, 137])
def test_other_exit_codes_pass_through(tmp_path, code):
    stub = make_stub_trainer(tmp_path / "stub")
    (tmp_path / "stub/cues.json").write_text(json.dumps({"0:0": {"exit": code}}))
    assert launch("worker.sh", "--config", "c.yaml", PYTHON=stub).returncode == code


def test_a_stopped_worker_lets_the_trainer_save_and_says_so(tmp_path):
    worker = start(tmp_path / "stub", {"saving": 1.0}, steps=10_000)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=20) == 75
    assert int((tmp_path / "stub/step-0").read_text()) > 0  # written after the save, so the worker waited for it


def test_a_second_signal_does_not_cut_the_save_short(tmp_path):
    worker = start(tmp_path / "stub", {"saving": 1.0}, steps=10_000)
    for _ in range(3):
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert worker.wait(timeout=20) == 75
    assert (tmp_path / "stub/step-0").exists()


def test_a_signal_before_the_trainer_can_handle_it_is_a_stop_as_well(tmp_path):
    worker = start(tmp_path / "stub", {"unprepared": True}, steps=10_000)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=20) == 75
