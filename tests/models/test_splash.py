"""The splash kernel, interpreted on CPU, against the dense reference; and its encoded mask against `visible`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.rows import packed_batch, stream_config

from mars_jax.models import splash
from mars_jax.objective.losses import dense_attend
from mars_jax.objective.visibility import Tokens, visible

ROWS = [[60, 30, 40], [150], []]  # packed with padding, full, and all padding


def _value_and_grads(make, batch, q, k, v, cotangent):
    def run(q, k, v):
        out, pull_back = jax.vjp(make(batch), q, k, v)
        return out, *pull_back(cotangent)

    return jax.jit(run)(q, k, v)


def _inputs(batch, heads, kv_heads, head_dim):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(*batch.tokens.shape, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]


def _interpreted(batch):
    return splash.make_attend(batch, interpret=True)


def test_matches_dense_forward_and_backward():
    batch = packed_batch(stream_config(row_length=150, noisy_length=120), ROWS)  # 270 tokens: padded to 3 tiles
    inputs = _inputs(batch, 4, 2, 64)
    expected = _value_and_grads(dense_attend, batch, *inputs)
    got = _value_and_grads(_interpreted, batch, *inputs)
    padding = np.asarray(batch.visibility.segment == 0)
    for want, have in zip(expected, got, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-5, rtol=1e-5)
        assert not np.asarray(have)[padding].any()


def test_bfloat16_is_as_near_to_exact_as_dense_is():
    batch = packed_batch(stream_config(row_length=100, noisy_length=41), [[40, 50]])
    inputs = [x.astype(jnp.bfloat16) for x in _inputs(batch, 2, 1, 64)]
    exact = _value_and_grads(dense_attend, batch, *(x.astype(jnp.float32) for x in inputs))
    dense = _value_and_grads(dense_attend, batch, *inputs)
    got = _value_and_grads(_interpreted, batch, *inputs)
    for want, reference, have in zip(exact, dense, got, strict=True):
        assert have.dtype == jnp.bfloat16
        assert np.abs(np.float32(have) - want).max() <= 2 * np.abs(np.float32(reference) - want).max()


@pytest.mark.parametrize(
    "changes",
    [
        dict(recipe="ar_sft", noisy_length=0),
        dict(masks_per_block=4),
        dict(anchor="sequence"),
        dict(recipe="block_diffusion"),
        dict(block_size=32, masks_per_block=32),
        dict(block_fraction=0.5, random_offset=True),
    ],
    ids=str,
)
def test_encodes_every_training_layout(changes):
    """The integers compiled into the kernel say the same as the one visibility rule, for every pair of tokens."""
    cfg = stream_config(row_length=150, **{"noisy_length": 150, **changes})
    batch = packed_batch(cfg, ROWS)
    plan = jax.jit(splash.plan_tiles)(batch.visibility)
    length = batch.tokens.shape[1]
    runs, segment = np.asarray(plan.runs)[:, :length], np.asarray(plan.segment)[:, :length]
    assert (runs >= 0).all()
    same_segment = segment[:, :, None] == segment[:, None, :]
    encoded = np.stack([splash.in_runs(row[:, None], np.arange(length)[None]) for row in runs]) & same_segment
    expected = np.asarray(visible(batch.visibility, batch.visibility))
    padding = segment == 0
    np.testing.assert_array_equal(encoded & ~padding[:, :, None], expected)
    assert encoded[padding].any(-1).all()  # the kernel divides by the sum of a query's weights


def test_skips_tiles_without_a_visible_pair():
    batch = packed_batch(stream_config(row_length=512, noisy_length=384), [[256, 256]])
    useful = np.asarray(splash.plan_tiles(batch.visibility).useful)[0]
    mask = np.asarray(visible(batch.visibility, batch.visibility))[0].reshape(7, 128, 7, 128).any((1, 3))
    np.testing.assert_array_equal(useful, mask | np.eye(7, dtype=bool))
    assert useful.sum() <= 1.15 * mask.sum()


def test_refuses_rows_too_long_to_encode():
    zeros = jnp.zeros((1, splash.MAX_LENGTH + 1), jnp.int32)
    with pytest.raises(ValueError, match=r"8064 tokens a row.*got 8065.*blockwise"):
        splash.plan_tiles(Tokens(zeros, zeros, zeros, zeros, zeros))
