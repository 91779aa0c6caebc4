"""The loss against golden numbers, against plain forwards, and its invariance to how a batch is cut."""

import json
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tiny
from helpers.objective import MASK_ID, build, chat, entries, pack, small_model, streams
from helpers.paths import GOLDEN

from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention
from mars_jax.objective.losses import combine, dense_attend, entry_sums, loss_sums
from mars_jax.objective.streams import empty_row, stack
from mars_jax.objective.visibility import public, visible


def causal_hidden(params, cfg, ids, dtype=jnp.float32):
    """Final hidden states `[n, D]` of one plain causal forward."""
    tokens = jnp.asarray(ids, jnp.int32)[None]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    key = public(jnp.ones_like(positions), positions)

    def attend(q, k, v):
        return dense_attention(q, k, v, visible(key, key))

    return decoder.forward(params, cfg, tokens, positions, attend, dtype=dtype)[0]


@pytest.mark.parametrize("masks", ["within", "shifted"])
@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_losses_equal_the_golden_ones(block_size, masks):
    """Golden sums come from plain causal forwards only; packing all chats into two rows must not change them."""
    cases = json.loads((GOLDEN / "loss.json").read_text())
    masks_per_block = block_size if masks == "shifted" else block_size - 1
    cfg = streams(block_size, masks_per_block, row_length=max(len(c["ids"]) for c in cases))
    rows = [pack((c["ids"], [tuple(s) for s in c["spans"]])) for c in cases]
    batch = jax.tree.map(lambda x: x[:, None], stack([build(row, cfg) for row in rows]))
    params = tiny.params()
    sums = jax.lax.map(lambda row: loss_sums(params, tiny.CONFIG, row, num_offsets=17), batch)
    expected = [c["blocks"][str(block_size)] for c in cases]
    np.testing.assert_allclose(sums.ar, [c["ar"] for c in cases], rtol=1e-4)
    np.testing.assert_allclose(sums.mask, [e[f"mask_{masks}"] for e in expected], rtol=1e-4)
    assert batch.trained[:, 0].tolist() == [c["trained"] for c in cases]
    if masks == "shifted":
        targets = (batch.weight_mask[:, 0] > 0).sum(-1)
        assert targets.tolist() == [e["targets_shifted"] for e in expected]


def test_packed_chats_have_the_golden_sum():
    cases = json.loads((GOLDEN / "loss.json").read_text())
    row = pack(*((c["ids"], [tuple(s) for s in c["spans"]]) for c in cases))
    batch = stack([build(row, streams(4, row_length=len(row.tokens) + 5))])
    params = tiny.params()
    sums = loss_sums(params, tiny.CONFIG, batch, num_offsets=5)
    np.testing.assert_allclose(sums.ar, sum(c["ar"] for c in cases), rtol=1e-4)
    np.testing.assert_allclose(sums.mask, sum(c["blocks"]["4"]["mask_within"] for c in cases), rtol=1e-4)


@pytest.mark.parametrize("alignment", ["within", "shifted"])
@pytest.mark.parametrize("anchor", ["response", "sequence"])
def test_hidden_states_equal_a_plain_forward_over_prefix_and_placeholders(anchor, alignment):
    """A noisy hidden state is what a plain causal forward gives over the clean prefix and then the block's tokens."""
    cfg, params = small_model()
    block_size = 3
    stream_cfg = streams(block_size, block_size - (alignment == "within"), anchor, row_length=16)
    row = pack(chat("ppaaaapaaaaa"))
    batch = build(row, stream_cfg)
    stacked = stack([batch])
    hidden = decoder.forward(params, cfg, stacked.tokens, stacked.visibility.position, dense_attend(stacked))[0]
    noisy = np.flatnonzero(batch.visibility.group)
    assert len(noisy) > 4
    for i in noisy:
        mates = [j for j in noisy if batch.visibility.group[j] == batch.visibility.group[i] and j <= i]
        ids = [*row.tokens[: batch.visibility.position[mates[0]]], *batch.tokens[mates]]
        np.testing.assert_allclose(hidden[i], causal_hidden(params, cfg, ids)[-1], atol=2e-5)


