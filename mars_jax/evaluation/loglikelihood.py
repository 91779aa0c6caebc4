"""Log-likelihoods of continuations: plain causal forwards, whatever the decode mode under evaluation.

Axes: B batch row, T tokens, M scored tokens, C scored tokens of a chunk, D model, V vocabulary.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params
from mars_jax.objective.visibility import public, visible

CHUNK = 16  # scored tokens of a row that are projected to the vocabulary at a time


class Score(NamedTuple):
    """Sum of the natural log-probabilities of a continuation, and whether each of its tokens is the most likely one."""

    loglikelihood: float
    is_greedy: bool


def score_continuations(
    params: Params,
    cfg: ModelConfig,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int,
    max_length: int,
    dtype=jnp.float32,
) -> Iterator[tuple[int, Score]]:
    """Yields `(index of the pair, Score)` for every `(context, continuation)` of token ids, longest pairs first.

    Both parts hold at least one token. Probabilities are over all vocabulary rows, as Hugging Face's are. Of a pair
    longer than `max_length + 1` tokens (the last one is only predicted) the left end is dropped.
    """
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        arrays = _batch([pairs[i] for i in rows], batch_size, max_length)
        sums, greedy = _score_batch(params, cfg, *map(jnp.asarray, arrays), dtype=dtype)
        for i, total, exact in zip(rows, np.asarray(sums).tolist(), np.asarray(greedy).tolist(), strict=False):
            yield i, Score(total, exact)


def bucket(length: int, least: int) -> int:
    """The smallest of `least` · 1, 1.5, 2, 3, 4, 6, 8 … that holds `length`: few shapes to compile, little padding."""
    size = least
    while size < length:
        size *= 2
    return size * 3 // 4 if size > least and length <= size * 3 // 4 else size


def _batch(pairs, batch_size: int, max_length: int):
    """`tokens_BT, lengths_B, sources_BM, targets_BM, used_BM`; rows beyond the pairs are padding."""
    whole = [[*context, *continuation][-(max_length + 1) :] for context, continuation in pairs]
    counts = [min(len(continuation), len(ids) - 1) for (_, continuation), ids in zip(pairs, whole, strict=True)]
    tokens = np.zeros((batch_size, bucket(max(map(len, whole)) - 1, 64)), np.int32)
    lengths = np.zeros((batch_size,), np.int32)
    sources, targets = np.zeros((2, batch_size, bucket(max(counts), 2 * CHUNK)), np.int32)
    used = np.zeros(sources.shape, bool)
    for row, (ids, count) in enumerate(zip(whole, counts, strict=True)):
        lengths[row] = len(ids) - 1
        tokens[row, : lengths[row]] = ids[:-1]
        sources[row, :count] = np.arange(lengths[row] - count, lengths[row])
        targets[row, :count] = ids[len(ids) - count :]
        used[row, :count] = True
    return tokens, lengths, sources, targets, used


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def _score_batch(params, cfg, tokens_BT, lengths_B, sources_BM, targets_BM, used_BM, *, dtype):
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
    seen_by = public((positions_BT < lengths_B[:, None]).astype(jnp.int32), positions_BT)
    mask_BTT = visible(seen_by, seen_by)
    hidden_BTD = decoder.forward(
        params, cfg, tokens_BT, positions_BT, lambda q, k, v: dense_attention(q, k, v, mask_BTT), dtype=dtype
    )

    def one_chunk(chunk):
        sources_BC, targets_BC = chunk
        hidden_BCD = jnp.take_along_axis(hidden_BTD, sources_BC[..., None], axis=1)
        logits_BCV = decoder.unembed(params, cfg, hidden_BCD)
        chosen_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        return chosen_BC - jax.nn.logsumexp(logits_BCV, axis=-1), jnp.argmax(logits_BCV, axis=-1) == targets_BC

    def chunked(a_BM):  # [M / C, B, C]; M is a bucket, so it divides
        return a_BM.reshape(a_BM.shape[0], -1, CHUNK).swapaxes(0, 1)

    def whole(a):
        return a.swapaxes(0, 1).reshape(sources_BM.shape)

    logprobs, hits = jax.lax.map(one_chunk, (chunked(sources_BM), chunked(targets_BM)))
    return jnp.where(used_BM, whole(logprobs), 0.0).sum(-1), jnp.all(whole(hits) | ~used_BM, axis=-1)
