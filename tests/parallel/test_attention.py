"""Attention cut over a mesh equals the dense reference on one device."""

import functools

import jax
import numpy as np
import pytest
from helpers.rows import packed_batch, stream_config

from mars_jax.errors import UserError
from mars_jax.models import splash
from mars_jax.objective.losses import dense_attend
from mars_jax.parallel.attention import choose_attend, over_mesh
from mars_jax.parallel.mesh import make_mesh

ROWS = [[30, 9], [40], [], [12, 12, 12]]


def _value_and_grads(make, batch, q, k, v, cotangent):
    out, pull_back = jax.vjp(make(batch), q, k, v)
    return out, *pull_back(cotangent)


def _check_equals_dense(make_attend):
    batch = packed_batch(stream_config(row_length=40, noisy_length=28), ROWS)
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (4, 2, 2, 4)
    inputs = [jax.random.normal(k, (*batch.tokens.shape, n, 8)) for k, n in zip(keys, heads, strict=True)]
    run = jax.jit(_value_and_grads, static_argnums=0)
    for want, have in zip(run(dense_attend, batch, *inputs), run(make_attend, batch, *inputs), strict=True):
        np.testing.assert_allclose(np.asarray(have), np.asarray(want), atol=5e-6, rtol=1e-5)


def test_blockwise_over_rows_and_heads():
    _check_equals_dense(choose_attend("blockwise", make_mesh(2, 2, 2), block_size=4))


def test_splash_over_rows_and_heads():
    interpreted = functools.partial(splash.splash_attention, interpret=True)
    _check_equals_dense(over_mesh(splash.plan_tiles, interpreted, make_mesh(2, 2, 2)))


def test_auto_is_blockwise_without_a_tpu():
    _check_equals_dense(choose_attend("auto", make_mesh(4, 1, 2), block_size=4))


def test_refuses_splash_without_a_tpu():
    with pytest.raises(UserError, match="splash is a TPU kernel"):
        choose_attend("splash", make_mesh(8), block_size=4)