def test_block_diffusion_hidden_states_equal_a_forward_with_an_open_block():
    cfg, params = small_model()
    row = pack(chat("ppaaaaaaa"))
    batch = build(row, streams(4, recipe="block_diffusion", row_length=12), seed=1)
    stacked = stack([batch])
    hidden = decoder.forward(params, cfg, stacked.tokens, stacked.visibility.position, dense_attend(stacked))[0]
    for start, stop in [(2, 6), (6, 9)]:
        noisy = slice(12 + start - 2, 12 + stop - 2)
        ids = jnp.asarray([*row.tokens[:start], *batch.tokens[noisy]], jnp.int32)[None]
        mask = np.tri(stop, dtype=bool)
        mask[start:, start:] = True

        def attend(q, k, v, mask=mask):
            return dense_attention(q, k, v, jnp.asarray(mask)[None])

        expected = decoder.forward(params, cfg, ids, jnp.arange(stop, dtype=jnp.int32)[None], attend)[0, start:]
        np.testing.assert_allclose(hidden[noisy], expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_clean_stream_is_a_plain_causal_forward_bit_for_bit(dtype):
    """The same shapes without a noisy stream give the same bits, whatever stands in the noisy stream."""
    cfg, params = small_model()
    batch = stack([build(pack(chat("ppaaaapaaaaa")), streams(4, row_length=16))])
    noisy = np.arange(batch.tokens.shape[1]) >= 16
    plain = batch._replace(
        tokens=np.where(noisy, 0, batch.tokens),
        visibility=jax.tree.map(lambda x: np.where(noisy, 0, x), batch.visibility),
    )
    other = batch._replace(tokens=np.where(noisy, 25, batch.tokens))

    @jax.jit
    def clean(batch):
        hidden = decoder.forward(params, cfg, batch.tokens, batch.visibility.position, dense_attend(batch), dtype=dtype)
        return decoder.unembed(params, cfg, hidden[:, :12])

    np.testing.assert_array_equal(clean(batch), clean(plain))
    np.testing.assert_array_equal(clean(batch), clean(other))
    assert np.abs(np.asarray(clean(batch))).max() > 0.1


def influence(batch, num_layers) -> np.ndarray:
    """`[T, T]` bool: does hidden state i (row) depend on the embedding of token j (column)? By the Jacobian."""
    length = batch.tokens.shape[1]
    cfg, params = small_model(vocab_size=length, num_layers=num_layers)
    tokens = np.arange(length, dtype=np.int32)[None]  # its own embedding for every token of both streams

    def hidden(table):
        changed = {**params, "embedding": {"table": table}}
        return decoder.forward(changed, cfg, tokens, batch.visibility.position, dense_attend(batch))[0]

    jacobian = jax.jacrev(hidden)(params["embedding"]["table"])
    return np.asarray(jnp.abs(jacobian).max((1, 3)) > 0)


@pytest.mark.parametrize("anchor", ["response", "sequence"])
@pytest.mark.parametrize("alignment", ["within", "shifted"])
def test_no_prediction_depends_on_its_target_or_what_follows(anchor, alignment):
    block_size = 3
    cfg = streams(block_size, block_size - (alignment == "within"), anchor, row_length=12)
    row = pack(chat("ppaaaa"), chat("paaaa", 30))
    batch = build(row, cfg)
    depends = influence(stack([batch]), num_layers=2)
    mask = np.asarray(visible(batch.visibility, batch.visibility)) | np.eye(len(depends), dtype=bool)
    reachable = mask.astype(int) @ mask.astype(int) > 0
    np.testing.assert_array_equal(depends, reachable)  # through two layers: exactly what two steps of the mask reach

    position_of = dict(zip(row.tokens.tolist(), range(len(row.tokens)), strict=True))  # ids are unique
    checked = 0
    for source, target, *_ in entries(batch):
        t = position_of[target]
        same_chat = batch.visibility.segment == row.segment[t]
        later = same_chat & (batch.visibility.position >= row.position[t])
        assert not depends[source, later].any()
        assert not depends[source, ~same_chat].any()
        checked += 1
    assert checked > 10


@partial(jax.jit, static_argnames=("cfg", "dtype", "remat"))
def loss_and_gradient(params, batch, trained, *, cfg, dtype=jnp.float32, remat=False):
    """`((loss, sums), gradient)`; `trained` is the global count."""

    def loss(params):
        sums = loss_sums(params, cfg, batch, num_offsets=5, chunk=64, dtype=dtype, remat=remat)
        return combine(sums, trained, 1.0), sums

    return jax.value_and_grad(loss, has_aux=True)(params)


def chats():
    """Eight chats with 2 … 100 trained tokens of random ids."""
    rng = np.random.default_rng(0)
    for length in (2, 5, 11, 3, 23, 40, 7, 100):
        ids, spans = chat("ppp" + "a" * length + ("ppaaa" if length % 2 else ""))
        yield rng.integers(4, 64, len(ids)).tolist(), spans


@pytest.mark.parametrize("recipe", ["mars", "mars_mask_only"])
def test_loss_and_gradient_do_not_depend_on_the_cut(recipe):
    """Eight rows at once, one at a time, two at a time, and packed into two rows: one loss, one gradient."""
    cfg, params = small_model()
    all_chats = list(chats())
    trained = jnp.float32(sum(stop - start for _, spans in all_chats for start, stop in spans))
    stream_cfg = streams(4, recipe=recipe, row_length=160)

    def total(micro_batches):
        results = [loss_and_gradient(params, stack(rows), trained, cfg=cfg) for rows in micro_batches]
        return jax.tree.map(lambda *leaves: sum(leaves), *results)

    rows = [build(pack(chat), stream_cfg) for chat in all_chats]
    reference = total([rows])
    cuts = {
        "8x1": [[row] for row in rows],
        "4x2": [rows[i : i + 2] for i in range(0, 8, 2)],
        "packed into two rows": [[build(pack(*group), stream_cfg)] for group in (all_chats[:7], all_chats[7:])],
    }
    for name, micro_batches in cuts.items():
        chex.assert_trees_all_close(total(micro_batches), reference, rtol=1e-5, atol=1e-6, custom_message=name)


def test_loss_and_gradient_do_not_depend_on_padding():
    cfg, params = small_model()
    ids, spans = chat("pppp" + "a" * 16)
    run = partial(loss_and_gradient, params, trained=jnp.float32(16), cfg=cfg)
    batch = stack([build(pack((ids, spans)), streams(4, row_length=32))])
    reference = run(batch)
    longer = streams(4, row_length=128)
    padded = stack([build(pack((ids, spans)), longer), empty_row(longer)])
    chex.assert_trees_all_close(run(padded), reference, rtol=1e-6, atol=1e-6)
    padding = batch.visibility.segment == 0
    other_id = batch._replace(tokens=np.where(padding, 2, batch.tokens))
    chex.assert_trees_all_equal(run(other_id), reference)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_padding_rows_are_finite_and_contribute_no_gradient(dtype, debug_nans):
    """An all-padding row, and chats shorter than a block."""
    cfg, params = small_model()
    for recipe in ("mars", "mars_mask_only", "block_diffusion"):
        stream_cfg = streams(4, recipe=recipe, row_length=12, noisy_length=12)
        run = partial(loss_and_gradient, params, trained=jnp.float32(4), cfg=cfg, dtype=dtype)
        short = [build(pack(chat("pa")), stream_cfg), build(pack(chat("ppaaa")), stream_cfg)]
        (value, _), gradient = run(stack([*short, empty_row(stream_cfg)]))
        assert jnp.isfinite(value) and value > 0
        chex.assert_tree_all_finite(gradient)
        assert optax.tree.norm(gradient) > 0
        (value, _), gradient = run(stack([empty_row(stream_cfg)] * 3))
        assert value == 0
        assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("peak", [5.0, 40.0, 160.0])
def test_bfloat16_compute_has_float32_logits(peak):
    """Loss and gradient of the logits' input stay within 1 % of float32 also where logits are large."""
    cfg, params = small_model(hidden_size=64, std=1.0)
    batch = stack([build(pack(chat("pppp" + "a" * 12)), streams(4, row_length=16))])
    hidden = jax.random.normal(jax.random.key(1), (1, batch.tokens.shape[1], 64)).astype(jnp.bfloat16)
    table = params["embedding"]["table"].astype(jnp.bfloat16)
    logits = hidden[0].astype(jnp.float32) @ table.astype(jnp.float32).T
    hidden = hidden * (peak / jnp.abs(logits).max()).astype(jnp.bfloat16)

    @jax.jit
    @jax.value_and_grad
    def loss(hidden):
        changed = {**params, "embedding": {"table": table.astype(jnp.float32)}}
        sums = entry_sums(changed, cfg, hidden, batch, num_offsets=5, chunk=8)
        return sums.ar + sums.mask

    exact = loss(hidden.astype(jnp.float32))
    value, gradient = loss(hidden)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, exact[0], rtol=1e-4)
    error = jnp.linalg.norm(gradient.astype(jnp.float32) - exact[1]) / jnp.linalg.norm(exact[1])
    assert error < 0.01


