"""The figures of a run: what a line says, what survives a crash, what counts as time well spent."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from mars_jax.training import metrics
from mars_jax.training.metrics import MetricsLog, goodput, peak_memory_bytes, read_metrics, to_host


def open_log(folder, start: int = 0) -> MetricsLog:
    return MetricsLog(folder, start, tensorboard=False, wandb_project=None, config={})


def test_accuracy_is_correct_over_entries_and_none_without_any():
    figures = to_host(
        {
            "loss": jnp.float32(1.5),
            "finite": jnp.bool_(True),
            "trained_tokens": jnp.int32(7),
            "correct_by_offset": jnp.array([3, 0, 1]),
            "entries_by_offset": jnp.array([4, 0, 3]),
        }
    )
    assert figures == {"loss": 1.5, "finite": True, "trained_tokens": 7, "accuracy": [0.75, None, 0.333333]}
    json.dumps(figures)  # plain numbers


def test_lines_are_read_back_as_written(tmp_path):
    log = open_log(tmp_path)
    log.write("train", 1, {"loss": 2.0, "accuracy": [0.5, None]})
    log.write("eval", 1, {"loss": float("nan"), "grad_norm": float("inf")})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"split": "train", "step": 1, "loss": 2.0, "accuracy": [0.5, None]},
        {"split": "eval", "step": 1, "loss": "nan", "grad_norm": "inf"},  # JSON has neither
    ]


def test_a_line_is_on_disk_before_the_next_one(tmp_path):
    log = open_log(tmp_path)
    log.write("train", 1, {"loss": 2.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    log.close()


def test_a_last_line_cut_short_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"split": "train", "step": 1}\n{"split": "train", "st')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"split": "train", "step": 1}]
    assert read_metrics(tmp_path / "nothing.jsonl") == []


def test_continuing_drops_what_came_after_the_checkpoint(tmp_path):
    log = open_log(tmp_path)
    for step in (1, 2, 3, 4):
        log.write("train", step, {"loss": float(step)})
    log.close()
    log = open_log(tmp_path, start=2)
    log.write("train", 3, {"loss": 30.0})
    log.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(log.path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    open_log(tmp_path).close()  # a new run
    assert read_metrics(log.path) == []


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log = open_log(tmp_path)
    log.write("train", 1, {"loss": 2.0})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_lists_by_index_and_no_missing_values(tmp_path):
    log, scalars = open_log(tmp_path), []
    log.tensorboard = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar), close=lambda: None)
    log.write("eval", 5, {"loss": 2.0, "accuracy": [0.5, None, 0.25], "event": "save"})
    log.close()
    assert scalars == [("eval/loss", 2.0, 5), ("eval/accuracy_0", 0.5, 5), ("eval/accuracy_2", 0.25, 5)]


def test_goodput_is_the_share_of_time_in_steps():
    lines = [
        {"split": "train", "step_seconds": 6.0, "data_seconds": 1.0},
        {"split": "train", "step_seconds": 2.0, "data_seconds": 0.0},
        {"split": "eval", "seconds": 1.5},
        {"split": "event", "seconds": 0.5},
    ]
    assert goodput(lines) == pytest.approx(0.7)  # (8 - 1) of 8 + 2 seconds
    assert goodput([]) == 0.0


def test_peak_memory_is_the_fullest_devices(monkeypatch):
    def devices(*stats):
        return lambda: [SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]

    monkeypatch.setattr(jax, "local_devices", devices({"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 9}, None))
    assert peak_memory_bytes() == 9
    monkeypatch.setattr(jax, "local_devices", devices(None, {}))
    usage = SimpleNamespace(ru_maxrss=3)
    monkeypatch.setattr(metrics.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(metrics.sys, "platform", "linux")
    assert peak_memory_bytes() == 3 * 1024  # Linux counts KiB
    monkeypatch.setattr(metrics.sys, "platform", "darwin")
    assert peak_memory_bytes() == 3
