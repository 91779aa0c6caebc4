"""Random packed rows of chats, and batches of both streams made from them."""

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.objective.streams import Batch, Row, StreamConfig, build_streams, empty_row, stack


def packed_row(rng: np.random.Generator, lengths: list[int], trained_share: float = 0.6, vocabulary: int = 64) -> Row:
    """Chats of the given lengths, one after the other; the last `trained_share` of each is its answer."""
    spans = []
    start = 0
    for length in lengths:
        prompt = max(1, round(length * (1 - trained_share)))
        spans.append((start + prompt, start + length))
        start += length
    return Row(
        tokens=rng.integers(4, vocabulary, start).astype(np.int32),
        segment=np.repeat(np.arange(1, len(lengths) + 1), lengths).astype(np.int32),
        position=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        spans=np.array(spans, np.int32).reshape(-1, 2),
    )


def stream_config(row_length: int, noisy_length: int, recipe: str = "mars", **changes) -> StreamConfig:
    numbers = dict(block_size=4, masks_per_block=3, anchor="response", mask_id=3)
    return StreamConfig(recipe, row_length=row_length, noisy_length=noisy_length, **{**numbers, **changes})


def packed_batch(cfg: StreamConfig, rows: list[list[int]], seed: int = 0) -> Batch:
    """One batch row for each list of chat lengths; an empty list is a row of padding."""
    rng = np.random.default_rng(seed)
    built = [build_streams(packed_row(rng, lengths), cfg, rng) if lengths else empty_row(cfg) for lengths in rows]
    return jax.tree.map(jnp.asarray, stack(built))
