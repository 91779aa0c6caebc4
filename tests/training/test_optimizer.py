"""What decays, how fast the learning rate moves, and AdamW against numpy."""

import jax
import numpy as np
import pytest
from helpers.objective import small_model

from mars_jax.config_sections import OptimizerSection, ScheduleSection
from mars_jax.training.optimizer import decayed_names, make_optimizer, make_schedule

MATRICES = [
    "embedding.table",
    "layers.attention.key.kernel",
    "layers.attention.output.kernel",
    "layers.attention.query.kernel",
    "layers.attention.value.kernel",
    "layers.mlp.down.kernel",
    "layers.mlp.gate.kernel",
    "layers.mlp.up.kernel",
]


def test_exactly_the_matrices_decay():
    """The small model has stacked norms, q/k norms and biases, all two-dimensional arrays."""
    model, params = small_model()
    optimizer = make_optimizer(OptimizerSection(weight_decay=0.1), model)
    no_gradient = jax.tree.map(np.zeros_like, params)
    direction, _ = optimizer.update(no_gradient, optimizer.init(params), params)
    moved = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree.leaves_with_path(direction)
        if np.abs(leaf).max() > 0
    ]
    assert moved == decayed_names(model) == MATRICES
    np.testing.assert_allclose(direction["embedding"]["table"], 0.1 * params["embedding"]["table"], rtol=1e-6)


def test_two_updates_equal_numpy():
    model, params = small_model()
    options = OptimizerSection(b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.0, clip_norm=1e9)
    optimizer = make_optimizer(options, model)
    state = optimizer.init(params)
    m = v = 0.0
    for step in (1, 2):
        gradient = jax.tree.map(lambda p, step=step: p * step, params)
        direction, state = optimizer.update(gradient, state, params)
        g = np.asarray(gradient["embedding"]["table"])
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        want = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.99**step)) + 1e-6)
        np.testing.assert_allclose(direction["embedding"]["table"], want, rtol=1e-4, atol=1e-6)


def test_clipping_is_by_the_norm_of_all_gradients_together():
    model, params = small_model()
    state = make_optimizer(OptimizerSection(clip_norm=0.5), model).init(params)
    gradient = jax.tree.map(np.ones_like, params)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    _, state = make_optimizer(OptimizerSection(clip_norm=0.5), model).update(gradient, state, params)
    np.testing.assert_allclose(state[1].mu["final_norm"]["scale"], 0.1 * 0.5 / np.sqrt(count), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "final_ratio", "want"),
    [
        ("constant", 0.0, {0: 0.25, 3: 1.0, 4: 1.0, 12: 1.0, 19: 1.0}),
        ("linear", 0.0, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 12: 0.5, 20: 0.0}),
        ("linear", 0.2, {4: 1.0, 12: 0.6, 20: 0.2}),
        ("cosine", 0.0, {0: 0.25, 2: 0.75, 4: 1.0, 12: 0.5, 20: 0.0}),
        ("cosine", 0.1, {4: 1.0, 12: 0.55, 20: 0.1}),
    ],
)
def test_learning_rates(kind, final_ratio, want):
    """20 updates, 4 of them warm-up, peak 1."""
    schedule = make_schedule(ScheduleSection(kind, warmup_ratio=0.2, final_ratio=final_ratio), 1.0, 20)
    have = {step: float(schedule(step)) for step in want}
    assert have == pytest.approx(want, abs=1e-6)


def test_one_step_of_warm_up_and_none():
    assert float(make_schedule(ScheduleSection("linear", warmup_ratio=0.1), 1.0, 10)(0)) == 1.0
    assert float(make_schedule(ScheduleSection("constant", warmup_ratio=0.0), 1.0, 10)(0)) == 1.0
