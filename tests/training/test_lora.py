"""Training low-rank updates: what moves and what does not, on any mesh, across interruptions, and into decoding."""

import dataclasses
import functools
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
from helpers.objective import MASK_ID, small_model
from helpers.paths import TINY_QWEN2
from helpers.tiny_run import logged, saved_state, tiny_run
from helpers.training import largest_difference, run_config, uneven_batch
from jax.sharding import PartitionSpec

import mars_jax
from mars_jax.errors import UserError
from mars_jax.models.export import export, export_adapter
from mars_jax.models.loading import load
from mars_jax.models.parameters import init_lora, init_parameters, join, split
from mars_jax.parallel.mesh import make_mesh
from mars_jax.training import loop
from mars_jax.training.setup import make_steps, run_mesh
from mars_jax.training.state import init_state

LORA = {"rank": 4, "alpha": 8.0}


@functools.cache
def _one_step(data, fsdp, tensor, accumulation):
    cfg = run_config(train={"accumulation": accumulation}, lora=LORA)
    base, params = small_model()
    model = dataclasses.replace(base, lora=cfg.lora.lora(MASK_ID))
    # Where B is zero, so is the gradient of A: start elsewhere.
    update = jax.tree.map(lambda a: a + 0.1, init_lora(jax.random.key(1), model))
    steps = make_steps(cfg, model, make_mesh(data, fsdp, tensor, jax.devices()[: data * fsdp * tensor]), 10)
    # Copies: a step takes over the buffers of its state.
    params, update = jax.tree.map(np.array, (params, update))
    everything = jax.device_put(join(params, update), steps.shardings.all_params)
    state = init_state(everything, steps.optimizer, steps.shardings)
    after, metrics = steps.train(state, steps.to_device(uneven_batch(accumulation)))
    return params, update, after, jax.device_get(metrics)


def test_a_step_moves_every_factor_and_nothing_else():
    params, update, after, _ = _one_step(1, 1, 1, 1)
    assert largest_difference(after.frozen, params) == 0
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after.params, update)
    assert min(jax.tree.leaves(moved)) > 1e-3
    assert jax.tree.structure(after.opt_state[1].mu) == jax.tree.structure(update)


def test_a_mesh_and_micro_batches_give_the_same_update():
    _, _, want, want_metrics = _one_step(1, 1, 1, 1)
    _, _, have, have_metrics = _one_step(2, 2, 2, 2)
    for name in ("loss", "loss_ar", "loss_mask", "grad_norm"):
        np.testing.assert_allclose(have_metrics[name], want_metrics[name], rtol=1e-5, err_msg=name)
    assert largest_difference(have.params, want.params) < 1e-5
    down = have.params["layers"]["mlp"]["down"]
    assert down["lora_a"].sharding.spec == PartitionSpec(None, "tensor", None)
    assert down["lora_b"].sharding.spec == PartitionSpec(None, None, "fsdp")
    assert have.opt_state[1].mu["layers"]["mlp"]["down"]["lora_a"].sharding == down["lora_a"].sharding
    assert have.frozen["layers"]["mlp"]["down"]["kernel"].sharding.spec == PartitionSpec(None, "tensor", "fsdp")


def test_frozen_weights_have_no_gradient_to_compute():
    """In FLOPs of the program: forward and backward through the activations, two thirds of full training."""
    base, _ = small_model(hidden_size=64)
    flops = {}
    for rank in (0, 1):
        cfg = run_config(lora={"rank": rank})
        model = dataclasses.replace(base, lora=cfg.lora.lora(MASK_ID))
        steps = make_steps(cfg, model, make_mesh(devices=jax.devices()[:1]), 10)
        stream = cfg.objective.stream_config(MASK_ID)
        lowered = steps.train.lower(steps.target, steps.batch_shapes(stream, 1, 8))
        flops[rank] = lowered.cost_analysis()["flops"]
    assert 0.5 < flops[1] / flops[0] < 0.85


def test_frozen_weights_are_kept_in_the_type_of_the_computation():
    cfg = run_config(lora=LORA, train={"dtype": "bfloat16"})
    model = dataclasses.replace(small_model()[0], lora=cfg.lora.lora(MASK_ID))
    target = make_steps(cfg, model, make_mesh(devices=jax.devices()[:1]), 10).target
    assert {leaf.dtype.name for leaf in jax.tree.leaves(target.frozen)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(target.params)} == {"float32"}


def train(cfg):
    """On one device, which is enough for what these runs show and much quicker than eight on few cores."""
    with mock.patch.object(loop, "run_mesh", lambda cfg: run_mesh(cfg, jax.devices()[:1])):
        loop.train(cfg)


