import dataclasses
import filecmp
import json
import shlex

import jax
import numpy as np
import pytest
from etils import epath
from helpers.chat_templates import CHATML, tokenizer_for
from helpers.paths import GOLDEN, REPOSITORY, TINY_QWEN2
from transformers import AutoTokenizer

from mars_jax import prepare as command
from mars_jax.data import preparing
from mars_jax.data.config import DataConfig
from mars_jax.data.pipeline import make_eval_pipeline, make_pipeline
from mars_jax.data.prepared import PreparedRows, fingerprint, is_prepared, row_from_bytes, row_to_bytes
from mars_jax.data.sources import training_chats
from mars_jax.errors import UserError
from mars_jax.objective.streams import Row, StreamConfig, noisy_capacity

SYNTH = str(GOLDEN / "synth" / "train.jsonl")
STREAM = StreamConfig("mars", 4, 3, "response", 96, noisy_capacity("mars", 96, 4, 3, "response"), mask_id=3)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_QWEN2)


def prepare(out, path=SYNTH, workers=1, row_length=96, shard_chats=70, **data):
    cfg = DataConfig(path=str(path), eval_rows=0, **{"max_rows": 300, **data})
    return preparing.prepare(
        cfg, str(TINY_QWEN2), str(out), row_length=row_length, shard_chats=shard_chats, workers=workers
    )


def training(path, tokenizer, stream=STREAM, **data):
    return make_pipeline(
        DataConfig(path=str(path), eval_rows=0, **data), stream, tokenizer, global_batch_rows=4, seed=1, epochs=1
    )


def chats_in(rows):
    """Every chat of the rows, with its trained spans, in no order."""
    chats = []
    for row in rows:
        for segment in range(1, row.segment.max() + 1):
            inside = np.flatnonzero(row.segment == segment)
            spans = row.spans[(row.spans[:, 0] >= inside[0]) & (row.spans[:, 0] <= inside[-1])] - inside[0]
            assert row.position[inside].tolist() == list(range(len(inside)))
            chats.append((row.tokens[inside].tolist(), spans.tolist()))
    return sorted(chats)


def test_rows_survive_their_bytes():
    row = Row(
        np.array([5, 6, 7, 8, 9], np.int32),
        np.array([1, 1, 2, 2, 2], np.int32),
        np.array([0, 1, 0, 1, 2], np.int32),
        np.array([[1, 2], [3, 4], [4, 5]], np.int32),
    )
    again = row_from_bytes(row_to_bytes(row))
    for name in ("tokens", "segment", "position", "spans"):
        np.testing.assert_array_equal(getattr(again, name), getattr(row, name))


def test_prepared_chats_are_those_packed_in_memory(tokenizer, tmp_path):
    report = prepare(tmp_path / "out")
    here, there = training(SYNTH, tokenizer, max_rows=300), training(tmp_path / "out", tokenizer)
    assert chats_in(there.rows) == chats_in(here.rows)
    assert (report.kept, report.trained_tokens) == (300, here.report.trained_tokens)
    assert there.report == report and len(there.rows) == report.rows
    assert sum(int(batch.trained.sum()) for batch in there.iterator()) == report.trained_tokens


@pytest.mark.slow
def test_number_of_workers_changes_no_byte(tmp_path):
    prepare(tmp_path / "one")
    prepare(tmp_path / "two", workers=2)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(names) == 2 * 5 + 2
    _, differing, missing = filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", names, shallow=False)
    assert not differing and not missing


def test_interrupted_preparation_continues(tmp_path, monkeypatch):
    prepare(tmp_path / "whole")
    made = []

    def dies_on_the_third(*task):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(task[1])
        return real(*task)

    real = preparing._make_shard
    monkeypatch.setattr(preparing, "_make_shard", dies_on_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "broken")
    assert is_prepared(str(tmp_path / "broken"))
    with pytest.raises(UserError, match=r"no prepared\.json: run mars_jax\.prepare again"):
        PreparedRows(str(tmp_path / "broken"))
    monkeypatch.setattr(preparing, "_make_shard", real)
    kept = {i: (tmp_path / "broken" / f"rows-0000{i}.array_record").stat().st_mtime_ns for i in (0, 1)}
    prepare(tmp_path / "broken")
    for i, modified in kept.items():
        assert (tmp_path / "broken" / f"rows-0000{i}.array_record").stat().st_mtime_ns == modified
    names = [path.name for path in (tmp_path / "whole").iterdir()]
    _, differing, missing = filecmp.cmpfiles(tmp_path / "whole", tmp_path / "broken", names, shallow=False)
    assert not differing and not missing


def test_shards_of_changed_chats_are_made_again(tmp_path):
    lines = (GOLDEN / "synth" / "train.jsonl").read_text().split("\n")[:200]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines))
    prepare(tmp_path / "out", path)
    first = (tmp_path / "out" / "rows-00000.array_record").stat().st_mtime_ns
    path.write_text("\n".join([*lines[:199], lines[0], lines[1]]))
    assert len(PreparedRows(str(tmp_path / "out"))) > 0
    assert prepare(tmp_path / "out", path).read == 201
    prepare(tmp_path / "fresh", path)
    assert (tmp_path / "out" / "rows-00000.array_record").stat().st_mtime_ns == first
    names = [p.name for p in (tmp_path / "fresh").iterdir()]
    assert not filecmp.cmpfiles(tmp_path / "out", tmp_path / "fresh", names, shallow=False)[1]


