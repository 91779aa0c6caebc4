"""Every expected decode of the golden checkpoint: ids and run lengths, exactly, in batches and alone."""

import numpy as np
import pytest
from helpers import tiny

from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions, Request

CASES = tiny.decode_cases()
SETTINGS = [{k: v for k, v in run.items() if k not in ("token_ids", "accepted")} for run in CASES[0]["runs"]]
# Settings of one step shape run together: one compilation each.
SHAPES = {
    "ar": {"mode": "ar"},
    "window-3": {"mode": "window", "window": 3},
    "window-4": {"mode": "window", "window": 4},
    "window-7": {"mode": "window", "window": 7},
    "chain-1": {"mode": "verify", "draft": 1, "layout": "chain"},
    "chain-3": {"mode": "verify", "draft": 3, "layout": "chain"},
    "chain-5": {"mode": "verify", "draft": 5, "layout": "chain"},
    "tree-1": {"mode": "verify", "draft": 1, "layout": "tree"},
    "tree-3": {"mode": "verify", "draft": 3, "layout": "tree"},
    "tree-5": {"mode": "verify", "draft": 5, "layout": "tree"},
}


def of_shape(shape: dict) -> list[int]:
    return [i for i, setting in enumerate(SETTINGS) if shape.items() <= setting.items()]


def test_the_shapes_cover_every_setting():
    assert sorted(i for shape in SHAPES.values() for i in of_shape(shape)) == list(range(28))


@pytest.fixture(scope="module")
def engine():
    return DecodeEngine(tiny.model(), slots=40)


def check(engine, runs: list[int], **changes):
    pairs = [(case, run) for run in runs for case in CASES]
    results = engine.generate(
        [Request(tuple(case["prompt_ids"]), DecodeOptions(**SETTINGS[run] | changes)) for case, run in pairs]
    )
    for (case, run), result in zip(pairs, results, strict=True):
        expected = case["runs"][run]
        assert result.token_ids == expected["token_ids"]
        assert result.accepted == expected["accepted"]
        assert result.finish_reason == ("stop" if expected["token_ids"][-1] in tiny.STOP_IDS else "length")


@pytest.mark.parametrize("shape", SHAPES)
def test_in_batches_of_unequal_prompts(engine, shape):
    check(engine, of_shape(SHAPES[shape]))


@pytest.mark.parametrize("shape", ["window-3", "tree-3"])
def test_alone(shape):
    check(DecodeEngine(tiny.model(), slots=1), of_shape(SHAPES[shape])[-2:])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_setting_alone(shape):
    check(DecodeEngine(tiny.model(), slots=1), of_shape(SHAPES[shape]))


def test_without_a_cache(engine):
    check(engine, of_shape(SHAPES["window-3"])[4:6], mode="recompute")


@pytest.mark.parametrize("size", [8, 16])
def test_block_cache(size):
    engine = DecodeEngine(tiny.model(), slots=4)
    for case in tiny.block_cache_cases():
        if case["cache_block"] != size:
            continue
        options = DecodeOptions(mode="block", cache_block=size, tau=case["tau"], gate_first=case["gate_first"])
        results = engine.generate([Request(tuple(CASES[i]["prompt_ids"]), options) for i in case["ids"]])
        assert [r.token_ids for r in results] == case["token_ids"]


def test_runs_of_a_batch_differ():
    """Otherwise the batch tests would be blind to rows that disturb each other."""
    lengths = {tuple(case["runs"][6]["accepted"]) for case in CASES}
    assert len(lengths) >= 9
    assert np.ptp([len(case["prompt_ids"]) for case in CASES]) > 5
