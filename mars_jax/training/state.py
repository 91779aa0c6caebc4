"""What changes from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params, init_parameters
from mars_jax.parallel.rules import state_shardings


class TrainState(NamedTuple):
    """step: `[]` int32, updates seen so far, skipped ones included. params: nested dict. opt_state: optax state."""

    step: jax.Array
    params: Params
    opt_state: Any


def state_shapes(cfg: ModelConfig, optimizer: optax.GradientTransformation, dtype=jnp.float32) -> TrainState:
    """`jax.ShapeDtypeStruct`s of the state."""
    return jax.eval_shape(lambda: _fresh(init_parameters(jax.random.key(0), cfg, dtype), optimizer))


def make_shardings(cfg: ModelConfig, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> TrainState:
    """Shardings of the state: moments like their parameters, counters replicated."""
    return state_shardings(state_shapes(cfg, optimizer), cfg, mesh)


def init_params(seed: int, cfg: ModelConfig, shardings: Params, dtype=jnp.float32) -> Params:
    """Random parameters, made directly in their shards."""
    make = jax.jit(lambda key: init_parameters(key, cfg, dtype), out_shardings=shardings)
    return make(jax.random.key(seed))


def init_state(params: Params, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Step 0 from given parameters, whose buffers it takes over."""
    return jax.jit(lambda p: _fresh(p, optimizer), out_shardings=shardings, donate_argnums=0)(params)


def abstract_state(cfg: ModelConfig, optimizer, shardings: TrainState, dtype=jnp.float32) -> TrainState:
    """The state's shapes with shardings: for restoring a checkpoint and for compiling ahead of time."""

    def place(shape, sharding):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(place, state_shapes(cfg, optimizer, dtype), shardings)


def _fresh(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
