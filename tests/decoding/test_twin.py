"""The loop against decoding written plainly, on prompts and settings that the golden file does not have."""

import numpy as np
import pytest
from helpers import plain_decode, tiny

from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions, Request


@pytest.fixture(scope="module")
def model():
    return plain_decode.model_of(tiny.params(), tiny.CONFIG, tiny.MASK_ID)


@pytest.fixture(scope="module")
def engine():
    return DecodeEngine(tiny.model(), slots=4)


@pytest.fixture(scope="module")
def prompts():
    """Prompts of 1, 5, 17 and 33 random tokens: the model is unsure there."""
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(4, tiny.NUM_TOKENS, n).tolist()) for n in (1, 5, 17, 33)]


@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize(("score", "tau"), [("probability", 0.3), ("entropy", 2.5), ("margin", 0.2)])
@pytest.mark.parametrize("gate", [False, True])
def test_window(model, engine, prompts, window, score, tau, gate):
    options = {"window": window, "tau": tau, "score": score, "gate_first": gate, "max_new_tokens": 30}
    results = engine.generate([Request(p, DecodeOptions(mode="window", **options)) for p in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        expected = plain_decode.window(model, list(prompt), tiny.emit_mask(), tiny.STOP_IDS, **options)
        assert (result.token_ids, result.accepted, result.finish_reason) == expected


@pytest.mark.parametrize("layout", ["chain", "tree"])
def test_verify(model, engine, prompts, layout):
    options = {"draft": 2, "layout": layout, "max_new_tokens": 30}
    results = engine.generate([Request(p, DecodeOptions(mode="verify", **options)) for p in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        expected = plain_decode.verify(model, list(prompt), tiny.emit_mask(), tiny.STOP_IDS, **options)
        assert (result.token_ids, result.accepted, result.finish_reason) == expected
