"""Parameters from the output folder of a training run.

Layout: `hf/` holds config and tokenizer (`hf_folder.write_metadata`), `checkpoints/<step>/params` the parameter tree.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from etils import epath

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params, parameter_shapes, split
from mars_jax.storage import absolute

METADATA, CHECKPOINTS = "hf", "checkpoints"


def is_run_folder(folder: epath.Path) -> bool:
    return (folder / METADATA / "config.json").exists()


def restore_parameters(folder: epath.Path, cfg: ModelConfig, *, dtype, shardings: Params, step: int | None) -> Params:
    """The parameters of the latest complete checkpoint, or of `step`; of a run of low-rank updates, these alone.

    Raises `UserError` where there is none, or it cannot be read.
    """
    import orbax.checkpoint as ocp

    checkpoints = absolute(folder / CHECKPOINTS)
    if not checkpoints.is_dir():
        raise UserError(f"{folder}: no checkpoint yet")
    with _no_warnings():
        manager = ocp.CheckpointManager(checkpoints, options=ocp.CheckpointManagerOptions(read_only=True))
    with manager:
        steps = sorted(manager.all_steps())
        if not steps:
            raise UserError(f"{folder}: no complete checkpoint yet")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise UserError(f"{folder}: no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
        target = jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            split(parameter_shapes(cfg, dtype))[1],
            shardings,
        )
        try:
            return manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(target))).params
        except (ValueError, KeyError, OSError) as error:
            raise UserError(f"{checkpoints / str(step)}: cannot be read ({error}); choose another step") from error


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Orbax warns three times that a read-only manager does not write."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
