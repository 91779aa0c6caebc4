import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mars_jax import estimate
from mars_jax.data.pipeline import Pipeline
from mars_jax.errors import UserError

CONFIG = "tests/launch/data/run.yaml"
# As `mars_jax.compile --json` prints it: 3 GiB a chip on 4 chips, half a second a step.
COMPILED = {
    "memory": {"arguments": 2 * 2**30, "outputs": 2**30, "aliased": 2**30, "temporaries": 2**29, "code": 2**29},
    "estimate": {"step_seconds": 0.5, "bound": "memory"},
    "mesh": {"data": 1, "fsdp": 4, "tensor": 1},
}


def run(monkeypatch, *arguments: str, **compiled) -> tuple[estimate.RunEstimate, list[str]]:
    shares = []
    monkeypatch.setattr(estimate, "compile_step", lambda args, share: shares.extend(share) or COMPILED | compiled)
    args = estimate.build_parser().parse_args(["--config", CONFIG, "--topology", "v5e:2x2", *arguments])
    return estimate.estimate_run(args), shares


def test_hours_and_chip_hours_of_so_many_steps(monkeypatch):
    result, share = run(monkeypatch, "train.steps=7200")
    assert (result.chips, result.memory_gib) == (4, 3.0)
    assert (result.steps, result.hours, result.device_hours) == (7200, 1.0, 4.0)
    assert result.cost is None
    assert share == ["train.global_batch=8"]


def test_steps_of_epochs_are_those_of_the_pipeline(monkeypatch):
    result, _ = run(monkeypatch, "--rows", "1003", "train.steps=null", "train.epochs=5")
    rows, report = [None] * 1003, SimpleNamespace(trained_tokens=1)
    assert (
        result.steps == Pipeline(rows, report, None, global_rows=8, epochs=5).num_batches == 627
    )  # 5015 rows in eights


def test_epochs_without_rows_ask_for_them(monkeypatch):
    with pytest.raises(UserError, match=r"train\.epochs=5.*--rows"):
        run(monkeypatch, "train.steps=null", "train.epochs=5")


def test_slices_share_the_batch(monkeypatch):
    result, share = run(monkeypatch, "--slices", "2", "train.steps=7200", "mesh.data=-1")
    assert share == ["train.global_batch=4"]
    assert (result.chips, result.device_hours) == (8, 8.0)
    assert "network between slices is not counted" in estimate.describe(result, 1.0)


def test_data_lies_across_slices(monkeypatch):
    _, share = run(monkeypatch, "--slices", "2", "train.steps=7200", "mesh.data=4", "mesh.fsdp=-1")
    assert share == ["train.global_batch=4", "mesh.data=2"]


def test_a_measured_efficiency_scales_the_time(monkeypatch):
    result, _ = run(monkeypatch, "--efficiency", "0.5", "train.steps=7200")
    assert (result.least_step_seconds, result.step_seconds, result.hours) == (0.5, 1.0, 2.0)


def test_the_price_comes_from_the_users_file(monkeypatch, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("v5e: 1.5\nv6e: 3\n")
    result, _ = run(monkeypatch, "--prices", str(prices), "train.steps=7200")
    assert result.cost == 6.0
    prices.write_text("v6e: 3\n")
    with pytest.raises(UserError, match="no price of a v5e"):
        run(monkeypatch, "--prices", str(prices))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--slices", "3"), "--slices 3"),
        (("--efficiency", "0"), "--efficiency 0"),
        (("--prices", "no.yaml"), "no.yaml"),
    ],
)
def test_wrong_input_is_named(monkeypatch, arguments, named):
    with pytest.raises(UserError, match=named):
        run(monkeypatch, *arguments)


@pytest.mark.slow
def test_the_compiler_answers_for_a_small_model(tmp_path):
    pytest.importorskip("libtpu", reason="libtpu is not installed: nothing can be compiled for TPU")
    words = [sys.executable, "-m", "mars_jax.estimate", "--config", CONFIG, "--topology", "v5e:2x2", "--json"]
    result = subprocess.run([*words, "train.steps=1000", "mesh.data=4"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["chips"] == 4
    assert 0 < answer["memory_gib"] < 16
    assert answer["device_hours"] == pytest.approx(1000 * answer["step_seconds"] / 3600 * 4)