def test_chunks_do_not_change_the_sums():
    cfg, params = small_model()
    batch = stack(
        [build(pack(chat("ppp" + "a" * 20)), streams(4, row_length=32)), empty_row(streams(4, row_length=32))]
    )
    whole = loss_sums(params, cfg, batch, num_offsets=5, chunk=1000)
    for chunk in (1, 7):
        chex.assert_trees_all_close(loss_sums(params, cfg, batch, num_offsets=5, chunk=chunk), whole, rtol=1e-6)


def test_remat_changes_nothing():
    cfg, params = small_model()
    batch = stack([build(pack(chat("ppp" + "a" * 9)), streams(4, row_length=16))])
    plain, remat = (loss_and_gradient(params, batch, jnp.float32(9), cfg=cfg, remat=flag) for flag in (False, True))
    chex.assert_trees_all_close(plain, remat, rtol=1e-5, atol=1e-6)


def test_counts_and_accuracy_by_offset():
    """Entries and hits per number of placeholders, against a count over full logits."""
    batch = build(pack(chat("ppp" + "a" * 20)), streams(4, row_length=32))
    stacked = stack([batch])
    cfg, params = small_model()
    sums = loss_sums(params, cfg, stacked, num_offsets=5)
    hidden = decoder.forward(params, cfg, stacked.tokens, stacked.visibility.position, dense_attend(stacked))[0]
    best = np.asarray(decoder.unembed(params, cfg, hidden)).argmax(-1)
    counts, hits = np.zeros(5), np.zeros(5)
    for source, target, _, _, offset in entries(batch):
        counts[offset] += 1
        hits[offset] += best[source] == target
    assert counts.tolist() == [20, 5, 5, 5, 0]
    np.testing.assert_array_equal(sums.entries_by_offset, counts)
    np.testing.assert_array_equal(sums.correct_by_offset, hits)
    assert sums.ar_weight / sums.total_weight == 0.625


