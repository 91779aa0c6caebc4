import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from helpers.fake_bucket import use_fake_bucket

from mars_jax.errors import UserError
from mars_jax.training.output import open_output


@pytest.fixture
def bucket(monkeypatch, tmp_path) -> Path:
    use_fake_bucket(monkeypatch, tmp_path / "cloud")
    return tmp_path / "cloud/bucket"


def test_on_a_disk_it_is_the_folder_itself(tmp_path):
    with open_output(str(tmp_path / "run")) as output:
        assert output.local == tmp_path / "run"
        assert str(output.checkpoints) == str(tmp_path / "run/checkpoints")
        output.publish()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_remote_run_publishes_what_it_wrote(bucket):
    with open_output("gs://bucket/runs/a") as output:
        assert str(output.checkpoints) == "gs://bucket/runs/a/checkpoints"
        (output.local / "hf").mkdir()
        (output.local / "hf/config.json").write_text("{}")
        output.publish()
        assert (bucket / "runs/a/hf/config.json").read_text() == "{}"
        (output.local / "metrics.jsonl").write_text("1\n")
    assert (bucket / "runs/a/metrics.jsonl").read_text() == "1\n"
    assert not output.local.exists()


def test_only_what_changed_is_sent_again(bucket):
    with open_output("gs://bucket/runs/a") as output:
        (output.local / "same").write_text("1")
        (output.local / "changed").write_text("1")
        output.publish()
        (bucket / "runs/a/same").write_text("someone else's")  # tells whether it is written again
        (output.local / "changed").write_text("2")
        os.utime(output.local / "changed", ns=(1, 1))  # even where clocks are coarse
        output.publish()
        assert (bucket / "runs/a/same").read_text() == "someone else's"
        assert (bucket / "runs/a/changed").read_text() == "2"


def test_the_next_life_goes_on_from_what_was_published(bucket):
    for name in ("hf/config.json", "metrics.jsonl", "checkpoints/4/params/big", "tensorboard/events"):
        (bucket / "runs/a" / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / "runs/a" / name).write_text(name)
    with open_output("gs://bucket/runs/a") as output:
        fetched = sorted(str(p.relative_to(output.local)) for p in output.local.rglob("*") if p.is_file())
        assert fetched == ["hf/config.json", "metrics.jsonl"]


def test_a_run_that_fails_leaves_its_files(bucket):
    with pytest.raises(RuntimeError), open_output("gs://bucket/runs/a") as output:
        (output.local / "nonfinite_step_3.npz").write_text("x")
        raise RuntimeError
    assert (bucket / "runs/a/nonfinite_step_3.npz").exists()


HOLDER = """
import sys, time
from mars_jax.training.output import open_output
with open_output(sys.argv[1]):
    print("open", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder open."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_in_use_is_refused_until_its_run_is_gone(tmp_path, holder):
    with (
        pytest.raises(UserError, match=f"run is in use by process {holder.pid} on "),
        open_output(str(tmp_path / "run")),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with open_output(str(tmp_path / "run")):
        assert (tmp_path / "run/.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_the_other_processes_of_a_run_share_the_folder_of_the_first(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with open_output(str(tmp_path / "run")) as output:
        assert output.local == tmp_path / "run"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run cannot be written"), open_output(str(tmp_path / "file/run")):
        pass
