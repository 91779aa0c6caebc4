"""Whole runs: continued ones equal uninterrupted ones, and bad steps, bad meshes and used folders are told by name."""

import functools
import os
import signal

import jax
import numpy as np
import pytest
from helpers.tiny_run import learning_curve, logged, saved_state, tiny_run

from mars_jax.data.pipeline import Pipeline
from mars_jax.errors import UserError
from mars_jax.training import loop
from mars_jax.training.metrics import MetricsLog
from mars_jax.training.output import open_output
from mars_jax.training.setup import run_mesh


class CrashError(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def two_devices():
    """Runs take every device there is; two are enough to test and quicker than eight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "run_mesh", functools.partial(run_mesh, devices=jax.devices()[:2]))
        yield


@pytest.fixture
def at_step(monkeypatch):
    """Run an action once, when the figures of a step are written."""

    def arrange(step, action):
        write = MetricsLog.write

        def write_and_act(self, split, at, values):
            write(self, split, at, values)
            if (split, at) == ("train", step):
                monkeypatch.setattr(MetricsLog, "write", write)
                action()

        monkeypatch.setattr(MetricsLog, "write", write_and_act)

    return arrange


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    loop.train(tiny_run(folder, train={"eval_every": 4}))
    return folder


def _crash():
    raise CrashError


def test_a_run_stopped_twice_equals_an_uninterrupted_one(uninterrupted, tmp_path, at_step):
    cfg = tiny_run(tmp_path / "run", train={"eval_every": 4})
    at_step(7, _crash)
    with pytest.raises(CrashError):
        loop.train(cfg)
    at_step(8, lambda: os.kill(os.getpid(), signal.SIGTERM))
    loop.train(cfg)  # from checkpoint 5; returns after saving
    assert (tmp_path / "run" / "checkpoints" / "8").is_dir()
    loop.train(cfg)
    assert learning_curve(tmp_path / "run") == learning_curve(uninterrupted)
    have, want = saved_state(tmp_path / "run", 12), saved_state(uninterrupted, 12)
    assert jax.tree.all(jax.tree.map(np.array_equal, have, want))


def test_learns_and_logs_every_step_once(uninterrupted):
    lines = logged(uninterrupted)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert all(0.55 < line["ar_share"] < 0.75 for line in lines)
    assert [line["step"] for line in logged(uninterrupted, "eval")] == [4, 8, 12]
    assert [line["event"] for line in logged(uninterrupted, "event")] == ["compile", "save", "save", "save"]


def test_leaves_a_complete_folder(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert {"checkpoints", "hf", "config.yaml", "metrics.jsonl", "report.png"} <= names
    assert {p.name for p in (uninterrupted / "checkpoints").iterdir()} == {"5", "10", "12"}


def test_step_count_and_optimizer_count_agree(uninterrupted):
    for step in (5, 10, 12):
        state = saved_state(uninterrupted, step)
        assert state["opt_state"]["step"] == step == state["data"]["next_index"]
        counts = [leaf for path, leaf in jax.tree.leaves_with_path(state["opt_state"]) if "count" in str(path[-1])]
        assert counts == [step]


def test_a_finished_run_stays_as_it_is(uninterrupted):
    before = learning_curve(uninterrupted)
    loop.train(tiny_run(uninterrupted, train={"eval_every": 4}))
    assert learning_curve(uninterrupted) == before


def test_refuses_a_used_folder_when_told_not_to_resume(uninterrupted):
    with pytest.raises(UserError, match=r"train\.resume=false, but .* holds checkpoints \[5, 10, 12\]"):
        loop.train(tiny_run(uninterrupted, train={"resume": False}))


@pytest.fixture
def bad_batches(monkeypatch):
    """Put a NaN into the weights of batches 1 and 3."""
    batch = Pipeline.batch

    def sometimes_bad(self, number):
        good = batch(self, number)
        if number in (1, 3):
            good.weight_ar[0, 0, 0] = np.nan
        return good

    monkeypatch.setattr(Pipeline, "batch", sometimes_bad)


def test_stops_at_the_first_step_that_is_not_finite(tmp_path, bad_batches):
    with pytest.raises(loop.NonFiniteError, match=r"step 2: loss nan.* batch 1, rows 8 to 15 in shuffled order"):
        loop.train(tiny_run(tmp_path / "run"))
    kept = np.load(tmp_path / "run" / "nonfinite_step_2_process_0.npz")
    assert kept["tokens"].shape == (1, 8, 64 + 48) and np.isnan(kept["weight_ar"]).sum() == 1


def test_skips_and_counts_steps_that_are_not_finite(tmp_path, bad_batches):
    train = {"nonfinite": "skip", "steps": 3}
    loop.train(tiny_run(tmp_path / "run", train=train))
    loop.train(tiny_run(tmp_path / "run", train=train | {"steps": 5}))
    lines = logged(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 2, 2]  # counted over continuations
    assert [line["loss"] == "nan" for line in lines] == [False, True, False, True, False]


def _source(cfg):
    with open_output(cfg.output_dir) as output:
        return loop.open_source(cfg, output, loop.run_mesh(cfg), continues=True)


def test_epochs_end_with_the_data(tmp_path):
    cfg = tiny_run(tmp_path / "run", train={"steps": None, "epochs": 1, "save_every": 100}, data={"max_rows": 60})
    loop.train(cfg)
    lines = logged(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / str(len(lines))).is_dir()
    data, _ = loop.open_data(cfg, _source(cfg), ((0,), 1))
    assert sum(line["trained_tokens"] for line in lines) == data.report.trained_tokens


def test_traces_the_steps_asked_for(tmp_path):
    loop.train(tiny_run(tmp_path / "run", train={"steps": 3}, logging={"tensorboard": True, "profile_steps": [2, 3]}))
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_refuses_rows_that_do_not_spread_evenly(tmp_path):
    with pytest.raises(UserError, match=r"global_batch=9 .* are 9 rows each: not a multiple of data x fsdp = 2 x 1"):
        loop.train(tiny_run(tmp_path / "run", train={"global_batch": 9}))


def test_refuses_a_mesh_that_would_cut_a_head(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "run_mesh", run_mesh)
    with pytest.raises(UserError, match=r"4 attention heads do not divide by mesh.tensor=8; 2 kv heads do not"):
        loop.train(tiny_run(tmp_path / "run", mesh={"data": 1, "tensor": 8}))
