"""Checkpoints: what comes back is what was there, broken and foreign ones are named, the last good one survives."""

import json
import logging
import resource
import shutil

import jax
import numpy as np
import pytest
from helpers.objective import small_model
from helpers.training import largest_difference, run_config, start, uneven_batch

from mars_jax.errors import UserError
from mars_jax.training.checkpoint import CheckpointError, Checkpoints, run_metadata


class Position:
    """The position of a data iterator."""

    def __init__(self, index=0):
        self.index = index

    def get_state(self):
        return {"next_index": self.index}

    def set_state(self, state):
        self.index = state["next_index"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


CONFIG = run_config()
METADATA = run_metadata(CONFIG, small_model()[0])


def _save_steps(folder, count, every=1, **options):
    """Train `count` steps, saving after each `every`. Returns the steps and the states as they were."""
    steps, state = start(CONFIG)
    states = {}
    checkpoints = Checkpoints(folder, **{"keep": 10, **options})
    batch = steps.to_device(uneven_batch())
    for number in range(1, count + 1):
        state, _ = steps.train(state, batch)
        if number % every == 0:
            states[number] = jax.tree.map(np.array, state)
            checkpoints.save(number, state, Position(number), METADATA)
    checkpoints.close()
    return steps, states


def _restore(folder, steps, metadata=METADATA):
    position = Position()
    return Checkpoints(folder, keep=10).restore(steps.target, position, metadata), position


def test_gives_back_the_state_of_its_step(folder):
    """The next step overwrites the buffers of a state while its checkpoint is still being written."""
    steps, states = _save_steps(folder, 3)
    for number in (3, 2, 1):
        state, position = _restore(folder, steps)
        assert jax.tree.structure(state) == jax.tree.structure(steps.target)
        assert largest_difference(state, states[number]) == 0
        assert (int(state.step), int(state.opt_state[1].count), position.index) == (number,) * 3
        shutil.rmtree(folder / str(number))


def test_a_restored_state_trains_on_bit_equally_and_is_donated(folder):
    steps, states = _save_steps(folder, 4, every=2)
    shutil.rmtree(folder / "4")
    state, _ = _restore(folder, steps)
    for _ in range(2):
        before = state
        state, _ = steps.train(state, steps.to_device(uneven_batch()))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert largest_difference(state, states[4]) == 0


def test_restores_onto_another_mesh(folder):
    _, states = _save_steps(folder, 1)
    steps, _ = start(CONFIG, data=2, fsdp=2, tensor=2)
    state, _ = _restore(folder, steps)
    assert largest_difference(state, states[1]) == 0
    assert jax.tree.map(lambda a: a.sharding, state.params) == steps.shardings.params


def test_nothing_to_restore(folder):
    steps, _ = start(CONFIG)
    assert _restore(folder, steps)[0] is None


def test_keeps_the_latest_and_the_best(folder):
    _, state = start(CONFIG)
    checkpoints = Checkpoints(folder, keep=1, keep_best="loss")
    for number, loss in enumerate([3.0, 1.0, 2.0, 2.5], 1):
        checkpoints.save(number, state, Position(), METADATA, {"loss": loss})
    checkpoints.close()
    assert Checkpoints(folder, keep=1, keep_best="loss").steps() == [2, 4]


@pytest.mark.parametrize("item", ["params", "opt_state", "data", "metadata"])
def test_a_broken_checkpoint_is_named_moved_aside_and_the_one_before_taken(folder, caplog, item):
    steps, states = _save_steps(folder, 2)
    files = [p for p in (folder / "2" / item).rglob("*") if p.is_file() and p.name != "commit_success.txt"]
    largest = max(files, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:7])
    with caplog.at_level(logging.WARNING, logger="mars_jax"):
        state, position = _restore(folder, steps)
    assert largest_difference(state, states[1]) == 0 and position.index == 1
    assert str(folder / "2") in caplog.text
    assert (folder.parent / "broken_checkpoints" / "2").is_dir() and not (folder / "2").exists()


def test_refuses_when_all_are_broken(folder):
    steps, _ = _save_steps(folder, 2)
    for number in "12":
        shutil.rmtree(folder / number / "params")
    with pytest.raises(UserError, match=r"none of the checkpoints \[1, 2\] .* can be read"):
        _restore(folder, steps)


def test_refuses_another_model_and_other_data_by_name(folder):
    steps, _ = _save_steps(folder, 1)
    with pytest.raises(UserError, match=r"1 was written with other values of model\.vocab_size"):
        _restore(folder, steps, run_metadata(CONFIG, small_model(vocab_size=128)[0]))
    other = run_config(data={"path": "other.jsonl"}, train={"seed": 7, "steps": 99}, objective={"recipe": "ar_sft"})
    with pytest.raises(UserError, match=r"other values of data, objective\.recipe, train\.seed: "):
        _restore(folder, steps, run_metadata(other, small_model()[0]))


def test_refuses_a_foreign_checkpoint_by_name(folder):
    steps, _ = _save_steps(folder, 1)
    path = folder / "1" / "metadata" / "metadata"
    path.write_text(json.dumps({"format": "another program"}))
    with pytest.raises(UserError, match=r"none of the checkpoints \[1\]"):
        _restore(folder, steps)


def test_a_full_disk_is_reported_and_the_previous_checkpoint_stays(folder):
    steps, states = _save_steps(folder, 1)
    checkpoints = Checkpoints(folder, keep=1)
    _, state = start(CONFIG)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))  # every larger file fails to be written
    try:
        with pytest.raises(CheckpointError, match=r"writing a checkpoint .* checkpoint 1 is intact"):
            checkpoints.save(2, state, Position(), METADATA)
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    state, _ = _restore(folder, steps)
    assert largest_difference(state, states[1]) == 0


def test_an_unwritable_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="output_dir: cannot write to"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1)
