"""One update: independent of how the global batch is cut, equal to a per-row reference, safe against bad batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.objective import small_model
from helpers.training import largest_difference, run_config, start, uneven_batch
from jax.sharding import PartitionSpec

from mars_jax.objective.losses import dense_attend, loss_sums
from mars_jax.training.step import LossOptions, loss_and_gradient

CUTS = [
    # data, fsdp, tensor, micro-batches
    (1, 1, 1, 2),
    (1, 1, 1, 8),
    (8, 1, 1, 1),
    (1, 8, 1, 1),
    (2, 4, 1, 1),
    (2, 2, 2, 2),
]


@functools.cache
def _one_step(data, fsdp, tensor, accumulation):
    cfg = run_config(train={"accumulation": accumulation})
    steps, state = start(cfg, data, fsdp, tensor)
    after, metrics = steps.train(state, steps.to_device(uneven_batch(accumulation)))
    return steps, after, jax.device_get(metrics)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_gives_the_same_update(cut):
    _, want, want_metrics = _one_step(1, 1, 1, 1)
    _, have, have_metrics = _one_step(*cut)
    for name in ("loss", "loss_ar", "loss_mask", "grad_norm", "ar_share"):
        np.testing.assert_allclose(have_metrics[name], want_metrics[name], rtol=1e-5, err_msg=name)
    assert largest_difference(have.params, want.params) < 1e-5
    assert have_metrics["trained_tokens"] == want_metrics["trained_tokens"]


def test_state_keeps_its_shardings():
    steps, after, _ = _one_step(2, 2, 2, 2)
    kernel = after.params["layers"]["mlp"]["gate"]["kernel"]  # [L, D, F]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert kernel.addressable_shards[0].data.shape == (2, 16 // 2, 32 // 2)
    moment = after.opt_state[1].mu["layers"]["mlp"]["gate"]["kernel"]
    assert moment.sharding == kernel.sharding
    assert jax.tree.map(lambda a: a.sharding, after.params) == steps.shardings.params


def test_gradient_comes_out_sharded():
    steps, state = start(run_config(), fsdp=8)
    gradient = jax.jit(
        lambda p, b: loss_and_gradient(p, b, steps.options, steps.shardings.params)[2],
    )(state.params, steps.to_device(uneven_batch()))
    kernel = gradient["layers"]["mlp"]["gate"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 2, 32)


def test_update_equals_a_token_weighted_reference():
    """Loss and gradient of each row alone, weighted by hand; then AdamW in numpy."""
    model, params = small_model()
    batch = jax.tree.map(lambda leaf: leaf[0], uneven_batch())
    total_trained = batch.trained.sum()

    @jax.jit
    def row_sums(params, row):
        sums = loss_sums(params, model, row, num_offsets=5)
        return sums.mask + sums.ar

    loss, gradient = 0.0, jax.tree.map(np.zeros_like, params)
    for i in range(8):
        row = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)
        value, row_gradient = jax.value_and_grad(row_sums)(params, row)
        loss += float(value) / total_trained
        gradient = jax.tree.map(lambda a, b: a + np.asarray(b) / total_trained, gradient, row_gradient)
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))

    def adamw(path, p, g):
        clipped = g * min(1.0, 1.0 / norm)
        matrix = p.ndim == (3 if path[0].key == "layers" else 2)
        # The first Adam step: both moments are corrected back to the gradient and its square.
        direction = clipped / (np.abs(clipped) + 1e-8) + (0.1 * p if matrix else 0.0)
        return p - 1e-2 * direction

    want = jax.tree_util.tree_map_with_path(adamw, jax.device_get(params), gradient)
    _, have, metrics = _one_step(1, 1, 1, 1)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    clear = jax.tree.map(lambda g: np.abs(g) / norm > 1e-6, gradient)  # where eps does not drown the gradient
    off = jax.tree.map(lambda a, b, ok: np.where(ok, np.abs(np.asarray(a) - b), 0).max(), have.params, want, clear)
    assert max(jax.tree.leaves(off)) < 1e-5


def test_autoregressive_share_is_counted():
    _, _, metrics = _one_step(1, 1, 1, 1)
    entries = metrics["entries_by_offset"]
    # Entries without a placeholder in view: one a trained token; first tokens of blocks count for L_mask too.
    batch = uneven_batch()
    first_of_block = (batch.weight_mask > 0) & (batch.offset == 0)
    want = (entries[0] + first_of_block.sum()) / (2 * metrics["trained_tokens"])
    assert 0.5 < want < 1
    np.testing.assert_allclose(metrics["ar_share"], want, rtol=1e-6)


@pytest.mark.parametrize("broken", ["nan", "inf"])
def test_a_step_that_is_not_finite_changes_nothing(broken):
    steps, state = start(run_config())
    batch = uneven_batch()
    batch.weight_ar[0, 0, 0] = float(broken)
    before = jax.device_get(state)
    after, metrics = steps.train(state, steps.to_device(batch))
    assert not metrics["finite"]
    assert after.step == before.step + 1
    assert largest_difference(after.params, before.params) == 0
    assert largest_difference(after.opt_state, before.opt_state) == 0


def test_a_batch_without_trained_tokens_changes_nothing():
    steps, state = start(run_config())
    batch = jax.tree.map(lambda leaf: leaf[:, [4] * 8], uneven_batch())  # row 4 is padding
    before = jax.device_get(state)
    after, metrics = steps.train(state, steps.to_device(batch))
    assert metrics["trained_tokens"] == 0 and metrics["loss"] == 0 and metrics["finite"]
    assert largest_difference(after.params, before.params) == 0  # not even by weight decay


def test_finite_everywhere_with_padding_and_short_spans(debug_nans):
    steps, state = start(run_config())
    after, metrics = steps.train(state, steps.to_device(uneven_batch()))
    assert np.isfinite(metrics["loss"]) and all(np.isfinite(p).all() for p in jax.tree.leaves(after.params))


def test_the_old_state_is_given_up():
    steps, state = start(run_config())
    steps.train(state, steps.to_device(uneven_batch()))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_sft_batches_have_no_noisy_stream():
    cfg = run_config(objective={"recipe": "ar_sft"})
    steps, state = start(cfg)
    batch = uneven_batch(recipe="ar_sft")
    assert batch.tokens.shape == (1, 8, 40)
    _, metrics = steps.train(state, steps.to_device(batch))
    assert metrics["loss_mask"] == 0 and metrics["ar_share"] == 1
    _, _, joint = _one_step(1, 1, 1, 1)
    np.testing.assert_allclose(metrics["loss"], joint["loss_ar"], rtol=1e-5)  # the AR term is plain SFT's


def test_bfloat16_compute_keeps_float32_parameters_and_gradients():
    steps, state = start(run_config(train={"dtype": "bfloat16"}))
    gradient = jax.jit(lambda p, b: loss_and_gradient(p, b, steps.options)[2])(
        state.params, steps.to_device(uneven_batch())
    )
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    after, metrics = steps.train(state, steps.to_device(uneven_batch()))
    assert {p.dtype for p in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}
    _, _, exact = _one_step(1, 1, 1, 1)
    np.testing.assert_allclose(metrics["loss"], exact["loss"], rtol=2e-2)


def test_evaluation_sums_over_micro_batches():
    steps, state = start(run_config())
    whole, trained = steps.evaluate(state.params, steps.to_device(uneven_batch()))
    cut, _ = steps.evaluate(state.params, steps.to_device(uneven_batch(4)))
    np.testing.assert_allclose(whole.mask, cut.mask, rtol=1e-5)
    np.testing.assert_array_equal(whole.entries_by_offset, cut.entries_by_offset)
    assert trained == uneven_batch().trained.sum()


def test_recomputing_layers_changes_nothing():
    model, params = small_model()
    batch = jax.tree.map(jnp.asarray, uneven_batch())
    run = jax.jit(loss_and_gradient, static_argnames="options")
    plain = run(params, batch, options=LossOptions(model, dense_attend, 4))
    saving = run(params, batch, options=LossOptions(model, dense_attend, 4, remat=True))
    assert largest_difference(plain[2], saving[2]) < 1e-6
