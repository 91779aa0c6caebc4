"""TPU slices to compile for on a machine that has none."""

import importlib.util
import os

from mars_jax.errors import UserError

# libtpu otherwise asks the cloud's metadata server who it is, and complains at length when nothing answers.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def keep_quiet() -> None:
    """Let neither libtpu nor jax look for a TPU on this machine; before any backend starts."""
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    import jax

    jax.config.update("jax_platforms", "cpu")  # arrays made while compiling live here


def topology_devices(name: str) -> list:
    """Descriptions of the chips of a slice such as `v5e:16x16`, to make a mesh of. Needs the `libtpu` package.

    Raises UserError where it is missing or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("compiling for TPU needs the libtpu package of the installed jax: pip install 'mars-jax[tpu]'")
    import jax
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"--topology {name}: {str(error).splitlines()[0]}; names look like v5e:4x4 or v5p:2x2x2"
        ) from error
