"""Which hidden state predicts which token, with which weights."""

import numpy as np
import pytest
from helpers.objective import MASK_ID, build, chat, entries, pack, streams

from mars_jax.objective.streams import Block, cut_blocks, empty_row

# A chat's ids are 10 + position, so targets read as positions; with row_length 64, source 64 is the first placeholder.
P = 64


def test_entries_within():
    row = pack(chat("ppaaaaa"))  # spans 2-6, blocks {2 3 4} {5 6}
    batch = build(row, streams(block_size=3))
    assert entries(batch) == [
        (P + 0, 13, 0, 1, 1),  # [MASK] at 2 predicts 3
        (P + 1, 14, 0, 1, 2),
        (P + 2, 16, 0, 1, 1),  # [MASK] at 5 predicts 6
        (1, 12, 1, 1, 0),  # block starts are predicted by clean tokens, in both losses
        (2, 13, 1, 0, 0),
        (3, 14, 1, 0, 0),
        (4, 15, 1, 1, 0),
        (5, 16, 1, 0, 0),
    ]
    assert batch.tokens[P : P + 4].tolist() == [MASK_ID, MASK_ID, MASK_ID, 0]
    assert batch.visibility.position[P : P + 3].tolist() == [2, 3, 5]
    assert batch.trained == 5


def test_entries_shifted():
    batch = build(pack(chat("ppaaaaa")), streams(block_size=3, masks_per_block=3))
    assert entries(batch)[:4] == [
        (P + 0, 13, 0, 1, 1),
        (P + 1, 14, 0, 1, 2),
        (P + 2, 15, 0, 1, 3),  # [MASK] at 4 predicts the next block's first token
        (P + 3, 16, 0, 1, 1),  # the one at 6 would predict past the span: not built
    ]
    assert [entry[2:] for entry in entries(batch)[4:]] == [(1, 0, 0)] * 5  # no clean prediction in L_mask
    assert (batch.visibility.group > 0).sum() == 4


def test_entries_sequence_anchor():
    """Blocks {0..3} {4 5}: context inside the straddling block stands in the noisy stream as itself."""
    batch = build(pack(chat("ppaaaa")), streams(block_size=4, anchor="sequence"))
    assert batch.tokens[P : P + 4].tolist() == [10, 11, MASK_ID, MASK_ID]
    assert entries(batch)[:3] == [(P + 1, 12, 0, 1, 0), (P + 2, 13, 0, 1, 1), (P + 3, 15, 0, 1, 1)]
    clean = {target: weight_mask for _, target, weight_ar, weight_mask, _ in entries(batch) if weight_ar}
    assert clean == {12: 0, 13: 0, 14: 1, 15: 0}  # 14 is the first of its block; 12 is predicted inside the noisy block


@pytest.mark.parametrize("anchor", ["response", "sequence"])
@pytest.mark.parametrize("block_size", [2, 3, 4, 16])
def test_within_puts_every_trained_token_into_both_losses_once(anchor, block_size):
    for pattern in ["pa", "ppppaaaa", "paapaapaaaaaaa", "pppaaaaapaaaaaapa"]:
        row = pack(chat(pattern), chat("paaa", 40))
        batch = build(row, streams(block_size, anchor=anchor))
        ar, mask = np.zeros(64), np.zeros(64)
        for _, target, weight_ar, weight_mask, _ in entries(batch):
            ar[target] += weight_ar
            mask[target] += weight_mask
        trained = np.zeros(64)
        trained[[int(row.tokens[t]) for start, stop in row.spans for t in range(start, stop)]] = 1
        np.testing.assert_array_equal(ar, trained)
        np.testing.assert_array_equal(mask, trained)


@pytest.mark.parametrize("pattern", ["pa", "ppppaaaa", "pppppaaa", "paapaapaaaaaaa", "pppaaaaapaaaaaapa"])
def test_shifted_sequence_anchor_puts_every_trained_token_into_the_mask_loss_once(pattern):
    row = pack(chat(pattern))
    for block_size in (2, 3, 4, 16):
        batch = build(row, streams(block_size, block_size, "sequence", recipe="mars_mask_only"))
        targets = sorted(target for _, target, _, weight, _ in entries(batch) if weight == 1)
        assert targets == [10 + t for start, stop in row.spans for t in range(start, stop)]


def test_two_turns_in_one_block_of_a_sequence_anchor_are_built_once():
    batch = build(pack(chat("papapa")), streams(block_size=4, anchor="sequence"))
    assert batch.tokens[P : P + 4].tolist() == [10, MASK_ID, 12, 14]
    assert batch.visibility.position[P : P + 4].tolist() == [0, 1, 2, 4]
    assert batch.visibility.group[P : P + 4].tolist() == [1, 1, 1, 2]


def test_ar_sft_has_no_noisy_stream():
    batch = build(pack(chat("ppaaa")), streams(recipe="ar_sft"))
    assert batch.tokens.shape == (64,)
    assert entries(batch) == [(1, 12, 1, 0, 0), (2, 13, 1, 0, 0), (3, 14, 1, 0, 0)]


