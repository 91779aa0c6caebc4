"""Warping and drawing against numpy, written with sorts."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.decoding import warped

from mars_jax.decoding.sampling import Purpose, distribution, draw, uniforms
from mars_jax.decoding.settings import Sampling

V = 50


def sampling(rows=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    def column(value, dtype):
        return jnp.broadcast_to(jnp.array(value, dtype), (rows,))

    return Sampling(
        column(temperature, jnp.float32), column(top_k, jnp.int32), column(top_p, jnp.float32),
        column(min_p, jnp.float32), column(seed, jnp.uint32),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 200},
        {"top_p": 0.5},
        {"top_p": 0.0},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_distribution(options):
    logits = 3 * np.random.default_rng(0).standard_normal((4, 2, V)).astype(np.float32)
    found = distribution(jnp.array(logits), sampling(4, **options))
    for row in range(4):
        for i in range(2):
            np.testing.assert_allclose(found[row, i], warped(logits[row, i].astype(np.float64), **options), atol=1e-6)


def test_temperature_zero_is_all_on_the_likeliest_and_rows_keep_their_own_settings():
    logits = np.random.default_rng(1).standard_normal((3, 1, V)).astype(np.float32)
    found = distribution(jnp.array(logits), sampling(3, temperature=[0.0, 1.0, 1.0], top_k=[0, 3, 0]))
    assert found[0, 0].argmax() == logits[0, 0].argmax()
    assert float(found[0].max()) == 1.0
    assert int((found[1] > 0).sum()) == 3
    assert int((found[2] > 0).sum()) == V


def test_ids_that_may_not_be_emitted_are_never_drawn():
    logits = np.zeros((1, 1, V), np.float32)
    logits[..., ::2] = -1e30
    p = distribution(jnp.array(logits), sampling(temperature=3.0))
    for u in (0.0, 0.5, 1 - 2**-24):
        assert int(draw(p, jnp.full((1, 1), u))[0, 0]) % 2 == 1


def test_draws_follow_the_weights():
    weights = np.array([0.0, 1.0, 3.0, 0.0, 4.0], np.float32)
    u = jnp.linspace(0, 1, 8000, endpoint=False)[None]
    found = draw(jnp.broadcast_to(weights, (1, 8000, 5)), u)
    assert np.bincount(found[0], minlength=5).tolist() == [0, 1000, 3000, 0, 4000]


def test_random_numbers_depend_on_seed_forward_and_purpose_alone():
    def numbers(seeds, forwards, purpose=Purpose.NEXT):
        return np.array(uniforms(jnp.array(seeds, jnp.uint32), jnp.array(forwards), purpose, 4))

    batch = numbers([7, 8, 7, 7], [0, 0, 1, 0])
    assert (batch[0] == batch[3]).all()
    assert (batch[:1] == numbers([7], [0])).all()
    distinct = [batch[0], batch[1], batch[2], numbers([7], [0], Purpose.AHEAD)[0]]
    assert len({tuple(row) for row in distinct}) == 4
