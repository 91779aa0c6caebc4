"""Where devices lie in the mesh, and which rows of a batch each process must bring."""

import importlib.util
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.commands import ROOT
from jax.sharding import Mesh

from mars_jax.errors import UserError
from mars_jax.parallel.mesh import AXES, device_grid, make_mesh, row_parts, row_shards, rows_to_device


@dataclass(frozen=True)
class Gpu:
    """What the grid asks a device: four GPUs a node, one process each."""

    id: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA"

    @property
    def slice_index(self) -> int:
        return self.id // 4

    @property
    def process_index(self) -> int:
        return self.id


def ids(grid: np.ndarray) -> list:
    return np.vectorize(lambda device: device.id, otypes=[int])(grid).tolist()


def held(grid: np.ndarray, process: int) -> tuple[tuple[int, ...], int]:
    data, fsdp, tensor = grid.shape
    mesh = SimpleNamespace(devices=grid, shape={"data": data, "fsdp": fsdp, "tensor": tensor})
    return row_parts(mesh, process)


def test_minus_one_takes_the_devices_that_are_left():
    mesh = make_mesh(data=-1, fsdp=2, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert row_shards(mesh) == 4
    assert ids(mesh.devices) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((-1, -1, 1), "only one may be -1"),
        ((0, 1, 1), "must be positive"),
        ((-2, 1, 1), "must be positive"),
        ((1, 3, 1), "mesh.fsdp=3, mesh.tensor=1 does not fit the 8 devices"),
        ((-1, 3, 1), "does not fit the 8 devices"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(sizes, named):
    with pytest.raises(UserError, match=named):
        make_mesh(*sizes)


def test_data_lies_across_nodes_and_the_other_axes_within():
    grid = device_grid(2, 2, 2, [Gpu(i) for i in (5, 1, 2, 3, 4, 0, 6, 7)])
    assert ids(grid) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_fsdp_reaches_across_nodes_where_data_does_not():
    nodes = [Gpu(i) for i in range(8)]
    assert ids(device_grid(1, 4, 2, nodes)) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    four = [Gpu(i) for i in range(16)]  # two of the four nodes along each axis
    assert ids(device_grid(2, 8, 1, four))[1] == [[8], [9], [10], [11], [12], [13], [14], [15]]


def test_tensor_never_lies_across_nodes():
    with pytest.raises(UserError, match=r"over 2 slices or nodes: take mesh\.data=2"):
        device_grid(1, 1, 8, [Gpu(i) for i in range(8)])


def test_processes_bring_the_rows_that_their_devices_hold():
    grid = device_grid(1, 4, 2, [Gpu(i) for i in range(8)])
    # Row shard 1 is devices 2 and 3: both processes bring it.
    assert held(grid, 2) == held(grid, 3) == ((1,), 4)
    assert held(device_grid(8, 1, 1, [Gpu(i) for i in range(8)]), 5) == ((5,), 8)


def test_rows_reach_their_place_whatever_the_order_of_devices():
    order = np.array(jax.devices())[[3, 0, 6, 1, 7, 2, 5, 4]].reshape(2, 2, 2)
    mesh = Mesh(order, AXES)
    rows = np.arange(3 * 8 * 5).reshape(3, 8, 5)
    placed = rows_to_device(mesh, rows)
    np.testing.assert_array_equal(placed, rows)
    for shard in placed.addressable_shards:
        (row, *_), *_ = np.argwhere(np.vectorize(lambda d: d.id, otypes=[int])(order.reshape(4, 2)) == shard.device.id)
        np.testing.assert_array_equal(shard.data, rows[:, 2 * row : 2 * row + 2])


TWO_PROCESSES = """
import sys
import jax
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from mars_jax.parallel.mesh import AXES, row_parts, rows_to_device

mesh = Mesh(np.array(jax.devices())[[0, 2, 3, 1]].reshape(1, 4, 1), AXES)
parts, count = row_parts(mesh)
assert (parts, count) == (((0, 3), (1, 2))[jax.process_index()], 4)
rows = np.arange(2 * 8 * 3).reshape(2, 8, 3)
mine = rows.reshape(2, count, 2, 3)[:, list(parts)].reshape(2, 4, 3)
whole = multihost_utils.process_allgather(rows_to_device(mesh, mine), tiled=True)
np.testing.assert_array_equal(whole, rows)
"""


def test_two_processes_whose_rows_are_no_neighbours():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
    words = [[sys.executable, "-c", TWO_PROCESSES, port, str(i)] for i in range(2)]
    running = [subprocess.Popen(w, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) for w in words]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


SLICES = """
from mars_jax.parallel import topology
topology.keep_quiet()
from mars_jax.parallel.mesh import make_mesh, row_parts
for name, fsdp, tensor in (("v5e:4x4", 16, 1), ("v6e:8x8", 16, 4), ("v5e:16x16", 64, 4), ("v5p:2x2x4", 16, 1)):
    devices = topology.topology_devices(name)
    mesh = make_mesh(1, fsdp, tensor, devices)
    processes = {d.process_index for d in devices}
    held = [row_parts(mesh, process)[0] for process in processes]
    assert sorted({part for parts in held for part in parts}) == list(range(fsdp)), held
    per_process = len(devices) // len(processes)
    assert all(1 <= len(parts) <= per_process for parts in held), held
    print(name, held[0])

from jax.experimental import topologies
two = list(topologies.get_topology_desc("v5e:4x4", platform="tpu", num_slices=2).devices)
mesh = make_mesh(2, 4, 4, two)
assert [{d.slice_index for d in half.flat} for half in mesh.devices] == [{0}, {1}]
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the optional package libtpu is absent: pip install 'mars-jax[tpu]' to see real slices",
)
@pytest.mark.slow
def test_every_row_of_a_real_slice_has_a_host():
    done = subprocess.run([sys.executable, "-c", SLICES], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "v5e:4x4 (0, 1, 6, 15)" in done.stdout  # a host's four chips are a square, the axis runs along a ring
