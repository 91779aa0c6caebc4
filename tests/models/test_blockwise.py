"""Blockwise attention against the dense reference: values, gradients, tiles computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.rows import packed_batch, stream_config

from mars_jax.models.blockwise import make_attend, plan_tiles
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import init_parameters
from mars_jax.objective.losses import dense_attend, loss_sums
from mars_jax.objective.visibility import visible

TWO_STREAMS = stream_config(row_length=70, noisy_length=45)  # 115 tokens: no multiple of any tile below
ROWS = [[30, 9, 22], [70], []]  # packed with padding, full, and all padding


def _inputs(batch, heads, kv_heads, head_dim, dtype=jnp.float32):
    rows, length = batch.tokens.shape
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


def _value_and_grads(make, batch, q, k, v, cotangent):
    def run(q, k, v):
        out, pull_back = jax.vjp(make(batch), q, k, v)
        return out, *pull_back(cotangent)

    return jax.jit(run)(q, k, v)


@functools.partial(jax.jit, static_argnums=4)
def _attend(q, k, v, batch, tile):
    return make_attend(batch, tile)(q, k, v)


@pytest.mark.parametrize(("tile", "heads", "kv_heads"), [(16, 6, 2), (32, 2, 2), (128, 9, 3)])
def test_matches_dense_forward_and_backward(tile, heads, kv_heads):
    batch = packed_batch(TWO_STREAMS, ROWS)
    inputs = _inputs(batch, heads, kv_heads, 8)
    expected = _value_and_grads(dense_attend, batch, *inputs)
    got = _value_and_grads(lambda b: make_attend(b, tile), batch, *inputs)
    for want, have in zip(expected, got, strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("recipe", ["ar_sft", "block_diffusion"])
def test_matches_dense_for_other_visibilities(recipe):
    cfg = stream_config(row_length=40, noisy_length=0 if recipe == "ar_sft" else 40, recipe=recipe)
    batch = packed_batch(cfg, [[13, 20], [40]])
    inputs = _inputs(batch, 4, 2, 8)
    expected = _value_and_grads(dense_attend, batch, *inputs)
    got = _value_and_grads(lambda b: make_attend(b, 16), batch, *inputs)
    for want, have in zip(expected, got, strict=True):
        np.testing.assert_allclose(have, want, atol=2e-6, rtol=1e-5)


def test_matches_float64_numpy():
    """An oracle that shares no code: softmax over the visible keys, one query at a time."""
    batch = packed_batch(TWO_STREAMS, ROWS)
    q, k, v, _ = _inputs(batch, 4, 2, 8)
    out = np.asarray(_attend(q, k, v, batch, 32))
    mask = np.asarray(visible(batch.visibility, batch.visibility))
    for row, query, head in [(0, 0, 0), (0, 60, 3), (0, 80, 1), (1, 69, 2), (1, 114, 0), (2, 5, 0)]:
        seen = mask[row, query]
        expected = np.zeros(8)
        if seen.any():
            scores = np.float64(k[row, seen, head // 2]) @ np.float64(q[row, query, head]) / np.sqrt(8)
            weights = np.exp(scores - scores.max())
            expected = weights @ np.float64(v[row, seen, head // 2]) / weights.sum()
        np.testing.assert_allclose(out[row, query, head], expected, atol=1e-6)


def test_bfloat16_is_as_near_to_exact_as_dense_is():
    batch = packed_batch(TWO_STREAMS, ROWS)
    exact_inputs = _inputs(batch, 6, 2, 8)
    inputs = [x.astype(jnp.bfloat16) for x in exact_inputs]
    exact = _value_and_grads(dense_attend, batch, *(x.astype(jnp.float32) for x in inputs))
    dense = _value_and_grads(dense_attend, batch, *inputs)
    got = _value_and_grads(lambda b: make_attend(b, 32), batch, *inputs)
    for want, reference, have in zip(exact, dense, got, strict=True):
        assert have.dtype == jnp.bfloat16
        error = np.abs(np.float32(have) - want).max()
        assert error <= 2 * np.abs(np.float32(reference) - want).max()


def test_padding_gets_zeros_and_gives_no_gradient(debug_nans):
    batch = packed_batch(TWO_STREAMS, ROWS)
    padding = np.asarray(batch.visibility.segment == 0)
    q, k, v, cotangent = _inputs(batch, 4, 2, 8)
    out, *grads = _value_and_grads(make_attend, batch, q, k, v, cotangent)
    assert padding.any()
    for array in (out, *grads):
        assert not np.asarray(array)[padding].any()


def test_computes_exactly_the_tiles_with_a_visible_pair():
    batch = packed_batch(TWO_STREAMS, ROWS)
    plan = plan_tiles(batch.visibility, 16)
    mask = np.pad(np.asarray(visible(batch.visibility, batch.visibility)), ((0, 0), (0, 13), (0, 13)))
    useful = mask.reshape(3, 8, 16, 8, 16).any((2, 4))
    count = int(plan.count[0])
    assert sorted(np.asarray(plan.pairs[:count]).tolist()) == np.flatnonzero(useful).tolist()
    assert count < useful.size / 3


def test_equal_visibility_gives_equal_output_in_any_company():
    """Rows of a batch share one loop: other rows must not change a row's numbers."""
    batch = packed_batch(TWO_STREAMS, ROWS)
    q, k, v, _ = _inputs(batch, 4, 2, 8)
    together = _attend(q, k, v, batch, 32)
    for row in range(2):
        alone = jax.tree.map(lambda a, row=row: a[row : row + 1], (q, k, v, batch))
        np.testing.assert_array_equal(_attend(*alone, 32)[0], together[row])


def test_loss_and_parameter_gradients_match_dense_through_remat():
    cfg = ModelConfig("qwen2", 64, 32, 48, 2, 4, 2, 8, qkv_bias=True)
    params = init_parameters(jax.random.key(1), cfg, std=0.3)
    batch = packed_batch(TWO_STREAMS, ROWS)

    def loss(params, make):
        sums = loss_sums(params, cfg, batch, num_offsets=5, make_attend=make, remat=True)
        return sums.ar + sums.mask

    value_and_grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, expected_grads = value_and_grad(params, dense_attend)
    got, grads = value_and_grad(params, make_attend)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), grads, expected_grads)


def test_holds_no_square_array():
    """Peak temporary memory grows with the length, not with its square."""

    def temporary(length):
        batch = packed_batch(stream_config(row_length=length, noisy_length=0, recipe="ar_sft"), [[length]])
        q, k, v, cotangent = _inputs(batch, 2, 2, 8)
        lowered = jax.jit(lambda b, *a: _value_and_grads(make_attend, b, *a)).lower(batch, q, k, v, cotangent)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 2.5 * temporary(1024)
