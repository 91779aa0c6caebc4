"""Compiler flags without which JAX's CPU backend computes wrong numbers."""

import os
from importlib.metadata import PackageNotFoundError, version


def avoid_miscompiled_reductions() -> None:
    """Keep XLA's CPU compiler from handing reductions to YNNPACK, where jaxlib before 0.12 has them wrong or crashing.

    Seen on jaxlib 0.10.2: gradients of a scanned layer mixed up rows of a large batch, silently. The flag has no effect
    on other backends. XLA reads `XLA_FLAGS` once, when the first backend starts, so this must run before.
    """
    try:
        release = version("jaxlib")
    except PackageNotFoundError:  # parts of the package that need no JAX serve interpreters without it
        return
    flags = os.environ.get("XLA_FLAGS", "")
    affected = tuple(int(part) for part in release.split(".")[:2]) < (0, 12)
    if affected and "ynn_fusion_type" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_experimental_ynn_fusion_type=-reduce".strip()
