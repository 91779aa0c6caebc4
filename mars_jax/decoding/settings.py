"""What a row is decoded with: traced arrays, so that no change of a setting compiles anything."""

from typing import NamedTuple

import jax

PROBABILITY, ENTROPY, MARGIN = range(3)
SCORES = ("probability", "entropy", "margin")


class Settings(NamedTuple):
    """Per-row settings.

    width:      int32 `[B]`, placeholders (or drafts) in use, at most the plan's.
    exact:      bool `[B]`, check candidates in the next forward (`verify`) instead of trusting their score.
    tau:        float32 `[B]`, acceptance threshold of the score.
    score:      int32 `[B]`, PROBABILITY, ENTROPY or MARGIN.
    gate_first: bool `[B]`, an unsure first token ends the run.
    limit:      int32 `[B]`, committed length (prompt and output) at which the row ends.
    stop:       int32 `[B, E]`, end tokens, padded with -1.
    """

    width: jax.Array
    exact: jax.Array
    tau: jax.Array
    score: jax.Array
    gate_first: jax.Array
    limit: jax.Array
    stop: jax.Array


class Vocabulary(NamedTuple):
    """Which ids mean what. emit: bool `[V]`, ids that may be emitted. mask_id: int32, the placeholder `[MASK]`."""

    emit: jax.Array
    mask_id: jax.Array
