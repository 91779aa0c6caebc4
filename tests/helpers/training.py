"""Configurations and batches for the tests of training."""

import functools

import jax
import numpy as np
from helpers.objective import small_model
from helpers.rows import packed_batch, stream_config

from mars_jax.config import RunConfig, parse_config
from mars_jax.objective.streams import Batch
from mars_jax.parallel.mesh import make_mesh
from mars_jax.training.setup import Steps, make_steps
from mars_jax.training.state import TrainState, init_state

ROW_LENGTH, NOISY_LENGTH = 40, 28
# Eight rows with very different numbers of trained tokens, one of them all padding.
UNEVEN_ROWS = [[40], [4], [30, 9], [3, 3, 3], [], [12, 12, 12], [20], [5, 33]]


def run_config(**sections) -> RunConfig:
    """A valid configuration; keyword arguments replace keys of its sections."""
    tree = {
        "output_dir": "unused",
        "model": {"path": "unused"},
        "data": {},
        "train": {"steps": 10, "global_batch": 8},
        "objective": {"row_length": ROW_LENGTH, "logits_chunk": 16, "attention": "dense"},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1},
        "schedule": {"kind": "constant", "warmup_ratio": 0.0},
    }
    for name, value in sections.items():
        tree[name] = tree.get(name, {}) | value if isinstance(value, dict) else value
    return parse_config(tree, "test")


def uneven_batch(accumulation: int = 1, recipe: str = "mars") -> Batch:
    """`[A, 8 / A, …]`, always the same eight rows."""
    cfg = stream_config(ROW_LENGTH, 0 if recipe == "ar_sft" else NOISY_LENGTH, recipe)
    rows = packed_batch(cfg, UNEVEN_ROWS)
    return jax.tree.map(lambda leaf: np.array(leaf).reshape(accumulation, -1, *leaf.shape[1:]), rows)


def start(cfg: RunConfig, data=1, fsdp=1, tensor=1) -> tuple[Steps, TrainState]:
    """Step functions and the first state of the small model on a mesh of the first devices."""
    _, params = small_model()
    steps = _steps(cfg, data, fsdp, tensor)
    return steps, init_state(jax.device_put(params, steps.shardings.params), steps.optimizer, steps.shardings)


@functools.cache  # compiled once for all tests that use the same configuration
def _steps(cfg: RunConfig, data: int, fsdp: int, tensor: int) -> Steps:
    model, _ = small_model()
    devices = jax.devices()[: data * fsdp * tensor]
    return make_steps(cfg, model, make_mesh(data, fsdp, tensor, devices), total_steps=10)


def largest_difference(a, b) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), a, b)))
