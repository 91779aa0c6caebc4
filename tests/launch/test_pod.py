import json
import os
import signal
import subprocess
import time
from pathlib import Path

from helpers.commands import ROOT, environment
from helpers.stub_trainer import make_stub_trainer

CONFIG = "tests/launch/data/run.yaml"


def start_pod(folder: Path, python: str, *options: str, train=("--config", CONFIG)) -> subprocess.Popen:
    """`launch/local/pod.py` with its state in FOLDER/state."""
    return subprocess.Popen(
        [ROOT / "launch/local/pod.py", "--state", folder / "state", *options, "--", *train],
        cwd=ROOT,
        env=environment(PYTHON=python),
        stderr=subprocess.PIPE,
        text=True,
    )


def stub_pod(folder: Path, cues: dict, *options: str, steps: int = 3) -> subprocess.Popen:
    python = make_stub_trainer(folder / "stub", steps)
    (folder / "stub/cues.json").write_text(json.dumps(cues))
    return start_pod(folder, python, *options)


def lives(folder: Path, process: int) -> int:
    return len(list((folder / "stub").glob(f"life-{process}-*")))


def wait_until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def finish(pod: subprocess.Popen, seconds: float = 60) -> tuple[int, str]:
    _, log = pod.communicate(timeout=seconds)
    return pod.returncode, log


def nothing_left(folder: Path) -> bool:
    return not list((folder / "state").glob("*.pid"))


def test_every_worker_knows_who_it_is_and_where_the_others_are(tmp_path):
    assert finish(stub_pod(tmp_path, {}, "--processes", "3", "--devices", "2"))[0] == 0
    told = [json.loads((tmp_path / f"stub/life-{i}-0").read_text())["environment"] for i in range(3)]
    assert [t["MARS_PROCESS_ID"] for t in told] == ["0", "1", "2"]
    assert {t["MARS_NUM_PROCESSES"] for t in told} == {"3"}
    assert {t["JAX_NUM_CPU_DEVICES"] for t in told} == {"2"}
    assert len({t["JAX_COORDINATOR_ADDRESS"] for t in told}) == 1
    assert nothing_left(tmp_path)


def test_preempted_twice_it_goes_on_to_the_end(tmp_path):
    pod = stub_pod(tmp_path, {}, "--max-failures", "0", steps=60)
    for life, victim in ((0, 1), (1, 0)):
        wait_until(lambda life=life: (tmp_path / f"stub/ready-0-{life}").exists())
        wait_until(lambda life=life: (tmp_path / f"stub/ready-1-{life}").exists())
        os.kill(int((tmp_path / f"state/worker-{victim}.pid").read_text()), signal.SIGTERM)
    code, log = finish(pod)
    assert code == 0, log
    assert log.count("preempted") == 2
    assert lives(tmp_path, 0) == lives(tmp_path, 1) == 3
    assert nothing_left(tmp_path)


def test_a_crash_is_tried_again(tmp_path):
    code, log = finish(stub_pod(tmp_path, {"1:0": {"exit": 1}}, "--max-failures", "1"))
    assert code == 0, log
    assert lives(tmp_path, 0) == 2
    assert "1 of 1" in log


def test_it_gives_up_after_too_many_crashes_and_shows_the_log(tmp_path):
    cues = {f"0:{life}": {"exit": 7} for life in range(9)}
    code, log = finish(stub_pod(tmp_path, cues, "--max-failures", "2"))
    assert code == 1
    assert lives(tmp_path, 0) == 3
    assert "cue: 7" in log and "gave up after 3 failures" in log


def test_wrong_input_is_not_tried_again(tmp_path):
    code, log = finish(stub_pod(tmp_path, {"0:0": {"exit": 2}}, "--max-failures", "5"))
    assert code == 2
    assert lives(tmp_path, 0) == 1
    assert "cue: 2" in log


def test_a_worker_that_waits_for_a_crashed_peer_is_ended_after_the_grace(tmp_path):
    cues = {"0:0": {"exit": 1}, "1:0": {"deaf": True}}
    began = time.monotonic()
    code, log = finish(stub_pod(tmp_path, cues, "--grace", "1"))
    assert code == 0, log
    assert 1 < time.monotonic() - began < 30
    assert lives(tmp_path, 1) == 2


def test_sigterm_to_the_pod_stops_all_and_the_same_command_resumes(tmp_path):
    pod = stub_pod(tmp_path, {}, steps=60)
    wait_until(lambda: (tmp_path / "stub/ready-1-0").exists() and (tmp_path / "stub/ready-0-0").exists())
    pod.send_signal(signal.SIGTERM)
    code, log = finish(pod)
    assert code == 75, log
    assert nothing_left(tmp_path)
    saved = int((tmp_path / "stub/step-1").read_text())
    assert 0 < saved < 60
    again = start_pod(tmp_path, str(tmp_path / "stub/python"))
    assert finish(again)[0] == 0
    assert int((tmp_path / "stub/step-1").read_text()) == 60
