import dataclasses
import json
import logging

import jax
import numpy as np
import pytest
from helpers import chat_templates
from helpers.chat_templates import tokenizer_for
from helpers.paths import GOLDEN, TINY_QWEN2
from transformers import AutoTokenizer

from mars_jax.data.config import DataConfig
from mars_jax.data.pipeline import PlainIterator, make_eval_pipeline, make_pipeline
from mars_jax.errors import UserError
from mars_jax.objective.streams import StreamConfig, empty_row, noisy_capacity

SYNTH = str(GOLDEN / "synth" / "train.jsonl")
STREAM = StreamConfig("mars", 4, 3, "response", 96, noisy_capacity("mars", 96, 4, 3, "response"), mask_id=3)
RANDOM = dataclasses.replace(STREAM, block_fraction=0.5, random_offset=True)  # streams that draw


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_QWEN2)


def pipeline(tokenizer, stream=STREAM, rows=100, **changes):
    data = DataConfig(path=SYNTH, max_rows=rows, eval_rows=10, pack=changes.pop("pack", True))
    return make_pipeline(data, stream, tokenizer, **{"global_batch_rows": 8, "seed": 5, **changes})


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def rows_of(batch):
    """Every row as bytes, in order."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
    return [
        b"".join(leaf.tobytes() for leaf in jax.tree.leaves(jax.tree.map(lambda leaf, i=i: leaf[i], flat)))
        for i in range(len(flat.trained))
    ]


def test_an_epoch_holds_every_row_once_and_the_next_one_in_another_order(tokenizer):
    made = pipeline(tokenizer, epochs=2, global_batch_rows=4)
    batches = list(made.iterator())
    assert len(batches) == made.num_batches
    rows = [row for batch in batches for row in rows_of(batch)]
    n = made.rows_per_epoch
    first, second = rows[:n], rows[n : 2 * n]
    assert len(set(first)) == n and set(first) == set(second) and first != second
    assert sum(int(batch.trained.sum()) for batch in batches) == 2 * made.report.trained_tokens


def test_last_batch_is_filled_with_empty_rows(tokenizer):
    made = pipeline(tokenizer, epochs=1, global_batch_rows=made_rows(tokenizer) - 1)
    last = made.batch(1)
    assert made.num_batches == 2
    assert (last.trained[0] > 0).tolist() == [True] + [False] * (made.rows_per_epoch - 2)
    empty = empty_row(STREAM)
    assert same(jax.tree.map(lambda leaf: leaf[0, -1], last), empty)


def made_rows(tokenizer):
    return pipeline(tokenizer).rows_per_epoch


def test_packing_and_truncation_leave_the_counts_alone(tokenizer):
    packed, single = pipeline(tokenizer), pipeline(tokenizer, pack=False)
    assert single.rows_per_epoch == single.report.kept == packed.report.kept == 90  # 10 are held out
    assert packed.rows_per_epoch < 60
    assert packed.report.trained_tokens == single.report.trained_tokens


@pytest.mark.parametrize("stream", [STREAM, RANDOM])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_number_of_processes_changes_nothing(tokenizer, stream, accumulation):
    whole = pipeline(tokenizer, stream, accumulation=accumulation)
    for count in (2, 4):
        parts = [
            pipeline(tokenizer, stream, accumulation=accumulation, parts=(i,), num_parts=count) for i in range(count)
        ]
        for number in (0, 7, 30):
            shares = [part.batch(number) for part in parts]
            assert shares[0].tokens.shape[:2] == (accumulation, 8 // accumulation // count)
            assert same(whole.batch(number), jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *shares))


@pytest.mark.parametrize("stop", [0, 1, 3, 11])
def test_resuming_gives_the_same_batches(tokenizer, stop):
    unbroken = pipeline(tokenizer, RANDOM).iterator()
    for _ in range(stop):
        next(unbroken)
    state = json.loads(json.dumps(unbroken.get_state()))
    resumed = pipeline(tokenizer, RANDOM).iterator()
    resumed.set_state(state)
    assert state == {"next_index": stop}
    for _ in range(12):  # past the end of an epoch
        assert same(next(unbroken), next(resumed))


def test_position_survives_a_grain_checkpoint(tokenizer, tmp_path):
    import orbax.checkpoint as ocp
    from grain.checkpoint import CheckpointRestore, CheckpointSave

    iterator = pipeline(tokenizer).iterator()
    for _ in range(5):
        next(iterator)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.Composite(data=CheckpointSave(iterator)))
        manager.wait_until_finished()
        expected = next(iterator)
        fresh = pipeline(tokenizer).iterator()
        manager.restore(5, args=ocp.args.Composite(data=CheckpointRestore(fresh)))
    assert same(next(fresh), expected)


def test_iterator_without_grain_is_the_same(tokenizer):
    made = pipeline(tokenizer, epochs=1)
    plain, grains = PlainIterator(made, 0), made.iterator()
    for a, b in zip(plain, grains, strict=True):
        assert same(a, b)
    assert plain.get_state() == grains.get_state() == {"next_index": made.num_batches}


def test_epoch_and_seed_change_what_is_drawn(tokenizer):
    made = pipeline(tokenizer, RANDOM, global_batch_rows=1)
    n = made.rows_per_epoch
    epochs = [{row for i in range(n) for row in rows_of(made.batch(epoch * n + i))} for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert not same(made.batch(0), pipeline(tokenizer, RANDOM, global_batch_rows=1, seed=6).batch(0))


def test_held_out_chats_are_never_trained_on(tokenizer):
    data = DataConfig(path=SYNTH, max_rows=100, eval_rows=10, pack=False)
    held_out = make_eval_pipeline(data, STREAM, tokenizer, global_batch_rows=4)
    batches = list(held_out.iterator())
    assert [int((batch.trained > 0).sum()) for batch in batches] == [4, 4, 2]
    assert held_out.report.read == 10
    texts = {tuple(row.tokens.tolist()) for row in held_out.rows}
    training = make_pipeline(data, STREAM, tokenizer, global_batch_rows=4, seed=0)
    assert not texts & {tuple(row.tokens.tolist()) for row in training.rows}


def write(path, chats):
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return DataConfig(path=str(path), eval_rows=0)


def qa(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_counts_of_kept_truncated_dropped_and_refused_chats(tokenizer, tmp_path, caplog):
    data = write(
        tmp_path / "chats.jsonl",
        [
            qa("hi", "yes"),
            qa("hi", "yes " * 60),  # cut
            qa("hi " * 60, "yes"),  # nothing trained is left
            [{"role": "user", "content": "hi"}],  # nothing to train
            [{"role": "assistant", "content": "hi"}],  # refused
        ],
    )
    with caplog.at_level(logging.INFO, "mars_jax.data"):
        made = make_pipeline(data, STREAM, tokenizer, global_batch_rows=2, seed=0)
    report = made.report
    assert (report.read, report.kept, report.truncated, report.dropped) == (5, 2, 1, 2)
    assert report.refused == {"the assistant speaks first": 1}
    assert report.trained_tokens == int(made.batch(0).trained.sum())
    assert "2 of 5 chats kept (1 truncated), 2 dropped" in caplog.text
    assert "1 refused (the assistant speaks first)" in caplog.text


def test_nothing_to_train_is_an_error_not_a_nan(tokenizer, tmp_path):
    data = write(tmp_path / "chats.jsonl", [qa("hi " * 90, "yes"), [{"role": "user", "content": "hi"}]])
    with pytest.raises(UserError, match=r"nothing to train in .*0 of 2 chats kept.*row_length=96"):
        make_pipeline(data, STREAM, tokenizer, global_batch_rows=2, seed=0)


def test_too_few_chats_to_hold_some_out_name_the_way_out(tokenizer, tmp_path):
    data = write(tmp_path / "chats.jsonl", [qa("hi", "yes")] * 9)
    with pytest.raises(UserError, match=r"nothing to evaluate on .*0 of 0 chats kept.*data.eval_path.*eval_every=0"):
        make_eval_pipeline(dataclasses.replace(data, eval_rows=4), STREAM, tokenizer, global_batch_rows=2)


def test_padding_that_is_the_end_token_is_not_trained(tmp_path):
    tokenizer = tokenizer_for(chat_templates.CHATML)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    data = write(tmp_path / "chats.jsonl", [qa("hello", "world")])
    batch = make_pipeline(data, STREAM, tokenizer, global_batch_rows=1, seed=0).batch(0)
    live = (batch.weight_ar > 0) | (batch.weight_mask > 0)
    expected = tokenizer("world<|im_end|>", add_special_tokens=False)["input_ids"]
    assert batch.target[batch.weight_ar > 0].tolist() == expected
    assert (np.take_along_axis(batch.visibility.segment, batch.source, -1)[live] == 1).all()


def test_chats_cut_for_want_of_placeholders_are_counted(tokenizer, caplog):
    with caplog.at_level(logging.WARNING, "mars_jax.data"):
        pipeline(tokenizer)
        assert "cut shorter" not in caplog.text
        report = pipeline(tokenizer, dataclasses.replace(STREAM, noisy_length=4)).report
    assert f"{report.truncated} of 90 chats are cut shorter than objective.row_length=96" in caplog.text
    assert "raise objective.noisy_length=4" in caplog.text
    assert report.truncated > 10


def test_batch_that_cannot_be_shared_is_refused(tokenizer):
    with pytest.raises(UserError, match="8 rows cannot be cut into 3 micro-batches x 2 parts"):
        pipeline(tokenizer, accumulation=3, num_parts=2)
