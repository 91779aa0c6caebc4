"""Low-rank updates of a model: where they stand, what they change, and what they leave alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.objective import MASK_ID, small_model
from helpers.rows import packed_batch, stream_config
from helpers.training import largest_difference

from mars_jax.models import decoder
from mars_jax.models.config import Lora
from mars_jax.models.lora import fingerprint, merge
from mars_jax.models.parameters import init_lora, join, parameter_specs, split
from mars_jax.objective.losses import dense_attend, loss_sums, update_gate

ALL = ("query", "key", "value", "output", "gate", "up", "down")
PLAIN, GATED = Lora(3, 6.0, ALL), Lora(3, 6.0, ALL, gate=MASK_ID)
ROWS = stream_config(40, 28)


def with_lora(lora: Lora, seed: int = 1, zero: bool = False):
    """The small model with an update; unless `zero`, both of its factors are random."""
    base, params = small_model()
    cfg = dataclasses.replace(base, lora=lora)
    update = init_lora(jax.random.key(seed), cfg)
    if not zero:
        rng = np.random.default_rng(seed)
        update = jax.tree.map(lambda a: jnp.asarray(0.3 * rng.standard_normal(a.shape), jnp.float32), update)
    return cfg, join(params, update)


def hidden(params, cfg, batch):
    """Operation by operation: compiled whole, programs that differ anywhere may round differently everywhere."""
    gate = update_gate(cfg, batch)
    with jax.disable_jit():
        return decoder.forward(params, cfg, batch.tokens, batch.visibility.position, dense_attend(batch), gate_BT=gate)


def test_an_update_has_two_factors_beside_each_targeted_kernel_and_is_all_that_is_trained():
    cfg = dataclasses.replace(small_model()[0], lora=Lora(3, 6.0, ("query", "down")))
    frozen, trained = split(parameter_specs(cfg))
    assert set(trained) == {"layers"}
    assert set(trained["layers"]["attention"]) == {"query"}
    assert {k: s.shape for k, s in trained["layers"]["mlp"]["down"].items()} == {
        "lora_a": (2, 32, 3),
        "lora_b": (2, 3, 16),
    }
    assert trained["layers"]["mlp"]["down"]["lora_a"].axes == ("layer", "mlp", None)
    assert frozen == parameter_specs(dataclasses.replace(cfg, lora=None))
    assert join(frozen, trained) == parameter_specs(cfg)


def test_a_fresh_update_changes_not_one_bit():
    base, params = small_model()
    batch = packed_batch(ROWS, [[40], [5, 33]])
    for lora in (PLAIN, GATED):
        cfg, adapted = with_lora(lora, zero=True)
        assert float(jnp.abs(adapted["layers"]["mlp"]["up"]["lora_a"]).max()) > 0.1  # of at most 1/4
        np.testing.assert_array_equal(hidden(adapted, cfg, batch), hidden(params, base, batch))


def test_a_merged_update_gives_the_same_logits():
    cfg, params = with_lora(PLAIN)
    base, original = small_model()
    batch = packed_batch(ROWS, [[40], [5, 33]])
    merged = merge(params, PLAIN)
    assert jax.tree.structure(merged) == jax.tree.structure(original)
    logits = [
        decoder.unembed(p, base, hidden(p, c, batch)) for p, c in ((params, cfg), (merged, base), (original, base))
    ]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
    assert np.abs(logits[0] - logits[2]).max() > 0.1


def test_merging_is_the_sum_that_the_paper_writes():
    _, params = with_lora(PLAIN)
    p = jax.tree.map(lambda a: np.asarray(a[1], np.float64), params["layers"]["attention"]["key"])
    want = p["kernel"] + 6.0 / 3 * p["lora_a"] @ p["lora_b"]
    np.testing.assert_allclose(merge(params, PLAIN)["layers"]["attention"]["key"]["kernel"][1], want, atol=1e-6)


@pytest.mark.parametrize("anchor", ["response", "sequence"])
def test_a_gated_update_acts_on_masks_of_the_noisy_stream_and_on_nothing_else(anchor):
    base, original = small_model()
    cfg, params = with_lora(GATED)
    masks = 3 if anchor == "response" else 4
    rows = stream_config(40, 40, anchor=anchor, masks_per_block=masks)
    batch = packed_batch(rows, [[40], [5, 33]])
    # A chat may hold the text of [MASK]: in the clean stream it is a token like others.
    batch = batch._replace(tokens=batch.tokens.at[:, 2].set(MASK_ID))
    placeholder = np.asarray((batch.tokens == MASK_ID) & (batch.visibility.group > 0))
    used = np.asarray(batch.visibility.segment > 0)
    found, want = (np.asarray(hidden(p, c, batch)) for p, c in ((params, cfg), (original, base)))
    np.testing.assert_array_equal(found[~placeholder & used], want[~placeholder & used])
    assert (np.abs(found - want).max(-1)[placeholder & used] > 1e-3).all()
    assert anchor == "response" or ((batch.visibility.group > 0) & ~placeholder & used).any()


def test_a_gated_update_has_no_gradient_from_the_autoregressive_loss():
    cfg, params = with_lora(GATED)
    frozen, update = split(params)
    batch = packed_batch(ROWS, [[40], [5, 33]])

    def losses(update):
        sums = loss_sums(join(frozen, update), cfg, batch, num_offsets=5)
        return sums.ar, sums.mask

    of_ar, of_mask = jax.jit(jax.jacrev(losses))(update)
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(of_ar))
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(of_mask))


def test_the_fingerprint_is_that_of_the_weights_not_of_their_type_or_order_of_summation():
    _, params = small_model()
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert fingerprint(half) == fingerprint(params)
    changed = jax.tree.map(lambda a: a, params)
    kernel = changed["layers"]["mlp"]["up"]["kernel"]
    changed["layers"]["mlp"]["up"]["kernel"] = kernel.at[1, 3, 5].multiply(1.01)
    assert fingerprint(changed) != fingerprint(params)
    swapped = {**params, "layers": {**params["layers"]}}
    swapped["layers"]["mlp_norm"] = {"scale": params["layers"]["attention_norm"]["scale"] * 2}
    other = {**params, "layers": {**params["layers"]}}
    other["layers"]["attention_norm"] = {"scale": params["layers"]["attention_norm"]["scale"] * 2}
    assert fingerprint(swapped) != fingerprint(other)


def test_a_merged_model_in_bfloat16_keeps_its_type():
    cfg, params = with_lora(PLAIN)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(merge(half, cfg.lora))} == {jnp.dtype(jnp.bfloat16)}
    exact = merge(params, cfg.lora)
    assert largest_difference(merge(half, cfg.lora), exact) < 0.02
