"""The device mesh and the parts of the batch that each process feeds."""

import math

import jax
import numpy as np
from jax.experimental import mesh_utils
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
    return Mesh(device_grid(*sizes.values(), devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_grid(data: int, fsdp: int, tensor: int, devices) -> np.ndarray:
    """Devices `[data, fsdp, tensor]`, neighbours along the last axes near each other in the network.

    Between TPU slices, and between nodes with GPUs, the network is slow: `data` lies across them as far as it reaches,
    then `fsdp`, never `tensor`. An axis may take part of a side of a slice's torus (`jax.make_mesh` refuses both).
    """
    slices = 1 if devices[0].platform == "cpu" else len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh((data, fsdp, tensor), devices, allow_split_physical_axes=True)
    data_across = math.gcd(data, slices)
    fsdp_across = slices // data_across
    if fsdp % fsdp_across:
        raise UserError(
            f"mesh.data={data} x mesh.fsdp={fsdp} cannot be spread evenly over {slices} slices or nodes: "
            f"take mesh.data={slices}"
        )
    within = (data // data_across, fsdp // fsdp_across, tensor)
    across = (data_across, fsdp_across, 1)
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


def rows_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Sharding of arrays whose axis `leading` counts batch rows."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh) -> int:
    """Parts that the rows of a micro-batch are cut into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def row_parts(mesh: Mesh, process: int | None = None) -> tuple[tuple[int, ...], int]:
    """`(parts, count)`: of `count` equal parts of every micro-batch, those whose rows this process's devices hold.

    They need not be neighbours: a host's chips are a square of the slice, and the axes run along its rings. Processes
    that hold the same rows (`tensor` across processes) name the same parts.
    """
    process = jax.process_index() if process is None else process
    count = row_shards(mesh)
    holders = mesh.devices.reshape(count, mesh.shape["tensor"])
    return tuple(i for i, row in enumerate(holders) if any(d.process_index == process for d in row)), count


def rows_to_device(mesh: Mesh, batch):
    """A pytree of this process's `row_parts` `[A, rows, …]` as global arrays `[A, all rows, …]`."""
    sharding = rows_sharding(mesh, leading=1)
    parts, count = row_parts(mesh)

    def place(leaf):
        size = leaf.shape[1] // len(parts)

        def part(index):  # the slices of the global array that one device holds
            at = parts.index((index[1].start or 0) // size) * size
            return leaf[:, at : at + size]

        return jax.make_array_from_callback((leaf.shape[0], size * count, *leaf.shape[2:]), sharding, part)

    return jax.tree.map(place, batch)
