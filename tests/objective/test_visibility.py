"""The attention rule against matrices written by hand and against the rule's own table, entry by entry."""

import numpy as np
import pytest
from helpers.objective import build, chat, pack, streams

from mars_jax.objective.visibility import public, visible


def mask_of(row, cfg) -> np.ndarray:
    """The 0/1 mask of a row, without the rows and columns of padding."""
    tokens = build(row, cfg).visibility
    used = np.flatnonzero(tokens.segment)
    return np.asarray(visible(tokens, tokens)).astype(int)[np.ix_(used, used)]


def matrix(text: str) -> np.ndarray:
    return np.array([[int(c) for c in line if c in "01"] for line in text.strip().splitlines()])


HAND_WRITTEN = {
    # positions 0 p | 1 2 3 a-block | 4 a-block: the incomplete last block has no target of its own
    "within": (
        ("paaaa",),
        {"block_size": 3},
        """
        10000 00
        11000 00
        11100 00
        11110 00
        11111 00

        10000 10
        10000 11
        """,
    ),
    # the placeholder at 3 predicts token 4, the first after its block
    "shifted": (
        ("paaaa",),
        {"block_size": 3, "masks_per_block": 3},
        """
        10000 000
        11000 000
        11100 000
        11110 000
        11111 000

        10000 100
        10000 110
        10000 111
        """,
    ),
    # turns 1-4 and 6-7: blocks {1 2 3} {4} {6 7}; the second turn's placeholder sees the first turn as clean tokens
    "two turns": (
        ("paaaapaa",),
        {"block_size": 3},
        """
        10000000 000
        11000000 000
        11100000 000
        11110000 000
        11111000 000
        11111100 000
        11111110 000
        11111111 000

        10000000 100
        10000000 110
        11111100 001
        """,
    ),
    # blocks {1 2} {3 4}: the second sees the first one's clean tokens, never its placeholders
    "two blocks": (
        ("paaaa",),
        {"block_size": 2, "masks_per_block": 2},
        """
        10000 000
        11000 000
        11100 000
        11110 000
        11111 000

        10000 100
        10000 110
        11100 001
        """,
    ),
    # blocks {0 1 2 3} {4 5} from position 0: context tokens 0 and 1 stand in the noisy block as themselves
    "sequence anchor": (
        ("ppaaaa",),
        {"block_size": 4, "anchor": "sequence"},
        """
        100000 0000
        110000 0000
        111000 0000
        111100 0000
        111110 0000
        111111 0000

        000000 1000
        000000 1100
        000000 1110
        111100 0001
        """,
    ),
    # two chats in one row never see each other; placeholders are 1 2 of the first, then 1 of the second
    "packed": (
        ("paaa", "paa"),
        {"block_size": 3},
        """
        1000 000 000
        1100 000 000
        1110 000 000
        1111 000 000
        0000 100 000
        0000 110 000
        0000 111 000

        1000 000 100
        1000 000 110
        0000 100 001
        """,
    ),
    # bidirectional inside each block, all of whose tokens stand in the noisy stream
    "block diffusion": (
        ("paaaa",),
        {"block_size": 2, "recipe": "block_diffusion"},
        """
        10000 0000
        11000 0000
        11100 0000
        11110 0000
        11111 0000

        10000 1100
        10000 1100
        11100 0011
        11100 0011
        """,
    ),
    "plain": (
        ("paa", "pa"),
        {"recipe": "ar_sft"},
        """
        10000
        11000
        11100
        00010
        00011
        """,
    ),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_mask_equals_the_hand_written_matrix(name):
    patterns, options, expected = HAND_WRITTEN[name]
    expected = matrix("\n".join(line for line in expected.splitlines() if line.strip()))
    np.testing.assert_array_equal(mask_of(pack(*map(chat, patterns)), streams(**options)), expected)


def test_padding_sees_nothing_and_is_seen_by_nothing():
    tokens = build(pack(chat("paaa")), streams(block_size=3, row_length=9)).visibility
    mask = np.asarray(visible(tokens, tokens))
    padding = tokens.segment == 0
    assert padding.sum() == 15 - 6
    assert not mask[padding].any() and not mask[:, padding].any()


def allowed(query, key) -> bool:
    """The table of who may attend to whom. A token: (segment, position, block or None if clean, block's first)."""
    (q_segment, q_position, q_block, q_first), (k_segment, k_position, k_block, _) = query, key
    if q_segment != k_segment:
        return False
    if q_block is None:
        return k_block is None and k_position <= q_position
    if k_block is None:
        return k_position < q_first
    return k_block == q_block and k_position <= q_position


@pytest.mark.parametrize("anchor", ["response", "sequence"])
@pytest.mark.parametrize("block_size", [2, 3, 4, 8])
@pytest.mark.parametrize("alignment", ["within", "shifted"])
def test_mask_equals_the_table(anchor, block_size, alignment):
    rng = np.random.default_rng(block_size)
    for _ in range(5):
        patterns = [
            "".join(f"{'p' * rng.integers(1, 5)}{'a' * rng.integers(1, 9)}" for _ in range(2)) for _ in range(2)
        ]
        row = pack(*map(chat, patterns))
        masks = block_size if alignment == "shifted" else block_size - 1
        cfg = streams(block_size, masks, anchor)
        batch = build(row, cfg)
        n = len(row.tokens)
        index = [*range(n), *range(cfg.row_length, cfg.row_length + int((batch.visibility.group > 0).sum()))]
        described = [(s, p, None, None) for s, p in zip(row.segment.tolist(), row.position.tolist(), strict=True)]
        for i in index[n:]:
            segment, position = int(batch.visibility.segment[i]), int(batch.visibility.position[i])
            if anchor == "sequence":
                first = position - position % block_size
            else:
                text = patterns[segment - 1][:position]
                first = position - (len(text) - 1 - text.rfind("p")) % block_size
            described.append((segment, position, first, first))
        expected = [[allowed(q, k) for k in described] for q in described]
        actual = np.asarray(visible(batch.visibility, batch.visibility))[np.ix_(index, index)]
        np.testing.assert_array_equal(actual, expected)


def test_sequence_anchor_is_the_published_matrix():
    """A chat trained from its second token on, shifted: M[i, j] by block numbers alone."""
    length, block_size = 8, 4
    cfg = streams(block_size, block_size, "sequence")
    mask = mask_of(pack(chat("p" + "a" * (length - 1))), cfg)
    t = np.arange(length)
    block = t // block_size
    causal = t[:, None] >= t[None, :]
    expected = np.block(
        [
            [causal, np.zeros((length, length), bool)],
            [block[:, None] > block[None, :], causal & (block[:, None] == block[None, :])],
        ]
    )
    np.testing.assert_array_equal(
        mask, expected[: 2 * length - 1, : 2 * length - 1]
    )  # the last placeholder has no target


def test_public_tokens_are_causal():
    tokens = public(np.ones((1, 3), np.int32), np.arange(3, dtype=np.int32)[None])
    np.testing.assert_array_equal(visible(tokens, tokens)[0], np.tri(3, dtype=bool))
