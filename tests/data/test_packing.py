import itertools
import logging

import numpy as np
import pytest

from mars_jax.data.chat import Chat
from mars_jax.data.packing import (
    best_room,
    cut,
    fit,
    make_row,
    pack,
    packed_tokens,
    placeholder_budget,
    placeholder_cost,
)
from mars_jax.data.rows import advise_room
from mars_jax.objective.streams import StreamConfig, build_streams, noisy_capacity

RECIPES = ["ar_sft", "mars", "mars_mask_only", "block_diffusion"]


def config(recipe="mars", size=4, masks=3, anchor="response", length=64, noisy=None, **changes):
    noisy = noisy_capacity(recipe, length, size, masks, anchor) if noisy is None else noisy
    return StreamConfig(recipe, size, masks, anchor, length, noisy, mask_id=3, **changes)


def random_chats(count, longest=60, seed=0):
    """Chats of one or two turns with spans of any length, some with a tail that is not trained."""
    rng = np.random.default_rng(seed)

    def one():
        length = int(rng.integers(2, longest))
        cuts = np.sort(rng.choice(np.arange(1, length + 1), min(length, int(rng.choice([2, 4]))), replace=False))
        spans = cuts[: len(cuts) // 2 * 2].reshape(-1, 2)
        return Chat(rng.integers(4, 99, length).astype(np.int32), spans.astype(np.int32))

    return [one() for _ in range(count)]


def fitted(chats, cfg):
    return [chat for chat in (fit(chat, cfg) for chat in chats) if chat is not None]


def test_fit_keeps_a_chat_that_fits_up_to_its_last_trained_token():
    chat = Chat(np.arange(10, dtype=np.int32), np.array([[2, 4], [6, 9]], np.int32))
    result = fit(chat, config())
    assert result.tokens.tolist() == list(range(9))
    assert result.spans.tolist() == [[2, 4], [6, 9]]


@pytest.mark.parametrize(
    "length, spans", [(8, [[2, 4], [6, 8]]), (6, [[2, 4]]), (4, [[2, 4]]), (3, [[2, 3]]), (2, None), (1, None)]
)
def test_fit_cuts_at_the_row_length_and_drops_what_has_nothing_to_train(length, spans):
    chat = Chat(np.arange(10, dtype=np.int32), np.array([[2, 4], [6, 9]], np.int32))
    result = fit(chat, config(length=length))
    if spans is None:
        assert result is None
    else:
        assert result.spans.tolist() == spans
        assert len(result.tokens) == spans[-1][1]


def test_fit_cuts_to_the_placeholders_a_row_has():
    chat = Chat(np.arange(30, dtype=np.int32), np.array([[2, 30]], np.int32))
    result = fit(chat, config(noisy=9))  # three placeholders a block of four
    assert result.spans.tolist() == [[2, 15]]  # 3 whole blocks, and the next one's first token needs none
    assert placeholder_cost(result, config()) == 9


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("anchor", ["response", "sequence"])
@pytest.mark.parametrize("masks", [3, 4])
@pytest.mark.parametrize("changes", [{}, {"random_offset": True}, {"block_fraction": 0.5}])
def test_packed_rows_respect_both_budgets(recipe, anchor, masks, changes):
    full = noisy_capacity(recipe, 64, 4, masks, anchor)
    for noisy in (full, full // 2):
        cfg = config(recipe, masks=masks, anchor=anchor, noisy=noisy, **changes)
        chats = fitted(random_chats(80), cfg)
        rows = pack(chats, cfg)
        assert sorted(itertools.chain(*rows)) == list(range(len(chats)))
        for seed, row in enumerate(rows):
            packed = make_row([chats[i] for i in row])
            batch = build_streams(packed, cfg, np.random.default_rng(seed))  # raises where a budget is exceeded
            assert batch.trained == sum(chats[i].trained for i in row)


@pytest.mark.parametrize("recipe, anchor, masks", [("mars", "response", 3), ("mars", "response", 4)])
def test_cost_is_the_number_of_placeholders(recipe, anchor, masks):
    cfg = config(recipe, anchor=anchor, masks=masks)
    for chat in fitted(random_chats(60, seed=1), cfg):
        batch = build_streams(make_row([chat]), cfg, np.random.default_rng(0))
        needed = int((batch.visibility.segment[cfg.row_length :] > 0).sum())
        spare = 0 if masks == 3 else len(chat.spans)  # the shifted target past the end of a span does not exist
        assert placeholder_cost(chat, cfg) == needed + spare


def test_best_fit_fills_rows():
    lengths = [40, 24, 30, 30, 4, 50, 14]  # 192 = 3 rows of 64
    chats = [Chat(np.zeros(n, np.int32), np.array([[1, n]], np.int32)) for n in lengths]
    assert pack(chats, config()) == [[5, 6], [0, 1], [2, 3, 4]]


def test_packing_is_dense_and_deterministic():
    cfg = config(length=256)
    chats = fitted(random_chats(3000), cfg)
    rows = pack(chats, cfg)
    assert rows == pack(list(chats), cfg)
    tokens = sum(len(chat.tokens) for chat in chats)
    assert tokens / (256 * len(rows)) > 0.99


def test_rows_are_their_chats_one_after_the_other():
    a = Chat(np.array([7, 8, 9], np.int32), np.array([[1, 2]], np.int32))
    b = Chat(np.array([5, 6], np.int32), np.array([[1, 2]], np.int32))
    row = make_row([a, b])
    assert row.tokens.tolist() == [7, 8, 9, 5, 6]
    assert row.segment.tolist() == [1, 1, 1, 2, 2]
    assert row.position.tolist() == [0, 1, 2, 0, 1]
    assert row.spans.tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize("recipe", ["ar_sft", "mars", "mars_mask_only"])
@pytest.mark.parametrize("anchor", ["response", "sequence"])
@pytest.mark.parametrize("masks", [3, 4])
def test_packing_changes_no_loss_entry(recipe, anchor, masks):
    """Seen from inside a chat (its tokens, who sees whom, what predicts what), packed and alone are the same."""
    cfg = config(recipe, anchor=anchor, masks=masks)
    chats = fitted(random_chats(40, longest=30), cfg)
    rng = np.random.default_rng(0)
    alone = [entries(build_streams(make_row([chat]), cfg, rng), 1) for chat in chats]
    packed = {}
    for row in pack(chats, cfg):
        batch = build_streams(make_row([chats[i] for i in row]), cfg, rng)
        packed |= {chat: entries(batch, segment) for segment, chat in enumerate(row, 1)}
    assert [packed[i] for i in range(len(chats))] == alone
    assert sum(map(len, alone)) > 100


def entries(batch, segment):
    """The loss entries of one segment, without anything that depends on where in the row it lies."""
    v = batch.visibility
    live = (batch.weight_ar > 0) | (batch.weight_mask > 0)
    return sorted(
        (
            int(v.position[s]),
            int(v.limit[s]),
            int(v.order[s]),
            int(batch.tokens[s]),
            int(t),
            float(ar),
            float(m),
            int(o),
        )
        for s, t, ar, m, o in zip(
            batch.source[live],
            batch.target[live],
            batch.weight_ar[live],
            batch.weight_mask[live],
            batch.offset[live],
            strict=True,
        )
        if v.segment[s] == segment
    )


def test_cut_drops_spans_that_are_gone():
    chat = Chat(np.arange(10, dtype=np.int32), np.array([[2, 4], [6, 9]], np.int32))
    assert cut(chat, 5).spans.tolist() == [[2, 4]]
    assert cut(chat, 2).spans.shape == (0, 2)
    assert placeholder_budget(config(block_fraction=0.5, noisy=10)) == 2


def equal_chats(count, length, trained):
    """Each needs three placeholders for every four trained tokens."""
    return [Chat(np.arange(length, dtype=np.int32), np.array([[length - trained, length]], np.int32))] * count


@pytest.mark.parametrize(
    "trained, length, tokens",
    [
        (4, 16, 2 * (64 + 16)),  # four chats a row need 12 placeholders
        (8, 32, 2 * (64 + 32)),  # 24
        (16, 48, 2 * (64 + 48)),  # 48: all the room there is
    ],
)
def test_best_room_is_what_full_rows_need(trained, length, tokens):
    chats = equal_chats(8, 16, trained)
    best = best_room(chats, config())
    assert (best.noisy_length, packed_tokens(chats, best)) == (length, tokens)


def test_best_room_cuts_no_chat():
    chats = [*equal_chats(40, 16, 4), *equal_chats(1, 60, 56)]  # the last alone needs 42
    assert best_room(chats, config()).noisy_length == 48
    assert best_room(chats[:40], config(), needed=42).noisy_length == 48


@pytest.mark.parametrize("recipe, masks, anchor", [("mars", 3, "response"), ("block_diffusion", 4, "sequence")])
def test_best_room_is_never_worse_than_any_other(recipe, masks, anchor):
    cfg = config(recipe, masks=masks, anchor=anchor)
    chats = fitted(random_chats(120), cfg)
    needed = max(placeholder_cost(chat, cfg) for chat in chats)
    others = [packed_tokens(chats, config(recipe, masks=masks, anchor=anchor, noisy=n)) for n in range(64, needed, -16)]
    assert packed_tokens(chats, best_room(chats, cfg)) == min(others)


def test_much_empty_room_is_named_with_the_better_number(caplog):
    with caplog.at_level(logging.WARNING, "mars_jax.data"):
        advise_room(equal_chats(5000, 16, 4), config())
    assert caplog.messages == [
        "objective.noisy_length=16, in place of 48, would pack these chats into 29 % fewer tokens a pass"
    ]


def test_room_that_is_used_needs_no_advice(caplog):
    with caplog.at_level(logging.WARNING, "mars_jax.data"):
        advise_room(equal_chats(100, 16, 16), config())
        advise_room(equal_chats(100, 16, 4), config(noisy=16))
        advise_room(equal_chats(100, 16, 4), config("ar_sft"))
    assert caplog.messages == []
