"""Rows, batches and small models for the tests of the objective."""

import jax
import numpy as np

from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import init_parameters
from mars_jax.objective.streams import Batch, Row, StreamConfig, build_streams, noisy_capacity

MASK_ID = 3


def streams(
    block_size=4, masks_per_block=None, anchor="response", recipe="mars", row_length=64, **others
) -> StreamConfig:
    """A `StreamConfig` with room for every placeholder. `masks_per_block` defaults to `within`."""
    masks = block_size - 1 if masks_per_block is None else masks_per_block
    others.setdefault("noisy_length", noisy_capacity(recipe, row_length, block_size, masks, anchor))
    return StreamConfig(recipe, block_size, masks, anchor, row_length, mask_id=MASK_ID, **others)


def pack(*chats: tuple[list[int], list[tuple[int, int]]]) -> Row:
    """One row of chats, each given as its token ids and its trained spans."""
    tokens, segments, positions, spans = [], [], [], []
    for number, (ids, chat_spans) in enumerate(chats, 1):
        spans += [(len(tokens) + start, len(tokens) + stop) for start, stop in chat_spans]
        tokens += ids
        segments += [number] * len(ids)
        positions += range(len(ids))
    return Row(*(np.asarray(column, np.int32) for column in (tokens, segments, positions)), np.asarray(spans, np.int32))


def chat(pattern: str, first_id: int = 10) -> tuple[list[int], list[tuple[int, int]]]:
    """A chat such as `"ppaaapaa"`: `p` is context, a run of `a` a trained span. Ids count up from `first_id`."""
    starts = [i for i, c in enumerate(pattern) if c == "a" and pattern[i - 1] != "a"]
    stops = [i + 1 for i, c in enumerate(pattern) if c == "a" and pattern[i + 1 : i + 2] != "a"]
    return list(range(first_id, first_id + len(pattern))), list(zip(starts, stops, strict=True))


def build(row: Row, cfg: StreamConfig, seed: int = 0) -> Batch:
    return build_streams(row, cfg, np.random.default_rng(seed))


def entries(batch: Batch) -> list[tuple]:
    """The used loss entries of an unstacked batch row: `(source, target, weight_ar, weight_mask, offset)`."""
    columns = (batch.source, batch.target, batch.weight_ar, batch.weight_mask, batch.offset)
    return [entry for entry in zip(*(c.tolist() for c in columns), strict=True) if entry[2] or entry[3]]


def small_model(vocab_size=64, num_layers=2, hidden_size=16, seed=0, std=0.2) -> tuple[ModelConfig, dict]:
    """An untrained model with weights large enough for its outputs to depend on every visible token."""
    cfg = ModelConfig("qwen3", vocab_size, hidden_size, 32, num_layers, 4, 2, 4, qkv_bias=True, qk_norm=True)
    return cfg, init_parameters(jax.random.key(seed), cfg, std=std)
