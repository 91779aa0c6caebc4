from pathlib import Path

import pytest
from helpers.fake_bucket import use_fake_bucket

from mars_jax.storage import absolute, copy_tree, is_remote, on_this_machine, place


def test_local_paths_are_paths_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_remote("runs/a")
    assert str(absolute(place("runs/a"))) == str(tmp_path / "runs/a")
    assert place("~/a") == Path("~/a").expanduser()


def test_remote_paths_keep_their_name():
    assert is_remote("gs://bucket/runs/a")
    assert str(absolute(place("gs://bucket/runs/a") / "b")) == "gs://bucket/runs/a/b"


def test_a_local_folder_is_used_in_place(tmp_path):
    assert on_this_machine(place(tmp_path)) == tmp_path


@pytest.fixture
def bucket(monkeypatch, tmp_path) -> Path:
    use_fake_bucket(monkeypatch, tmp_path / "cloud")
    return tmp_path / "cloud/bucket"


def test_a_remote_folder_is_copied_with_all_that_is_in_it(bucket):
    (bucket / "model/more").mkdir(parents=True)
    (bucket / "model/config.json").write_text("{}")
    (bucket / "model/more/a.bin").write_bytes(b"\x00\xff")
    local = on_this_machine(place("gs://bucket/model"))
    assert local.name == "model"
    assert (local / "config.json").read_text() == "{}"
    assert (local / "more/a.bin").read_bytes() == b"\x00\xff"


def test_what_is_skipped_is_skipped_at_the_top_only(bucket, tmp_path):
    for name in ("checkpoints/1", "hf/checkpoints"):
        (bucket / "run" / name).mkdir(parents=True)
        (bucket / "run" / name / "file").write_text("x")
    copy_tree(place("gs://bucket/run"), place(tmp_path / "copy"), skip=("checkpoints",))
    assert not (tmp_path / "copy/checkpoints").exists()
    assert (tmp_path / "copy/hf/checkpoints/file").read_text() == "x"
