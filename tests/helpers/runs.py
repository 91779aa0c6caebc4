"""Output folders of training runs, without training."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from mars_jax.models.hf_folder import write_metadata
from mars_jax.models.loading import LoadedModel


def save_run(folder: Path, model: LoadedModel, steps: list[int], scale: float = 2.0) -> Path:
    """A run's output folder whose checkpoint of step n holds the parameters times `scale ** n`."""
    write_metadata(model, folder / "hf")
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), item_names=("params",)) as manager:
        for step in steps:
            params = jax.tree.map(lambda a, step=step: a * scale**step, model.params)
            manager.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
            manager.wait_until_finished()
    return folder
