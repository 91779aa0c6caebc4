"""Logical axes of parameters -> mesh axes, and the shardings that follow from them."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params, is_spec, parameter_specs, split
from mars_jax.parallel.mesh import BATCH_AXES

RULES = {
    "embed": "fsdp",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "vocab": "tensor",
    "layer": None,
    None: None,
}


def check_divisible(cfg: ModelConfig, mesh: Mesh) -> None:
    """Refuse a mesh that would cut a head or leave a remainder. Raises UserError naming the numbers."""
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    sizes = {
        "attention heads": (cfg.num_heads, "tensor", tensor),
        "kv heads": (cfg.num_kv_heads, "tensor", tensor),
        "mlp columns": (cfg.intermediate_size, "tensor", tensor),
        "vocabulary rows": (cfg.vocab_size, "tensor", tensor),
        "hidden size": (cfg.hidden_size, "fsdp", fsdp),
    }
    wrong = [f"{n} {what} do not divide by mesh.{axis}={size}" for what, (n, axis, size) in sizes.items() if n % size]
    if wrong:
        raise UserError("; ".join(wrong) + ": choose divisors of these numbers")


def parameter_shardings(cfg: ModelConfig, mesh: Mesh) -> Params:
    """A `NamedSharding` for every parameter, in the tree of `parameter_specs`. The rank of an update is never cut."""
    check_divisible(cfg, mesh)

    def sharding(spec):
        return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in spec.axes)))

    return jax.tree.map(sharding, parameter_specs(cfg), is_leaf=is_spec)


def state_shardings(state_shapes, cfg: ModelConfig, mesh: Mesh):
    """Shardings of a training state: whatever mirrors parameters is sharded like them, the rest is replicated.

    `state_shapes`: a pytree that contains the trees of trained (Adam's moments too) and frozen parameters.
    """
    trees = [tree for tree in split(parameter_shardings(cfg, mesh)) if tree is not None]
    known = {jax.tree.structure(tree): tree for tree in trees}

    def mirrors_parameters(x):
        return jax.tree.structure(x) in known

    def sharding(x):
        return known.get(jax.tree.structure(x), NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(sharding, state_shapes, is_leaf=mirrors_parameters)


def attention_sharding(mesh: Mesh) -> NamedSharding:
    """Of queries, keys and values `[B, T, heads, E]`: rows over the batch axes, heads over `tensor`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, None, "tensor", None))


def vocabulary_shardings(mesh: Mesh) -> Params:
    """Of the embedding table and the head where they are used: cut over `tensor` only."""
    return {
        "embedding": {"table": NamedSharding(mesh, PartitionSpec("tensor", None))},
        "head": {"kernel": NamedSharding(mesh, PartitionSpec(None, "tensor"))},
    }
