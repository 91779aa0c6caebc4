"""From a configuration to everything of a run that does not change from step to step."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mars_jax.config import RunConfig
from mars_jax.errors import UserError
from mars_jax.objective.streams import Batch, StreamConfig, empty_row
from mars_jax.parallel.attention import choose_attend
from mars_jax.parallel.mesh import make_mesh, row_shards, rows_sharding, rows_to_device
from mars_jax.training.optimizer import make_optimizer, make_schedule
from mars_jax.training.state import TrainState, abstract_state, make_shardings
from mars_jax.training.step import LossOptions, make_eval_step, make_train_step


@dataclass(frozen=True)
class Steps:
    """The compiled functions of a run and the layout of what they take.

    train: `(state, batches) -> (state, metrics)`. evaluate: `(all_params, batches) -> (LossSums, trained)`.
    target: the state's shapes with shardings.
    """

    mesh: Mesh
    optimizer: optax.GradientTransformation
    options: LossOptions
    shardings: TrainState
    target: TrainState
    train: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped

    def to_device(self, batch: Batch) -> Batch:
        """This process's parts `[A, rows of row_parts(mesh), …]` of a global batch as global arrays `[A, B, …]`."""
        return rows_to_device(self.mesh, batch)

    def batch_shapes(self, stream: StreamConfig, accumulation: int, rows: int) -> Batch:
        """`jax.ShapeDtypeStruct`s of `to_device`'s result, for compiling ahead of time; `rows` of a micro-batch."""
        sharding = rows_sharding(self.mesh, leading=1)
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((accumulation, rows, *a.shape), a.dtype, sharding=sharding),
            empty_row(stream),
        )


def run_mesh(cfg: RunConfig, devices=None) -> Mesh:
    """The mesh over all or the given devices, once the rows of a micro-batch are known to spread evenly over it."""
    mesh = make_mesh(cfg.mesh.data, cfg.mesh.fsdp, cfg.mesh.tensor, devices)
    rows = cfg.train.global_batch // cfg.train.accumulation
    if rows % row_shards(mesh):
        raise UserError(
            f"train.global_batch={cfg.train.global_batch} rows in "
            f"train.accumulation={cfg.train.accumulation} micro-batches are {rows} rows each: not a multiple of "
            f"data x fsdp = {mesh.shape['data']} x {mesh.shape['fsdp']} devices"
        )
    return mesh


def make_steps(cfg: RunConfig, model, mesh: Mesh, total_steps: int) -> Steps:
    """Compile-ready step functions for a `ModelConfig` on a mesh."""
    optimizer = make_optimizer(cfg.optimizer, model)
    schedule = make_schedule(cfg.schedule, cfg.optimizer.learning_rate, total_steps)
    shardings = make_shardings(model, optimizer, mesh)
    options = LossOptions(
        model=model,
        make_attend=choose_attend(cfg.objective.attention, mesh, cfg.objective.block_size),
        mesh=mesh,
        block_size=cfg.objective.block_size,
        ar_weight=cfg.objective.ar_weight,
        dtype=jnp.dtype(cfg.train.dtype),
        remat=cfg.model.remat,
        chunk=cfg.objective.logits_chunk,
        offset_weights=cfg.objective.offset_weights,
        distill=cfg.objective.distill,
    )
    return Steps(
        mesh=mesh,
        optimizer=optimizer,
        options=options,
        shardings=shardings,
        target=abstract_state(
            model, optimizer, shardings, jnp.dtype(cfg.train.parameter_dtype), jnp.dtype(cfg.train.dtype)
        ),
        train=make_train_step(options, optimizer, schedule, mesh, shardings),
        evaluate=make_eval_step(options, mesh, shardings),
    )