def test_mask_only_has_no_ar_loss():
    batch = build(pack(chat("ppaaaa")), streams(recipe="mars_mask_only"))
    assert entries(batch)[-1] == (1, 12, 0, 1, 0)
    assert not batch.weight_ar.any() and batch.weight_mask.sum() == 4


@pytest.mark.parametrize(
    ("recipe", "block_size", "share"),
    [("mars", 4, 0.625), ("mars", 16, 0.53125), ("mars_mask_only", 4, 0.25), ("ar_sft", 4, 1.0)],
)
def test_ar_share_of_the_signal(recipe, block_size, share):
    batch = build(pack(chat("pp" + "a" * 16), chat("p" + "a" * 32)), streams(block_size, recipe=recipe))
    weight = batch.weight_ar + batch.weight_mask
    assert weight[batch.offset == 0].sum() / weight.sum() == share


def test_random_offset_moves_the_first_cut_only():
    row, cfg = pack(chat("pp" + "a" * 9)), streams(block_size=4, random_offset=True)
    cuts = {tuple(cut_blocks(row, cfg, np.random.default_rng(seed))) for seed in range(50)}
    assert cuts == {
        (Block(2, 6), Block(6, 10), Block(10, 11)),
        (Block(2, 5), Block(5, 9), Block(9, 11)),
        (Block(2, 4), Block(4, 8), Block(8, 11)),
        (Block(2, 3), Block(3, 7), Block(7, 11)),
    }


def test_sampled_blocks_keep_their_share_and_weigh_its_inverse():
    row = pack(chat("pp" + "a" * 20))  # 5 blocks
    cfg = streams(block_size=4, block_fraction=0.4)
    total = np.zeros(64)
    draws = 2000
    for seed in range(draws):
        batch = build(row, cfg, seed)
        assert (batch.visibility.group > 0).sum() == 2 * 3
        np.testing.assert_allclose([e[3] for e in entries(batch) if e[3]], 2.5)
        np.add.at(total, batch.target, batch.weight_mask)
    expected = np.zeros(64)
    expected[12:32] = 1
    # A block is drawn with probability 2/5 and then weighs 5/2: standard deviation 1.22 a draw.
    np.testing.assert_allclose(total / draws, expected, atol=5 * 1.22 / np.sqrt(draws))


def test_sampling_respects_the_room_for_placeholders():
    row = pack(chat("pp" + "a" * 20))
    batch = build(row, streams(block_size=4, block_fraction=0.8, noisy_length=8))
    assert (batch.visibility.group > 0).sum() <= 8
    assert batch.weight_mask.sum() == pytest.approx(20)


def test_block_diffusion_predicts_the_token_itself_with_the_inverse_rate():
    row = pack(chat("pp" + "a" * 20))
    cfg = streams(block_size=4, recipe="block_diffusion")
    hidden_tokens = 0
    for seed in range(40):
        batch = build(row, cfg, seed)
        assert not batch.weight_ar.any()
        noisy = batch.tokens[P : P + 20]
        assert batch.visibility.position[P : P + 20].tolist() == list(range(2, 22))
        masked = set(np.flatnonzero(noisy == MASK_ID).tolist())
        assert {source - P for source, *_ in entries(batch)} == masked
        for source, target, _, weight, offset in entries(batch):
            assert target == 12 + source - P and weight > 1
            block = (source - P) // 4
            assert offset == sum(4 * block <= i < 4 * block + 4 for i in masked)
        for block in range(5):
            assert len({e[3] for e in entries(batch) if (e[0] - P) // 4 == block}) <= 1  # one rate a block
        hidden_tokens += len(masked)
    assert hidden_tokens / (40 * 20) == pytest.approx(0.5, abs=0.08)  # rates are uniform


def test_block_diffusion_weights_are_unbiased():
    row, cfg = pack(chat("pp" + "a" * 8)), streams(block_size=4, recipe="block_diffusion", row_length=16)
    weights = [build(row, cfg, seed).weight_mask.sum() / 8 for seed in range(3000)]
    assert np.mean(weights) == pytest.approx(1.0, abs=5 * np.std(weights) / np.sqrt(3000))


def test_empty_row_is_all_padding():
    batch = empty_row(streams())
    assert batch.trained == 0 and not batch.visibility.segment.any() and not entries(batch)


def test_too_long_rows_and_too_many_placeholders_are_refused():
    with pytest.raises(ValueError, match="row has 8 tokens but row_length is 4"):
        build(pack(chat("ppaaaaaa")), streams(row_length=4))
    with pytest.raises(ValueError, match="needs 5 placeholders but noisy_length is 3"):
        build(pack(chat("ppaaaaaa")), streams(block_size=8, row_length=8, noisy_length=3))


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="position 0"):
        build(pack(([10, 11], [(0, 2)])), streams())
