"""Sampling in the exact modes is autoregressive sampling: frequencies of whole texts against enumerated probabilities.

The model is a table: the next token depends on the position and on the token before, so probabilities of whole texts
are products that can be enumerated. Its placeholders are wrong, each in its own way.
"""

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.decoding import decode, rows, vocabulary, warped
from scipy.stats import chisquare

from mars_jax.decoding import choice
from mars_jax.decoding import plan as plans
from mars_jax.decoding.planning import without_drafts
from mars_jax.decoding.sampling import distribution
from mars_jax.decoding.state import no_drafts

V, LENGTH, N = 4, 4, 16
PROMPT = [1]
SAMPLES = 12_000
WARP = {"temperature": 0.9, "top_p": 0.85}


@dataclass(frozen=True)
class TableNetwork:
    """`params = (after_PVV, ahead_PWV)`: logits after a token at a position; placeholders by stop and order."""

    def init_cache(self, batch, slots):
        return ()

    def forward(self, params, tokens_BT, visibility, cache, cursor_B):
        features = [visibility.position, tokens_BT, visibility.group, visibility.limit, visibility.order]
        return jnp.stack(features, axis=-1), ()

    def write(self, cache, kv, row_B, cursor_B, count_B):
        return cache

    def logits(self, params, hidden):
        after, ahead = params
        position, token, group, limit, order = (hidden[..., i] for i in range(5))
        clip = {"mode": "clip"}
        next_logits = after.at[position, token].get(**clip)
        return jnp.where((group == 0)[..., None], next_logits, ahead.at[limit, order].get(**clip))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(3)
    after = 1.5 * rng.standard_normal((N, V, V))
    ahead = 1.5 * rng.standard_normal((N, 3, V))
    return tuple(jnp.array(a, jnp.float32) for a in (after, ahead))


def probability_of_texts(params) -> np.ndarray:
    """The probability of each of V**LENGTH texts under autoregressive sampling, in order of `itertools.product`."""
    after = np.array(params[0], np.float64)
    found = []
    for text in itertools.product(range(V), repeat=LENGTH):
        p, previous = 1.0, PROMPT[0]
        for position, token in enumerate(text):
            p *= warped(after[position, previous].copy(), **WARP)[token]
            previous = token
        found.append(p)
    return np.array(found)


def frequencies(params, plan) -> tuple[np.ndarray, np.ndarray]:
    """Counts of each text over many seeds, and the runs' mean length."""
    prompts = [PROMPT] * SAMPLES
    state, settings = rows_of_many(params, plan, prompts)
    state = decode(TableNetwork(), plan, params, vocabulary(V), settings, state)
    texts = np.array(state.tokens)[:, 1 : 1 + LENGTH] @ V ** np.arange(LENGTH)[::-1]
    return np.bincount(texts, minlength=V**LENGTH), LENGTH / np.array(state.forwards).mean()


def rows_of_many(params, plan, prompts):
    """Like `rows`, all rows at once."""
    state, settings = rows(TableNetwork(), params, plan, prompts[:1], N, V, max_new_tokens=LENGTH, **WARP)
    state, settings = jax.tree.map(lambda a: jnp.repeat(a, len(prompts), axis=0), (state, settings))
    seeds = jnp.arange(len(prompts), dtype=jnp.uint32)
    return state, settings._replace(sampling=settings.sampling._replace(seed=seeds))


def p_value(counts, probabilities) -> float:
    """Chi-square over texts expected at least five times; the others together are one class."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    assert not counts[probabilities == 0].any(), "a text that top-p excludes was drawn"
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    keep = expected > 0
    return chisquare(observed[keep], expected[keep]).pvalue


SHAPES = {
    "ar": plans.autoregressive(),
    "chain-1": plans.verify(1, branched=False),
    "chain-3": plans.verify(3, branched=False),
    "tree-1": plans.verify(1, branched=True),
    "tree-3": plans.verify(3, branched=True),
    "lookup-2": plans.lookup(2),
    "jacobi-2": plans.jacobi(2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_texts_are_as_frequent_as_in_autoregressive_sampling(params, name):
    counts, pace = frequencies(params, replace(SHAPES[name], sampled=True))
    assert p_value(counts, probability_of_texts(params)) > 1e-3
    assert (pace > 1.05) == (name != "ar"), "some drafts must stand, or nothing was tested"


@pytest.mark.parametrize("source", ["masks", "lookup", "jacobi"])
def test_texts_keep_their_frequencies_beside_rows_with_drafts_of_other_sources(params, source):
    """One step shape for all; more drafts than placeholders, so that some rows have more to check than others."""
    names = ("masks", "lookup", "jacobi")
    plan = plans.Plan(real=4, drafts=3, masks=2, branched=True, sources=names, sampled=True)
    state, settings = rows(
        TableNetwork(), params, plan, [PROMPT] * 3, N, V, max_new_tokens=LENGTH, source=names, width=[2, 3, 3], **WARP
    )
    own = names.index(source)
    state, settings = jax.tree.map(
        lambda a: jnp.concatenate([jnp.repeat(a[own : own + 1], SAMPLES, axis=0), a]), (state, settings)
    )
    seeds = jnp.arange(SAMPLES + 3, dtype=jnp.uint32)
    settings = settings._replace(sampling=settings.sampling._replace(seed=seeds))
    state = decode(TableNetwork(), plan, params, vocabulary(V), settings, state)
    texts = np.array(state.tokens)[:SAMPLES, 1 : 1 + LENGTH] @ V ** np.arange(LENGTH)[::-1]
    assert p_value(np.bincount(texts, minlength=V**LENGTH), probability_of_texts(params)) > 1e-3
    assert LENGTH / np.array(state.forwards)[:SAMPLES].mean() > 1.05, "some drafts must stand, or nothing was tested"


@pytest.mark.parametrize("name", ["chain-3", "tree-1"])
def test_the_test_sees_drafts_warped_differently(params, name, monkeypatch):
    """Had q not gone through the same top-p as p, the frequencies would be plainly wrong."""

    def untruncated(logits, sampling):
        return distribution(logits, sampling._replace(top_p=jnp.ones_like(sampling.top_p)))

    original = choice._choose

    def choose(plan, settings, logits, u):
        chosen = original(plan, settings, logits, u)
        return chosen._replace(q=untruncated(logits, settings.sampling))

    monkeypatch.setattr(choice, "_choose", choose)
    # A plan that no other test has compiled, so that the change takes effect.
    plan = replace(SHAPES[name], sampled=True, real=SHAPES[name].real + 1)
    counts, _ = frequencies(params, plan)
    assert p_value(counts, probability_of_texts(params)) < 1e-6


@pytest.mark.parametrize("name", ["chain-3", "tree-3"])
def test_texts_keep_their_frequencies_when_drafts_are_left_out_now_and_then(params, name):
    """With drafts for two forwards, one without them, then with them again, from no drafts at all."""
    plan = replace(SHAPES[name], sampled=True)
    network, state, given = TableNetwork(), *rows_of_many(params, plan, [PROMPT] * SAMPLES)
    for shape, steps in ((plan, 2), (without_drafts(plan), 1), (plan, LENGTH)):
        state = state._replace(drafts=no_drafts(shape, SAMPLES, V))
        state = decode(network, shape, params, vocabulary(V), given, state, steps=steps)
    texts = np.array(state.tokens)[:, 1 : 1 + LENGTH] @ V ** np.arange(LENGTH)[::-1]
    counts = np.bincount(texts, minlength=V**LENGTH)
    assert p_value(counts, probability_of_texts(params)) > 1e-3
