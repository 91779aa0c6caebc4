"""Joining the other processes of a run, before anything touches a device.

A launcher starts N processes of the same command and tells each of them by environment variables:

    JAX_COORDINATOR_ADDRESS   host:port of process 0, e.g. 127.0.0.1:9876
    MARS_NUM_PROCESSES        N
    MARS_PROCESS_ID           0 … N-1

On CPU, `JAX_NUM_CPU_DEVICES` sets how many devices each process brings. Clusters that jax knows (Cloud TPU, GKE, SLURM)
need no variables: there `mesh.distributed=true` is enough.
"""

import os

import jax

from mars_jax.errors import UserError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "MARS_NUM_PROCESSES", "MARS_PROCESS_ID")


def join(distributed: bool | None) -> None:
    """Join the run named by the environment; `None`: only if it names one. Raises UserError for half a description."""
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if distributed is False or (distributed is None and not given):
        return
    if not given:
        jax.distributed.initialize()
        return
    missing = [name for name in VARIABLES if name not in given]
    numbers = [given.get(name, "") for name in VARIABLES[1:]]
    if missing or not all(number.isdigit() for number in numbers):
        raise UserError(f"a run of several processes needs {', '.join(VARIABLES)}; found {given}")
    jax.distributed.initialize(given["JAX_COORDINATOR_ADDRESS"], int(numbers[0]), int(numbers[1]))