def test_folder_is_not_readable_while_its_shards_change(tmp_path, monkeypatch):
    prepare(tmp_path / "out", max_rows=140)
    monkeypatch.setattr(preparing, "write_index", lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        prepare(tmp_path / "out", max_rows=150)
    with pytest.raises(UserError, match="run mars_jax"):
        PreparedRows(str(tmp_path / "out"))


def test_nothing_to_train_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=r"nothing to train in .*0 of 0 chats kept"):
        prepare(tmp_path / "out", tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match=r"nothing to train in .*0 of 5 chats kept"):
        prepare(tmp_path / "short", max_rows=5, row_length=4)


def test_folder_is_not_shared_by_two_settings(tmp_path):
    prepare(tmp_path / "out", max_rows=20)
    with pytest.raises(UserError, match=r"was begun with row_length=96 \(now 48\)"):
        prepare(tmp_path / "out", max_rows=20, row_length=48)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("dear to me")
    with pytest.raises(UserError, match="full holds other files"):
        prepare(tmp_path / "full")


def test_resume_with_another_number_of_processes(tokenizer, tmp_path):
    prepare(tmp_path / "out")
    cfg = DataConfig(path=str(tmp_path / "out"))

    def iterators(count):
        return [
            make_pipeline(cfg, STREAM, tokenizer, global_batch_rows=4, seed=1, parts=(i,), num_parts=count).iterator()
            for i in range(count)
        ]

    def global_batch(parts):
        return jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *(next(part) for part in parts))

    unbroken, two = iterators(1), iterators(2)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, global_batch(two), global_batch(unbroken))
    assert two[0].get_state() == two[1].get_state()
    four = iterators(4)
    for part in four:
        part.set_state(two[0].get_state())
    for _ in range(60):  # into the second epoch
        jax.tree.map(np.testing.assert_array_equal, global_batch(four), global_batch(unbroken))


def test_folder_for_another_training_is_refused(tokenizer, tmp_path):
    out = tmp_path / "out"
    prepare(out, max_rows=20)
    with pytest.raises(UserError, match="another tokenizer or chat template"):
        training(out, tokenizer_for(CHATML))
    with pytest.raises(UserError, match=r"rows of 96 tokens, objective\.row_length is 64"):
        training(out, tokenizer, dataclasses.replace(STREAM, row_length=64))
    with pytest.raises(UserError, match=r"noisy_length=50: rows prepared with 96 tokens may need 72"):
        training(out, tokenizer, dataclasses.replace(STREAM, noisy_length=50))
    with pytest.raises(UserError, match=r"max_rows=5 cannot cut"):
        training(out, tokenizer, max_rows=5)
    with pytest.raises(UserError, match=r"pack=True, data\.pack is False"):
        training(out, tokenizer, pack=False)
    with pytest.raises(UserError, match="holds prepared rows; chats are needed"):
        training_chats(DataConfig(path=str(out)))
    with pytest.raises(UserError, match=r"give data\.eval_path"):
        make_eval_pipeline(DataConfig(path=str(out)), STREAM, tokenizer, global_batch_rows=2)


def test_prepared_held_out_rows(tokenizer, tmp_path):
    report = prepare(tmp_path / "out", max_rows=20)
    cfg = DataConfig(path=SYNTH, eval_path=str(tmp_path / "out"))
    held_out = make_eval_pipeline(cfg, STREAM, tokenizer, global_batch_rows=2)
    assert sum(int(batch.trained.sum()) for batch in held_out.iterator()) == report.trained_tokens


def test_an_added_mask_token_changes_no_fingerprint(tokenizer):
    other = AutoTokenizer.from_pretrained(TINY_QWEN2)
    other.add_special_tokens({"mask_token": "<|another mask|>"})
    assert fingerprint(other) == fingerprint(tokenizer)
    other.chat_template += " "
    assert fingerprint(other) != fingerprint(tokenizer)


def test_shards_in_a_bucket_are_fetched_before_reading(tokenizer, tmp_path, monkeypatch):
    """gs://… goes to etils; here a folder whose name has a scheme plays the bucket."""
    bucket = tmp_path / "gs:" / "bucket"
    prepare(bucket / "out", max_rows=50)

    class Remote(type(epath.Path(tmp_path))):
        def __str__(self):
            return super().__str__().replace("/gs:/", "/gs://")

    rows = PreparedRows(Remote(bucket / "out"))
    assert chats_in(rows) == chats_in(PreparedRows(str(bucket / "out")))


def test_example_of_the_help_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    arguments = [*shlex.split(command.EXAMPLE)[3:-1], str(tmp_path / "out"), "--workers", "1"]
    assert command.cli.main(command.build_parser, command.command, arguments) == 0
    assert PreparedRows(str(tmp_path / "out")).report.read == 2400


def test_command(tmp_path, capsys):
    arguments = ["--data", SYNTH, "--tokenizer", str(TINY_QWEN2), "--row-length", "96", "--max-rows", "30"]
    arguments += ["--out", str(tmp_path / "out"), "--workers", "1"]
    run = lambda *more: command.cli.main(command.build_parser, command.command, [*arguments, *more])  # noqa: E731
    assert run() == 0
    assert json.loads((tmp_path / "out" / "prepared.json").read_text())["report"]["kept"] == 30
    assert run("--shard-chats", "0") == 2
    assert "--shard-chats 0: must be at least 1" in capsys.readouterr().err
    assert run("--prompt-column", "ask") == 2
    assert run("--data", "/nowhere.jsonl") == 2
    assert "'/nowhere.jsonl': no such file" in capsys.readouterr().err
    assert run("--tokenizer", str(tmp_path)) == 2
    assert "no tokenizer there" in capsys.readouterr().err