def _run(folder, base=TINY_QWEN2, **sections):
    model = {"path": str(base), "scratch": None}
    train_keys = {"steps": 6, "save_every": 3, "eval_every": 3, "eval_batches": 1}
    lora = LORA | sections.pop("lora", {})
    return tiny_run(folder, model=model, train=train_keys | sections.pop("train", {}), lora=lora, **sections)


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gated")
    train(_run(folder, lora={"mask_gated": True}))
    return folder


def test_a_gated_update_learns_placeholders_and_leaves_the_model_alone(gated):
    first, last = logged(gated, "eval")
    assert first["loss_ar"] == last["loss_ar"]
    assert first["accuracy"][0] == last["accuracy"][0]
    assert last["loss_mask"] < first["loss_mask"]
    base = load(TINY_QWEN2)
    frozen, update = split(load(gated).params)
    assert largest_difference(frozen, base.params) == 0
    assert min(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(update)) > 0


def test_a_checkpoint_holds_the_update_alone(gated):
    saved = saved_state(gated, 6)["params"]
    names = {path[-1].key for path, _ in jax.tree.leaves_with_path(saved)}
    assert names == {"lora_a", "lora_b"}
    assert jax.tree.structure(saved) == jax.tree.structure(split(load(gated).params)[1])


def test_a_run_continues_bit_by_bit_and_only_on_its_own_base(gated, tmp_path):
    folder = shutil.copytree(gated, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "6")
    with pytest.raises(UserError, match=r"other values of lora"):
        train(_run(folder, lora={"mask_gated": True, "alpha": 4.0}))
    other = shutil.copytree(TINY_QWEN2, tmp_path / "other")
    with pytest.raises(UserError, match=r"other values of model\.path"):
        train(_run(folder, base=other, lora={"mask_gated": True}))
    train(_run(folder, lora={"mask_gated": True}))
    assert largest_difference(saved_state(folder, 6), saved_state(gated, 6)) == 0


def test_decoding_a_gated_model_is_that_of_its_base_token_by_token_and_uses_the_update_ahead(gated, tmp_path):
    base, model = load(TINY_QWEN2), load(gated)
    prompts = ["Count from 2 to 6.", "What is 3 plus 4?"]
    options = {"max_new_tokens": 24, "logprobs": 2}
    want = mars_jax.generate(base, prompts, mode="ar", **options)
    found = mars_jax.generate(model, prompts, mode="ar", **options)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]
    assert [g.logprobs for g in found] == [g.logprobs for g in want]  # to the last bit
    exact = mars_jax.generate(model, prompts, mode="verify", max_new_tokens=24)
    assert [g.token_ids for g in exact] == [g.token_ids for g in want]

    # tau=0 takes whatever placeholders predict, so its tokens are the update's.
    ahead, without = (
        [g.token_ids for g in mars_jax.generate(m, prompts, mode="window", tau=0.0, max_new_tokens=24)]
        for m in (model, base)
    )
    assert ahead != without
    exported = load(export_adapter(model, tmp_path / "adapter"))
    again = mars_jax.generate(exported, prompts, mode="window", tau=0.0, max_new_tokens=24)
    assert [g.token_ids for g in again] == ahead


def test_a_gated_run_is_no_base_for_training_and_is_not_merged(gated, tmp_path):
    with pytest.raises(UserError, match=r"model\.path=.* is an adapter: train from its base .*tiny-qwen2"):
        train(_run(tmp_path / "next", base=gated, lora={"rank": 0}))
    with pytest.raises(UserError, match="cannot be merged"):
        export(load(gated), tmp_path / "merged")


def test_fresh_factors_are_seeded_and_bounded_as_in_peft():
    model = dataclasses.replace(small_model()[0], lora=run_config(lora=LORA).lora.lora(MASK_ID))
    one, again, other = (init_lora(jax.random.key(seed), model) for seed in (0, 0, 1))
    assert largest_difference(one, again) == 0
    down, query = one["layers"]["mlp"]["down"], one["layers"]["attention"]["query"]
    assert largest_difference(query["lora_a"], other["layers"]["attention"]["query"]["lora_a"]) > 0.1
    assert 0.9 / 32**0.5 < float(np.abs(down["lora_a"]).max()) <= 1 / 32**0.5
    assert float(np.abs(down["lora_b"]).max()) == 0
    base = dataclasses.replace(model, lora=None)
    assert set(init_parameters(jax.random.key(0), base)) == {"embedding", "layers", "final_norm"}
