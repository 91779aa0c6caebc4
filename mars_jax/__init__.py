"""MARS in JAX: one ordinary language model that decodes several tokens per forward."""

import importlib

from mars_jax import xla_flags

xla_flags.avoid_miscompiled_reductions()

_LAZY = {"generate": "mars_jax.generate", "load": "mars_jax.models.loading"}


def __getattr__(name: str):
    # Imported on first use, so that `import mars_jax` and every `--help` are instant.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
