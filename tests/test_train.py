"""`python -m mars_jax.train` as users run it: its words, its exit codes, and what kills it."""

import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from helpers.paths import REPOSITORY
from helpers.tiny_run import learning_curve, saved_state, write_tiny_config


def _start(*arguments, devices=1, **environment) -> subprocess.Popen:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".cache" / "jax"), "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        [sys.executable, "-m", "mars_jax.train", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **cache, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=1200)
    return process.returncode, out, err


@pytest.fixture
def config(tmp_path):
    return write_tiny_config(tmp_path / "run.yaml", tmp_path / "run")


def test_prints_the_configuration_to_stdout_only(config):
    code, out, err = _finish(_start("--config", config, "--print-config", "train.steps=3"))
    assert code == 0 and "steps: 3" in out and "Error" not in err
    assert not (config.parent / "run").exists()


def test_a_wrong_key_is_one_line_and_exit_code_2(config):
    code, out, err = _finish(_start("--config", config, "train.stepz=3"))
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(lines)) == (2, "", 1)
    assert "train.stepz is not a known key; did you mean train.steps?" in lines[0] and "Traceback" not in err


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, _, err = _finish(_start("--config", write_tiny_config(folder / "run.yaml", folder / "run")))
    assert code == 0, err
    return folder / "run"


def _assert_same_run(have, want):
    assert learning_curve(have) == learning_curve(want)
    assert jax.tree.all(jax.tree.map(np.array_equal, saved_state(have, 12), saved_state(want, 12)))


def _wait_for(condition, process):
    while process.poll() is None and not condition():
        time.sleep(0.01)


@pytest.mark.slow
def test_sigterm_saves_and_exits_0_and_the_run_goes_on_bit_equal(config, uninterrupted):
    folder = config.parent / "run"
    process = _start("--config", config)
    _wait_for(lambda: learning_curve(folder), process)
    process.send_signal(signal.SIGTERM)
    code, _, err = _finish(process)
    assert code == 0 and "stopped by SIGTERM at step" in err, err
    code, _, err = _finish(_start("--config", config))
    assert code == 0, err
    _assert_same_run(folder, uninterrupted)


@pytest.mark.slow
def test_killed_during_saves_it_resumes_from_the_last_complete_checkpoint(tmp_path, uninterrupted):
    """A checkpoint every step, one kept; killed at growing delays after a save begins, until the run is done."""
    folder = tmp_path / "run"
    config = write_tiny_config(tmp_path / "run.yaml", folder, train={"save_every": 1, "keep": 1})

    def complete():
        return {int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()}

    kills = 0
    for delay in (0.0, 0.01, 0.03, 0.1, 0.2):
        had = complete()
        process = _start("--config", config)
        _wait_for(lambda: list((folder / "checkpoints").glob("*tmp*")), process)  # a save is under way
        time.sleep(delay)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert complete() or not had, "there was a complete checkpoint, and now there is none"
        assert max(complete(), default=0) >= max(had, default=0)
    assert kills >= 3
    code, _, err = _finish(_start("--config", config))
    assert code == 0, err
    _assert_same_run(folder, uninterrupted)


@pytest.mark.slow
def test_two_processes_of_two_devices_equal_one_device(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    config = write_tiny_config(tmp_path / "run.yaml", folder)
    overrides = ["mesh.data=2", "mesh.fsdp=2"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "MARS_NUM_PROCESSES": "2"}
    together = [_start("--config", config, *overrides, devices=2, MARS_PROCESS_ID=str(i), **run) for i in range(2)]
    for process in together:
        code, _, err = _finish(process)
        assert code == 0, err
    have, want = np.array(learning_curve(folder)), np.array(learning_curve(uninterrupted))
    np.testing.assert_allclose(have, want, rtol=1e-4)
    assert have[0, 1] == pytest.approx(want[0, 1], rel=1e-6)
    have, want = saved_state(folder, 12), saved_state(uninterrupted, 12)
    for a, b in zip(jax.tree.leaves(have["params"]), jax.tree.leaves(want["params"]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert have["data"] == want["data"]
