"""What the cache holds, and that nothing else of it matters."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import decoding, tiny
from helpers.decoding import MANY, results, rows, settings

from mars_jax.decoding import plan as plans
from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.loop import decode, prefill
from mars_jax.decoding.network import DecoderNetwork
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.decoding.settings import Vocabulary
from mars_jax.errors import UserError
from mars_jax.models import decoder

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
def params():
    return decoder.unstack_layers(tiny.params())


@pytest.fixture(scope="module")
def prompts():
    """Four prompts of unequal length whose answers differ in length and pace."""
    cases = sorted(tiny.decode_cases(), key=lambda c: len(c["prompt_ids"]))
    return [cases[i]["prompt_ids"] for i in (0, 12, 30, 39)]


def options(plan, prompts):
    return settings(plan, prompts, CAPACITY, stop=tiny.STOP_IDS, tau=0.7, max_new_tokens=20)


def spoil(state):
    """1e4 in every slot at or past its row's cursor."""

    def overwrite(a):
        slot = jnp.arange(a.shape[1])[None, :] >= state.cursor[:, None]
        return jnp.where(slot.reshape(*slot.shape, *[1] * (a.ndim - 2)), 1e4, a)

    return state._replace(cache=jax.tree.map(overwrite, state.cache))


@pytest.mark.parametrize("name", PLANS)
def test_garbage_past_the_cursor_changes_nothing(params, prompts, name):
    plan = PLANS[name]
    args = (NETWORK, plan, params, VOCABULARY, options(plan, prompts))
    state = decode(*args, rows(NETWORK, params, plan, prompts, CAPACITY), MANY)
    expected = results(state, prompts)
    assert len({tuple(accepted) for _, accepted, _ in expected}) > 1, "rows of equal pace would hide a fault"

    state = rows(NETWORK, params, plan, prompts, CAPACITY)
    while bool(state.running.any()):
        state = decode(*args, spoil(state), jnp.int32(1))
    assert results(state, prompts) == expected


@pytest.mark.parametrize("name", PLANS)
def test_slots_below_the_cursor_hold_a_clean_prefill_and_the_others_were_never_written(params, prompts, name):
    plan = PLANS[name]
    state = rows(NETWORK, params, plan, prompts, CAPACITY)
    prompt_length = np.array(state.cursor)
    state = decode(NETWORK, plan, params, VOCABULARY, options(plan, prompts), state, MANY)
    cursor = np.array(state.cursor)
    assert (cursor > prompt_length).any()

    clean = NETWORK.init_cache(len(prompts), CAPACITY)
    clean = prefill(NETWORK, params, clean, state.tokens, jnp.zeros_like(state.cursor), state.cursor)
    for kept, expected in zip(jax.tree.leaves(state.cache), jax.tree.leaves(clean), strict=True):
        for row in range(len(prompts)):
            np.testing.assert_allclose(kept[row, : cursor[row]], expected[row, : cursor[row]], atol=1e-5)
            assert not np.any(kept[row, max(cursor[row], CAPACITY // 2) :])


def test_a_prompt_prefilled_in_chunks_is_the_prompt_prefilled_at_once(params, prompts):
    tokens = np.zeros((4, 32), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    count = np.array([len(p) for p in prompts], np.int32)
    whole = prefill(NETWORK, params, NETWORK.init_cache(4, CAPACITY), tokens, np.zeros(4, np.int32), count)
    chunked = NETWORK.init_cache(4, CAPACITY)
    for first in range(0, 32, 8):
        cursor = np.minimum(count, first)
        chunked = prefill(NETWORK, params, chunked, tokens[:, first : first + 8], cursor, np.clip(count - first, 0, 8))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), chunked, whole)


@pytest.mark.parametrize("name", ["window", "tree"])
def test_the_order_of_a_batch_does_not_matter(params, prompts, name):
    plan = PLANS[name]
    expected = None
    for order in itertools.permutations(range(4)):
        batch = [prompts[i] for i in order]
        found = decoding.run(
            NETWORK, params, plan, VOCABULARY, batch, CAPACITY, stop=tiny.STOP_IDS, tau=0.7, max_new_tokens=20
        )
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
    decode_options = DecodeOptions(mode=mode, window=7, draft=7, layout="chain", tau=0.0, max_new_tokens=30)
    requests = [
        r for n in range(55, 64) for r in (Request(tuple(chat[:n]), decode_options), Request(short, decode_options))
    ]
    found = DecodeEngine(small, slots=2).generate(requests)
    expected = DecodeEngine(model, slots=2).generate(requests)
    for request, got, want in zip(requests, found, expected, strict=True):
        fits = 64 - len(request.token_ids)
        assert got.token_ids == want.token_ids[:fits]
        assert got.finish_reason == "length"
    with pytest.raises(UserError, match="64 tokens, but the model's context of 64"):
        DecodeEngine(small, slots=2).generate([Request((5,) * 64, decode_options)])
