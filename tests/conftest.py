"""JAX settings of every test: eight fake CPU devices, no silent broadcasting, compiled programs cached between runs."""

import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for a hub is wrong
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Eight devices on few cores meet late where the machine is busy; by default XLA aborts the process after 40 s.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=900"

import jax
import pytest
from helpers.paths import REPOSITORY

import mars_jax  # noqa: F401  (sets compiler flags before the first backend starts)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Drop compiled programs before their mappings reach the kernel's limit (65,530 by default), where XLA aborts."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def debug_nans():
    """Fail at the operation that makes a NaN."""
    with jax.debug_nans(True):
        yield
