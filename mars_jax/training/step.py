"""One optimizer update of a global batch, compiled over a mesh, and its evaluation twin.

Batches carry two leading axes: A micro-batches of B rows. Sums of losses are divided by the trained tokens of the whole
global batch, so that no cut of it into micro-batches, rows or devices changes the loss or the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params, join
from mars_jax.objective.losses import LossSums, combine, loss_sums
from mars_jax.objective.streams import Batch
from mars_jax.parallel.mesh import replicated, rows_sharding
from mars_jax.parallel.rules import attention_sharding, vocabulary_shardings
from mars_jax.training.state import TrainState


@dataclass(frozen=True)
class LossOptions:
    """What the loss of a batch depends on besides parameters and data; see `objective.losses.loss_sums`.

    make_attend: `batch -> attend`, the attention of both streams.
    mesh:        of the devices; None leaves the layout of activations to the compiler.
    """

    model: ModelConfig
    make_attend: Callable
    block_size: int
    ar_weight: float = 1.0
    dtype: Any = jnp.float32
    remat: bool = False
    chunk: int = 256
    offset_weights: tuple[float, ...] = ()
    distill: float = 0.0
    mesh: Mesh | None = None

    def sums(self, params: Params, batch: Batch) -> LossSums:
        return loss_sums(
            params if self.mesh is None else gather_vocabulary(params, self.mesh),
            self.model,
            batch,
            num_offsets=self.block_size + 1,
            make_attend=self.make_attend if self.mesh is None else constrain_attend(self.make_attend, self.mesh),
            dtype=self.dtype,
            remat=self.remat,
            chunk=self.chunk,
            offset_weights=self.offset_weights,
            distill=self.distill,
        )


def gather_vocabulary(params: Params, mesh: Mesh) -> Params:
    """Embedding and head gathered over `fsdp` once a forward, not once a chunk of loss entries."""
    gathered = vocabulary_shardings(mesh)
    tables = {name: params[name] for name in gathered if name in params}
    pinned = {name: jax.lax.with_sharding_constraint(table, gathered[name]) for name, table in tables.items()}
    return {**params, **pinned}


def constrain_attend(make_attend: Callable, mesh: Mesh) -> Callable:
    """The same attention with queries, keys and values pinned to their shards.

    One pin per layer keeps the compiler from moving activations onto the axes of the (fsdp-sharded) weights instead.
    """
    pin = partial(jax.lax.with_sharding_constraint, shardings=attention_sharding(mesh))

    def make(batch: Batch):
        attend = make_attend(batch)
        return lambda q, k, v: pin(attend(pin(q), pin(k), pin(v)))

    return make


def loss_and_gradient(
    params: Params,
    batches: Batch,
    options: LossOptions,
    shardings: Params | None = None,
    frozen: Params | None = None,
):
    """`(loss, sums, gradient)` of a global batch `[A, B, …]`; micro-batches run one after the other.

    `shardings` pins the gradient to the shards of its parameters: without it XLA replicates it. `frozen`: parameters of
    the model that are not trained and have no gradient.
    """
    trained = jnp.maximum(batches.trained.sum(), 1).astype(jnp.float32)

    def one(batch: Batch):
        def loss_of(params):
            sums = options.sums(join(frozen, params), batch)
            return combine(sums, trained, options.ar_weight), sums

        (loss, sums), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
        if shardings is not None:
            gradient = jax.lax.with_sharding_constraint(gradient, shardings)
        return loss, sums, gradient

    if batches.tokens.shape[0] == 1:
        return one(jax.tree.map(lambda a: a[0], batches))

    def add(total, batch):
        return jax.tree.map(jnp.add, total, one(batch)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda a: a[0], batches))
    total, _ = jax.lax.scan(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), batches)
    return total


def train_step(
    state: TrainState, batches: Batch, options: LossOptions, optimizer, schedule, shardings: Params | None = None
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update. A step without trained tokens, or whose loss or gradient is not finite, leaves the weights alone."""
    loss, sums, gradient = loss_and_gradient(state.params, batches, options, shardings, state.frozen)
    norm = optax.tree.norm(gradient)
    rate = schedule(state.step)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    trained = batches.trained.sum()
    direction, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), state.params, direction)
    keep = partial(jax.tree.map, partial(jnp.where, finite & (trained > 0)))
    new = TrainState(state.step + 1, keep(params, state.params), keep(opt_state, state.opt_state), state.frozen)
    metrics = {**loss_metrics(sums, trained, options), "grad_norm": norm, "learning_rate": rate, "finite": finite}
    return new, metrics


def loss_metrics(sums: LossSums, trained: jax.Array, options: LossOptions) -> dict[str, jax.Array]:
    """Figures of a step or an evaluation, from sums over its batches."""
    count = jnp.maximum(trained, 1).astype(jnp.float32)
    return {
        "loss": combine(sums, count, options.ar_weight),
        "loss_ar": sums.ar / count,
        "loss_mask": sums.mask / count,
        "ar_share": sums.ar_weight / jnp.maximum(sums.total_weight, 1e-9),
        "correct_by_offset": sums.correct_by_offset,
        "entries_by_offset": sums.entries_by_offset,
        "trained_tokens": trained,
    }


def make_train_step(options: LossOptions, optimizer, schedule, mesh: Mesh, shardings: TrainState):
    """The compiled `(state, batches) -> (state, metrics)`; the old state's buffers are given up."""
    step = partial(train_step, options=options, optimizer=optimizer, schedule=schedule, shardings=shardings.params)
    return jax.jit(
        step,
        in_shardings=(shardings, rows_sharding(mesh, leading=1)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def make_eval_step(options: LossOptions, mesh: Mesh, shardings: TrainState):
    """The compiled `(all_params, batches) -> (LossSums, trained)` of a global batch, micro-batch by micro-batch."""

    def evaluate(params, batches):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, options.sums(params, batch)), None

        shapes = jax.eval_shape(options.sums, params, jax.tree.map(lambda a: a[0], batches))
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, nothing, batches)[0], batches.trained.sum()

    return jax.jit(
        evaluate, in_shardings=(shardings.all_params, rows_sharding(mesh, leading=1)), out_shardings=replicated(mesh)
    )
