"""Estimates from known counts."""

import pytest

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import parameter_shapes
from mars_jax.parallel.hlo import Counts
from mars_jax.parallel.roofline import CHIPS, attention_flops, chip_of, estimate, matrix_parameters, useful_train_flops

MODEL = ModelConfig("qwen2", 100, 16, 24, 3, 4, 2, 8, qkv_bias=True)


def test_the_slowest_resource_sets_the_step():
    chip = CHIPS["v5e"]
    counts = Counts(flops=0.5 * chip.flops, bytes=0.25 * chip.hbm_bandwidth, collectives={"all-reduce": 10e9})
    best = estimate(counts, kernel_flops=0.5 * chip.flops, useful_flops=0.5 * chip.flops, chip=chip)
    assert (best.compute_seconds, best.memory_seconds) == pytest.approx((1.0, 0.25))
    assert best.network_seconds == pytest.approx(2 * 10e9 / 100e9)  # a ring all-reduce sends everything twice
    assert (best.bound, best.step_seconds, best.mfu) == ("compute", pytest.approx(1.0), pytest.approx(0.5))


def test_matrix_parameters_are_those_of_the_model():
    layers = parameter_shapes(MODEL)["layers"]
    kernels = [*(m["kernel"] for m in layers["mlp"].values())]
    kernels += [layers["attention"][name]["kernel"] for name in ("query", "key", "value", "output")]
    assert matrix_parameters(MODEL) == sum(k.size for k in kernels)


def test_useful_flops_are_six_a_parameter_and_token():
    forward = 2 * (matrix_parameters(MODEL) * 10 + 100 * 16 * 7) + attention_flops(MODEL, 55)
    assert useful_train_flops(MODEL, tokens=10, entries=7, visible_pairs=55) == 3 * forward
    assert attention_flops(MODEL, 1) == 2 * 2 * 3 * 4 * 8  # scores and mixing, layers, heads, head_dim


def test_unknown_chips_are_named():
    with pytest.raises(UserError, match=r"v99.*v5e"):
        chip_of("v99:2x2")
