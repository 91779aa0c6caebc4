"""Weights per offset and distillation from the clean stream, against plain causal forwards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.objective import build, chat, entries, pack, small_model, streams

from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention
from mars_jax.objective.losses import dense_attend, divergence, loss_sums
from mars_jax.objective.streams import Batch, stack

CFG, PARAMS = small_model()
STREAMS = streams(row_length=32)
ROW = build(pack(chat("pppaaaaaaa"), chat("ppaaaaapaaa", first_id=30)), STREAMS)
BATCH = jax.tree.map(jnp.asarray, stack([ROW]))


@functools.partial(jax.jit, static_argnames=("offset_weights", "distill", "chunk"))
def _sums(params, **options):
    return loss_sums(params, CFG, BATCH, num_offsets=5, **options)


def _log_softmax(logits) -> np.ndarray:
    logits = np.float64(logits)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def _entry_losses() -> list[tuple[float, float, float, int]]:
    """`(weight_mask, cross-entropy, divergence from the plain causal model, offset)` of each entry of the mask loss."""
    row: Batch = ROW
    mask = np.zeros((1, len(row.tokens), len(row.tokens)), bool)  # the visibility rule, once more in plain Python
    v = row.visibility
    for q in range(len(row.tokens)):
        for k in range(len(row.tokens)):
            public = v.group[k] == 0 and v.position[k] < v.limit[q]
            own = v.group[k] == v.group[q] != 0 and v.order[k] <= v.order[q]
            mask[0, q, k] = v.segment[q] == v.segment[k] != 0 and (public or own)

    def logits(tokens, positions, mask):
        def attend(q, k, v):
            return dense_attention(q, k, v, jnp.asarray(mask))

        hidden = decoder.forward(PARAMS, CFG, jnp.asarray(tokens)[None], jnp.asarray(positions)[None], attend)
        return _log_softmax(decoder.unembed(PARAMS, CFG, hidden)[0])

    both = logits(row.tokens, v.position, mask)
    plain = {}
    for segment in (1, 2):  # each chat alone, causal, no second stream
        at = np.flatnonzero((v.segment == segment) & (v.group == 0))
        causal = np.tril(np.ones((1, len(at), len(at)), bool))
        for position, values in enumerate(logits(row.tokens[at], np.arange(len(at)), causal)):
            plain[segment, position] = values
    found = []
    for source, target, _, weight_mask, offset in entries(row):
        teacher = plain[int(v.segment[source]), int(v.position[source])]
        gap = (np.exp(teacher) * (teacher - both[source])).sum()
        found.append((weight_mask, -both[source, target], gap, offset))
    return [entry for entry in found if entry[0]]


@pytest.mark.parametrize("distill", [0.3, 1.0])
def test_distillation_equals_the_divergence_from_a_plain_causal_forward(distill):
    expected = sum(
        weight * (loss if offset == 0 else (1 - distill) * loss + distill * gap)
        for weight, loss, gap, offset in _entry_losses()
    )
    got = _sums(PARAMS, distill=distill, chunk=8)
    np.testing.assert_allclose(got.mask, expected, rtol=1e-5)
    np.testing.assert_allclose(got.ar, _sums(PARAMS, chunk=8).ar, rtol=1e-6)


def test_offset_weights_scale_each_offset():
    factors = (0.5, 2.0)  # the last one holds for offset 3 too
    expected = sum(
        weight * loss * (1.0 if offset == 0 else factors[min(offset, 2) - 1])
        for weight, loss, _, offset in _entry_losses()
    )
    got = _sums(PARAMS, offset_weights=factors, chunk=8)
    np.testing.assert_allclose(got.mask, expected, rtol=1e-5)
    # Accuracies are counted, not weighted.
    np.testing.assert_array_equal(got.entries_by_offset, _sums(PARAMS, chunk=8).entries_by_offset)


def test_the_teacher_is_not_moved():
    """With nothing but distillation, the gradient is that of a fixed teacher: here, of the model's own values."""

    def logits(params):
        visibility = BATCH.visibility
        hidden = decoder.forward(params, CFG, BATCH.tokens, visibility.position, dense_attend(BATCH))
        return decoder.unembed(params, CFG, hidden)[0]

    def mask_loss(params, teacher_params):
        student, fixed = logits(params), logits(teacher_params)
        total = 0.0
        for source, target, _, weight, offset in entries(ROW):
            at = int(np.flatnonzero(_same_place(source))[0])
            log_student = jax.nn.log_softmax(student[source])
            loss = -log_student[target] if offset == 0 else divergence(fixed[at], student[source])
            total += weight * loss
        return total

    expected = jax.jit(jax.grad(mask_loss))(PARAMS, PARAMS)
    got = jax.jit(jax.grad(lambda params: _sums(params, distill=1.0, chunk=64).mask))(PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), got, expected)


def _same_place(source: int) -> np.ndarray:
    v = ROW.visibility
    return (v.group == 0) & (v.segment == v.segment[source]) & (v.position == v.position[source])


def test_divergence_of_equal_logits_is_zero():
    logits = jax.random.normal(jax.random.key(0), (3, 7))
    np.testing.assert_allclose(divergence(logits, logits + 2.0), np.zeros(3), atol=1e-6)
