"""What changes from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params, init_lora, init_parameters, join, parameter_shapes, split
from mars_jax.parallel.rules import state_shardings


class TrainState(NamedTuple):
    """step: `[]` int32, updates seen so far, skipped ones included. params: nested dict, what is trained.

    opt_state: optax state. frozen: the weights under low-rank updates; None where all parameters are trained.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    frozen: Params | None = None

    @property
    def all_params(self) -> Params:
        """The parameters of the whole model."""
        return join(self.frozen, self.params)


def state_shapes(cfg: ModelConfig, optimizer: optax.GradientTransformation, dtype=jnp.float32) -> TrainState:
    """`jax.ShapeDtypeStruct`s of the state."""
    frozen, params = split(parameter_shapes(cfg, dtype))
    return jax.eval_shape(lambda p: _fresh(p, optimizer), params)._replace(frozen=frozen)


def make_shardings(cfg: ModelConfig, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> TrainState:
    """Shardings of the state: moments like their parameters, counters replicated."""
    return state_shardings(state_shapes(cfg, optimizer), cfg, mesh)


def init_params(seed: int, cfg: ModelConfig, shardings: Params, dtype=jnp.float32) -> Params:
    """Random parameters, made directly in their shards."""
    make = jax.jit(lambda key: init_parameters(key, cfg, dtype), out_shardings=shardings)
    return make(jax.random.key(seed))


def add_lora(params: Params, seed: int, cfg: ModelConfig, shardings: Params, dtype=jnp.float32) -> Params:
    """Parameters of the model without `cfg.lora`, and fresh updates beside them."""
    make = jax.jit(lambda key: init_lora(key, cfg, dtype), out_shardings=split(shardings)[1])
    return join(params, make(jax.random.key(seed)))


def init_state(params: Params, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Step 0 from all parameters, whose buffers it takes over."""
    frozen, params = split(params)
    make = jax.jit(lambda p: _fresh(p, optimizer), out_shardings=shardings._replace(frozen=None), donate_argnums=0)
    return make(params)._replace(frozen=frozen)


def abstract_state(
    cfg: ModelConfig, optimizer, shardings: TrainState, dtype=jnp.float32, frozen_dtype=jnp.float32
) -> TrainState:
    """The state's shapes with shardings: for restoring a checkpoint and for compiling ahead of time."""

    def place(shape, sharding):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    frozen = split(parameter_shapes(cfg, frozen_dtype))[0]
    shapes = state_shapes(cfg, optimizer, dtype)._replace(frozen=frozen)
    return jax.tree.map(place, shapes, shardings)


def _fresh(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