def test_sampled_blocks_average_to_the_full_loss():
    """The mean over every subset of blocks is the loss with all of them, and so is its gradient."""
    cfg, params = small_model()
    row = pack(chat("pp" + "a" * 15))  # 4 blocks, one of them short
    full = streams(4, row_length=20)
    half = streams(4, row_length=20, block_fraction=0.5)
    subsets = {}
    for seed in range(200):
        batch = build(row, half, seed)
        subsets.setdefault(batch.weight_mask.tobytes(), batch)
    assert len(subsets) == 6

    def run(batch):
        (value, _), gradient = loss_and_gradient(params, stack([batch]), jnp.float32(15), cfg=cfg)
        return value, gradient

    mean = jax.tree.map(lambda *leaves: sum(leaves) / 6, *map(run, subsets.values()))
    chex.assert_trees_all_close(mean, run(build(row, full)), rtol=1e-5, atol=1e-6)


def test_mask_token_is_the_only_thing_placeholders_know():
    """Changing every target inside a block leaves the logits of its placeholders untouched."""
    cfg, params = small_model()
    ids, spans = chat("ppaaaa")
    changed = [*ids[:3], 50, 51, 52]
    batches = [stack([build(pack((tokens, spans)), streams(4, row_length=8))]) for tokens in (ids, changed)]
    hidden = [decoder.forward(params, cfg, b.tokens, b.visibility.position, dense_attend(b))[0, 8:11] for b in batches]
    assert (batches[0].tokens[0, 8:11] == MASK_ID).all()
    np.testing.assert_array_equal(*hidden)
