"""Scores against a sum over float64 logits, one pair at a time and without padding."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny

from mars_jax.evaluation import loglikelihood
from mars_jax.evaluation.loglikelihood import bucket, score_continuations
from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention


def alone(context, continuation):
    """One unpadded forward with a literal triangular mask; softmax in float64."""
    ids = np.asarray([*context, *continuation], np.int32)
    tokens, positions = jnp.asarray(ids[None, :-1]), jnp.arange(len(ids) - 1)[None]
    mask = jnp.asarray(np.tril(np.ones((1, len(ids) - 1, len(ids) - 1), bool)))
    hidden = decoder.forward(
        tiny.params(), tiny.CONFIG, tokens, positions, lambda q, k, v: dense_attention(q, k, v, mask)
    )
    logits = np.asarray(decoder.unembed(tiny.params(), tiny.CONFIG, hidden))[0].astype(np.float64)
    total, exact = 0.0, True
    for i in range(len(context), len(ids)):
        row = logits[i - 1]
        total += row[ids[i]] - row.max() - np.log(np.exp(row - row.max()).sum())
        exact &= int(row.argmax()) == ids[i]
    return total, exact


def scored(pairs, **changes):
    options = {"batch_size": 4, "max_length": 512, **changes}
    found = dict(score_continuations(tiny.params(), tiny.CONFIG, pairs, **options))
    return [found[i] for i in range(len(pairs))]


def test_scores_equal_those_of_each_pair_alone():
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (5, 1), (3, 70), (80, 17), (64, 1), (96, 33), (2, 2)]
    pairs = [tuple(rng.integers(4, 380, n).tolist() for n in size) for size in sizes]
    for found, pair in zip(scored(pairs), pairs, strict=True):
        total, exact = alone(*pair)
        assert found.loglikelihood == pytest.approx(total, abs=1e-3)
        assert found.is_greedy == exact


def test_greedy_continuations_are_recognised():
    case = tiny.decode_cases()[0]
    greedy = next(run for run in case["runs"] if run["mode"] == "ar")["token_ids"]
    changed = [*greedy[:-1], greedy[-1] + 1]
    found = scored([(case["prompt_ids"], greedy), (case["prompt_ids"], changed)])
    assert [score.is_greedy for score in found] == [True, False]
    assert found[0].loglikelihood > found[1].loglikelihood


def test_a_pair_too_long_loses_its_left_end():
    rng = np.random.default_rng(1)
    ids = rng.integers(4, 380, 60).tolist()
    kept = ids[-33:]  # 32 inputs and one more to predict
    assert scored([(ids[:50], ids[50:])], max_length=32) == scored([(kept[:23], kept[23:])])
    # A continuation longer than the window is scored as far as it fits.
    assert scored([(ids[:10], ids[10:])], max_length=32) == scored([(kept[:1], kept[1:])])


def test_few_shapes_are_compiled():
    assert [bucket(n, 64) for n in (1, 64, 65, 96, 97, 128, 129, 192, 193)] == [64, 64, 96, 96, 128, 128, 192, 192, 256]
    rng = np.random.default_rng(2)
    pairs = [(rng.integers(4, 380, n).tolist(), [7]) for n in range(1, 120)]
    before = loglikelihood._score_batch._cache_size()
    scored(pairs)
    assert loglikelihood._score_batch._cache_size() - before <= 3
