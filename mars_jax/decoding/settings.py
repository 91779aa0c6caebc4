"""What a row is decoded with: traced arrays, so that no change of a setting compiles anything."""

from typing import NamedTuple

import jax

PROBABILITY, ENTROPY, MARGIN = range(3)
SCORES = ("probability", "entropy", "margin")
SOURCES = ("masks", "lookup", "jacobi")  # of drafts, see `decoding.drafts`


class Sampling(NamedTuple):
    """How a row draws tokens; each `[B]`.

    temperature: float32; 0 takes the likeliest token.
    top_k:       int32, keep the k likeliest; 0 keeps all.
    top_p:       float32, keep the likeliest tokens that together reach this mass; 1 keeps all.
    min_p:       float32, keep tokens at least this fraction as likely as the likeliest.
    seed:        uint32.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


class Adjustment(NamedTuple):
    """Changes of the logits themselves, before anything is chosen or scored.

    repetition:  float32 `[B]`, divides positive and multiplies negative logits of tokens in prompt or output.
    presence:    float32 `[B]`, subtracted from logits of tokens in the output.
    frequency:   float32 `[B]`, subtracted once for each time a token is in the output.
    bias_ids:    int32 `[B, X]`, ids whose logits get `bias`; padded with -1.
    bias:        float32 `[B, X]`.
    min_length:  int32 `[B]`, committed length before which no end token may be emitted.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    min_length: jax.Array


class Settings(NamedTuple):
    """Per-row settings.

    width:      int32 `[B]`, placeholders (or drafts) in use, at most the plan's.
    exact:      bool `[B]`, check candidates in the next forward (`verify`) instead of trusting their score.
    source:     int32 `[B]`, where the row's drafts come from, by its place in SOURCES.
    beside:     bool `[B]`, check drafts of lookup beside those.
    tau:        float32 `[B]`, acceptance threshold of the score.
    score:      int32 `[B]`, PROBABILITY, ENTROPY or MARGIN.
    gate_first: bool `[B]`, an unsure first token ends the run.
    limit:      int32 `[B]`, committed length (prompt and output) at which the row ends.
    stop:       int32 `[B, E]`, end tokens, padded with -1.
    """

    width: jax.Array
    exact: jax.Array
    source: jax.Array
    beside: jax.Array
    tau: jax.Array
    score: jax.Array
    gate_first: jax.Array
    limit: jax.Array
    stop: jax.Array
    sampling: Sampling
    adjustment: Adjustment


class Vocabulary(NamedTuple):
    """Which ids mean what. emit: bool `[V]`, ids that may be emitted. mask_id: int32, the placeholder `[MASK]`."""

    emit: jax.Array
    mask_id: jax.Array
