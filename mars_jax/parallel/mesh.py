"""The device mesh and the share of the batch that each process feeds."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mars_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # rows are spread over both: fsdp is data parallelism whose weights are sharded too


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over `data`, `fsdp` and `tensor`; one of them may be -1 to take the devices that are left."""
    devices = jax.devices() if devices is None else devices
    sizes = dict(zip(AXES, (data, fsdp, tensor), strict=True))
    asked = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    if len(free) > 1 or known < 1:
        raise UserError(f"{asked}: sizes must be positive, and only one may be -1")
    if free:
        sizes[free[0]] = len(devices) // known
    if int(np.prod(list(sizes.values()))) != len(devices):
        raise UserError(
            f"{asked} does not fit the {len(devices)} devices of this run: the product must be their number"
        )
    # Auto axes: the compiler propagates shardings from what `rules` says of parameters and batches.
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def rows_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Sharding of arrays whose axis `leading` counts batch rows."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh) -> int:
    """Parts that the rows of a micro-batch are cut into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def process_share(mesh: Mesh) -> tuple[int, int]:
    """`(index, count)`: this process feeds part `index` of `count` equal parts of every batch.

    Processes that hold the same rows (a `tensor` axis across processes) share an index.
    """
    shards = mesh.devices.reshape(row_shards(mesh), mesh.shape["tensor"])
    mine = [i for i, row in enumerate(shards) if any(d.process_index == jax.process_index() for d in row)]
    if mine != list(range(mine[0], mine[0] + len(mine))) or len(shards) % len(mine) or mine[0] % len(mine):
        raise UserError(f"process {jax.process_index()} holds row shards {mine} of {len(shards)}: not one equal part")
    return mine[0] // len(mine), len(shards) // len(mine)
