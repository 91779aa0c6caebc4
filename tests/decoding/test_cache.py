"""What the cache holds, and that nothing else of it matters."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import decoding, tiny
from helpers.decoding import decode, prefilled, results, rows

from mars_jax.decoding import plan as plans
from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.network import DecoderNetwork
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.decoding.settings import Vocabulary
from mars_jax.decoding.weights import decode_weights
from mars_jax.errors import UserError

NETWORK = DecoderNetwork(tiny.CONFIG)
VOCABULARY = Vocabulary(jnp.array(tiny.emit_mask()), jnp.int32(tiny.MASK_ID))
CAPACITY = 64
PLANS = {
    "window": plans.window(3),
    "chain": plans.verify(3, branched=False),
    "tree": plans.verify(3, branched=True),
    "block": plans.block(8, 3),
}


@pytest.fixture(scope="module")
def weights():
    return decode_weights(tiny.params(), tiny.CONFIG)


@pytest.fixture(scope="module")
def prompts():
    """Four prompts of unequal length whose answers differ in length and pace."""
    cases = sorted(tiny.decode_cases(), key=lambda c: len(c["prompt_ids"]))
    return [cases[i]["prompt_ids"] for i in (0, 12, 30, 39)]


OPTIONS = {"stop": tiny.STOP_IDS, "tau": 0.7, "max_new_tokens": 20}


def spoil(state):
    """1e4 in every slot at or past its row's cursor."""

    free_BS = jnp.arange(CAPACITY)[None] >= state.cursor[:, None]

    def overwrite(k_BKES, v_BKSE):
        return jnp.where(free_BS[:, None, None], 1e4, k_BKES), jnp.where(free_BS[:, None, :, None], 1e4, v_BKSE)

    return state._replace(cache=tuple(overwrite(*layer) for layer in state.cache))


def slots_first(cache):
    """Every array of the cache as `[B, S, …]`."""
    arrays = ((k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)) for k, v in cache)
    return [np.array(a) for layer in arrays for a in layer]


@pytest.mark.parametrize("name", PLANS)
def test_garbage_past_the_cursor_changes_nothing(weights, prompts, name):
    plan = PLANS[name]
    state, settings = rows(NETWORK, weights, plan, prompts, CAPACITY, **OPTIONS)
    expected = results(decode(NETWORK, plan, weights, VOCABULARY, settings, state), prompts)
    assert len({tuple(accepted) for _, accepted, _ in expected}) > 1, "rows of equal pace would hide a fault"

    state, settings = rows(NETWORK, weights, plan, prompts, CAPACITY, **OPTIONS)
    while bool(state.running.any()):
        state = decode(NETWORK, plan, weights, VOCABULARY, settings, spoil(state), steps=1)
    assert results(state, prompts) == expected


@pytest.mark.parametrize("name", PLANS)
def test_slots_below_the_cursor_hold_a_clean_prefill_and_the_others_were_never_written(weights, prompts, name):
    plan = PLANS[name]
    state, settings = rows(NETWORK, weights, plan, prompts, CAPACITY, **OPTIONS)
    prompt_length = np.array(state.cursor)
    state = decode(NETWORK, plan, weights, VOCABULARY, settings, state)
    cursor = np.array(state.cursor)
    assert (cursor > prompt_length).any()

    clean = prefilled(NETWORK, weights, NETWORK.init_cache(len(prompts), CAPACITY), state.tokens, cursor)
    for kept, expected in zip(slots_first(state.cache), slots_first(clean), strict=True):
        for row in range(len(prompts)):
            np.testing.assert_allclose(kept[row, : cursor[row]], expected[row, : cursor[row]], atol=1e-5)
            assert not np.any(kept[row, max(cursor[row], CAPACITY // 2) :])


def test_a_prompt_prefilled_in_chunks_is_the_prompt_prefilled_at_once(weights, prompts):
    tokens = np.zeros((4, 32), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    count = np.array([len(p) for p in prompts], np.int32)
    whole = prefilled(NETWORK, weights, NETWORK.init_cache(4, CAPACITY), tokens, count)
    chunked = NETWORK.init_cache(4, CAPACITY)
    for first in range(0, 32, 8):
        piece = tokens[:, first : first + 8]
        chunked = prefilled(NETWORK, weights, chunked, piece, np.clip(count - first, 0, 8), start=first)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), chunked, whole)


@pytest.mark.parametrize("name", ["window", "tree"])
def test_the_order_of_a_batch_does_not_matter(weights, prompts, name):
    plan = PLANS[name]
    expected = None
    for order in itertools.permutations(range(4)):
        batch = [prompts[i] for i in order]
        found = decoding.run(NETWORK, weights, plan, VOCABULARY, batch, CAPACITY, **OPTIONS)
        found = [found[order.index(i)] for i in range(4)]
        expected = expected or found
        assert found == expected


@pytest.mark.parametrize("mode", ["window", "verify"])
def test_the_end_of_the_cache_ends_a_row_and_harms_no_other(mode):
    """Prompts that fill the context but for 9 … 1 tokens, each next to a short one."""
    model = dataclasses.replace(tiny.model(), stop_ids=())
    small = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, max_positions=64))
    chat = (tiny.decode_cases()[0]["prompt_ids"] * 4)[:63]
    short = tuple(tiny.decode_cases()[1]["prompt_ids"])
    options = DecodeOptions(mode=mode, window=7, draft=7, layout="chain", tau=0.0, max_new_tokens=30)
    requests = [r for n in range(55, 64) for r in (Request(tuple(chat[:n]), options), Request(short, options))]
    found = DecodeEngine(small, slots=2).generate(requests)
    expected = DecodeEngine(model, slots=2).generate(requests)
    for request, got, want in zip(requests, found, expected, strict=True):
        fits = 64 - len(request.token_ids)
        assert got.token_ids == want.token_ids[:fits]
        assert got.finish_reason == "length"
    with pytest.raises(UserError, match="64 tokens, but the model's context of 64"):
        DecodeEngine(small, slots=2).generate([Request((5,) * 64, options)])
