"""Checkpoints of a run: parameters, optimizer, data position and metadata, written in the background by Orbax.

Layout: `output_dir/checkpoints/<step>/{params,opt_state,data,metadata}`. A checkpoint appears under its step number
once it is complete, and older ones are deleted after that: at any moment the last complete one can be resumed from.
"""

import dataclasses
import json
import logging
import subprocess
from importlib import metadata as package_metadata
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers

from mars_jax.config import RunConfig
from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.storage import absolute
from mars_jax.training.state import TrainState

log = logging.getLogger(__name__)

FORMAT = "mars_jax.train.1"
ITEMS = ("params", "opt_state", "data", "metadata")
# A data position means something only under the settings that choose, order and cut the data.
SAME_KEYS = (
    "model.path",
    "model.scratch",
    "model.mask_token",
    "data",
    "objective.recipe",
    "objective.block_size",
    "objective.row_length",
    "train.global_batch",
    "train.seed",
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


def code_version() -> dict[str, str]:
    """Package version, and commit where the code is a git checkout."""
    try:
        version = package_metadata.version("mars-jax")
    except package_metadata.PackageNotFoundError:
        version = "unknown"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return {"version": version}
    return {"version": version, "commit": commit}


def run_metadata(cfg: RunConfig, model: ModelConfig) -> dict[str, Any]:
    """What every checkpoint of a run says of itself."""
    return {
        "format": FORMAT,
        "code": code_version(),
        "model": dataclasses.asdict(model),
        "config": dataclasses.asdict(cfg),
    }


class Checkpoints:
    """The checkpoints of one output folder."""

    def __init__(self, folder: Path | epath.Path, keep: int, keep_best: str | None = None):
        """`keep` latest ones are kept, and the one with the lowest evaluation metric `keep_best`."""
        self.folder = folder = epath.Path(folder)
        self._broken: list[int] = []
        policies = [managers.LatestN(keep)]
        if keep_best is not None:
            best = managers.BestN(
                get_metric_fn=lambda metrics: metrics[keep_best],
                reverse=True,
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(best)
        options = ocp.CheckpointManagerOptions(
            best_fn=policies[-1].get_metric_fn if keep_best is not None else None,  # makes Orbax store metrics
            preservation_policy=managers.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.manager = ocp.CheckpointManager(absolute(folder), item_names=ITEMS, options=options)
        except OSError as error:
            raise UserError(f"output_dir: cannot write to {folder}: {error.strerror or error}") from error

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: TrainState, data, metadata: dict, metrics: dict[str, float] | None = None) -> None:
        """Start writing `state` and the position of the iterator `data`.

        Raises CheckpointError if this or the last write failed.
        """
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            opt_state=ocp.args.StandardSave({"step": state.step, "opt_state": state.opt_state}),
            data=ocp.args.JsonSave(data.get_state()),
            metadata=ocp.args.JsonSave(metadata | {"step": step}),
        )
        self._guarded(lambda: self.manager.save(step, args=items, metrics=metrics, force=True))

    def restore(self, target: TrainState, data, metadata: dict) -> TrainState | None:
        """The latest checkpoint that can be read, put onto the shapes and shardings of `target`; None if there is none.

        `data`, a fresh iterator, is moved to the saved position. A broken checkpoint is named in the log and moved
        aside, and the one before it taken. Raises UserError if all are broken, or one belongs to another model or data.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                saved = self.manager.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore())).metadata
                if saved["format"] != FORMAT:
                    raise ValueError(f"its format is {saved['format']!r}, not {FORMAT!r}")
                _check_same_run(saved, metadata, self.folder / str(step))
                state = self._read_state(step, target)
                data.set_state(self.manager.restore(step, args=ocp.args.Composite(data=ocp.args.JsonRestore())).data)
            except UserError:
                raise
            except Exception as error:  # whatever a damaged file makes the storage layers raise
                if jax.process_count() > 1:
                    raise UserError(
                        f"checkpoint {self.folder / str(step)} cannot be read ({error}): remove it"
                    ) from error
                log.warning(
                    "checkpoint %s cannot be read (%s: %s)", self.folder / str(step), type(error).__name__, error
                )
                self._broken.append(step)
                continue
            self._move_aside()
            return state
        if steps:
            raise UserError(
                f"none of the checkpoints {steps} in {self.folder} can be read: "
                "remove them or choose another output_dir"
            )
        return None

    def _read_state(self, step: int, target: TrainState) -> TrainState:
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(target.params),
            opt_state=ocp.args.StandardRestore({"step": target.step, "opt_state": target.opt_state}),
        )
        restored = self.manager.restore(step, args=items)
        return TrainState(restored.opt_state["step"], restored.params, restored.opt_state["opt_state"])

    def _move_aside(self) -> None:
        """Out of the way of new checkpoints of the same step, but not lost."""
        for step in self._broken:
            aside = self.folder.parent / "broken_checkpoints" / str(step)
            aside.parent.mkdir(exist_ok=True)
            aside.rmtree(missing_ok=True)
            (self.folder / str(step)).rename(aside)
            log.warning("moved to %s", aside)
        self._broken.clear()
        self.manager.reload()

    def wait(self) -> None:
        """Until everything started is on disk."""
        self._guarded(self.manager.wait_until_finished)

    def close(self) -> None:
        self._guarded(self.manager.close)

    def _guarded(self, action) -> None:
        try:
            action()
        except Exception as error:  # the background writer passes on whatever its storage layer raised
            found = [p for p in self.folder.iterdir() if p.name.isdigit()]
            # In object storage a checkpoint under way has its final name already, and a mark when it is complete.
            complete = [int(p.name) for p in found if ocp.utils.is_checkpoint_finalized(p)]
            intact = f"checkpoint {max(complete)} is intact" if complete else "there is no earlier checkpoint"
            raise CheckpointError(f"writing a checkpoint to {self.folder} failed ({error}); {intact}") from error


def _check_same_run(saved: dict, current: dict, where: epath.Path) -> None:
    """Refuse to continue a run as another one."""
    current = json.loads(json.dumps(current))  # tuples as the lists that JSON made of them
    different = [
        "lora" if k == "lora" else f"model.{k}" for k, v in current["model"].items() if saved["model"].get(k) != v
    ]
    different += [key for key in SAME_KEYS if _at(saved["config"], key) != _at(current["config"], key)]
    if different:
        raise UserError(
            f"{where} was written with other values of {', '.join(different)}: it cannot be continued with these; "
            "choose another output_dir, or set them back"
        )


def _at(tree: dict, dotted: str):
    for key in dotted.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
