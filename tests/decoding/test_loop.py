"""The loop with a model whose logits the test chooses."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.decoding import ScriptedNetwork, peaked, run, vocabulary

from mars_jax.decoding import plan as plans

V, N, W = 11, 48, 3
NETWORK = ScriptedNetwork()
END = 10
PROMPT = [1, 2, 3]


def sequence(first: int = 0, count: int = N) -> np.ndarray:
    """The text the model has in mind: 1 2 3 … 9 1 2 3 …"""
    return (np.arange(first, first + count)) % 9 + 1


def script(p_after=0.95, p_ahead=0.95, text=None, ahead=None):
    """A model that continues `text`; its placeholders do so too, unless `ahead` gives them a text of their own."""
    text = sequence() if text is None else text
    ahead = text if ahead is None else ahead
    after = peaked(np.roll(text, -1), np.full(N, p_after), V)
    places = (np.arange(N)[:, None] + np.arange(1, W + 1)) % N
    return jnp.array(after), jnp.array(peaked(ahead[places], np.broadcast_to(p_ahead, (N, W)), V))


def decode(params, plan=None, prompts=(PROMPT,), **options):
    return run(NETWORK, params, plan or plans.window(W), vocabulary(V), list(prompts), N, **options)


@pytest.mark.parametrize("tau", [1.0, 1.5])
@pytest.mark.parametrize("score", ["probability", "margin"])
def test_tau_of_one_takes_one_token_a_forward_even_where_softmax_rounds_to_one(tau, score):
    certain = script(p_after=1.0, p_ahead=1.0)
    ((ids, accepted, reason),) = decode(certain, tau=tau, score=score, max_new_tokens=9)
    assert (ids, accepted, reason) == (sequence(3, 9).tolist(), [1] * 9, "length")


@pytest.mark.parametrize("score", ["probability", "margin"])
def test_tau_of_zero_takes_all(score):
    ((ids, accepted, _),) = decode(script(p_ahead=0.2), tau=0.0, score=score, max_new_tokens=10)
    assert (ids, accepted) == (sequence(3, 10).tolist(), [4, 4, 2])


def test_a_run_ends_before_the_first_candidate_that_fails():
    ((ids, accepted, _),) = decode(script(p_ahead=np.array([0.95, 0.5, 0.95])), tau=0.9, max_new_tokens=8)
    assert (ids, accepted) == (sequence(3, 8).tolist(), [2, 2, 2, 2])


@pytest.mark.parametrize(("gate", "runs"), [(False, [4, 4]), (True, [1] * 8)])
def test_an_unsure_first_token_ends_the_run_only_where_asked(gate, runs):
    ((_, accepted, _),) = decode(script(p_after=0.5), gate_first=gate, max_new_tokens=8)
    assert accepted == runs


def test_entropy_is_an_upper_bound_in_nats():
    p = 0.6
    entropy = -(p * np.log(p) + 0.4 * np.log(0.4 / (V - 1)))
    for tau, runs in [(entropy + 1e-3, [4, 4]), (entropy - 1e-3, [1] * 8)]:
        ((_, accepted, _),) = decode(script(p_ahead=p), tau=tau, score="entropy", max_new_tokens=8)
        assert accepted == runs


def test_margin_is_between_the_two_best():
    after, ahead = script(p_ahead=0.5)
    margin = 0.5 - 0.5 / (V - 1)
    for tau, runs in [(margin + 1e-3, [1] * 8), (margin - 1e-3, [4, 4])]:
        ((_, accepted, _),) = decode((after, ahead), tau=tau, score="margin", max_new_tokens=8)
        assert accepted == runs


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("mode", ["window", "chain", "tree", "ar"])
def test_an_end_token_cuts_the_run_wherever_it_falls(place, mode):
    text = sequence()
    text[3 + place] = END
    plan = {
        "window": plans.window(W),
        "chain": plans.verify(W, branched=False),
        "tree": plans.verify(W, branched=True),
        "ar": plans.autoregressive(),
    }[mode]
    ((ids, accepted, reason),) = decode(script(text=text), plan, stop=(0, END), tau=0.5)
    assert ids == text[3 : 4 + place].tolist()
    assert sum(accepted) == len(ids)
    assert reason == "stop"


def test_an_end_token_beyond_the_limit_is_not_a_stop():
    text = sequence()
    text[3 + 2] = END
    for limit, reason in [(2, "length"), (3, "stop")]:
        ((ids, _, found),) = decode(script(text=text), stop=(END,), max_new_tokens=limit)
        assert (ids, found) == (text[3 : 3 + limit].tolist(), reason)


def test_every_end_token_ends_and_each_row_has_its_own_settings():
    prompts = [PROMPT, PROMPT, PROMPT[:2], PROMPT]
    found = decode(script(), prompts=prompts, tau=[1.0, 0.0, 0.9, 0.99], max_new_tokens=[3, 5, 6, 2])
    assert [f[1] for f in found] == [[1, 1, 1], [4, 1], [4, 2], [1, 1]]
    assert found[2][0] == sequence(2, 6).tolist()
    ((ids, _, reason),) = decode(script(), stop=(9, 6), tau=0.0)
    assert (ids, reason) == ([4, 5, 6], "stop")


def test_ids_that_may_not_be_emitted_take_no_probability():
    """`[MASK]` has nearly all of the mass everywhere; without it the candidates are sure."""
    after, ahead = (np.array(a) for a in script())
    after[..., 0] = ahead[..., 0] = 50.0
    params = (jnp.array(after), jnp.array(ahead))
    ((ids, accepted, _),) = run(
        NETWORK, params, plans.window(W), vocabulary(V, never=[0]), [PROMPT], N, tau=0.9, max_new_tokens=8
    )
    assert (ids, accepted) == (sequence(3, 8).tolist(), [4, 4])


def test_chain_starts_cold_after_a_refusal_and_tree_does_not():
    """Placeholders are right but for one in each four."""
    wrong = sequence()
    wrong[::4] = 9 - wrong[::4] // 2
    params = script(ahead=wrong)
    ((ids, chain, _),) = decode(params, plans.verify(W, branched=False), max_new_tokens=20)
    assert ids == sequence(3, 20).tolist()
    ((ids, tree, _),) = decode(params, plans.verify(W, branched=True), max_new_tokens=20)
    assert ids == sequence(3, 20).tolist()
    assert chain[0] == tree[0] == 1
    assert 1 in chain[1:]
    assert len(tree) < len(chain)


@pytest.mark.parametrize("branched", [False, True])
@pytest.mark.parametrize("agree", range(W + 1))
def test_expected_lengths_of_exact_runs(branched, agree):
    """The first `agree` placeholders of every group are right, the next is wrong: warm forwards give agree + 1."""
    after, ahead = (np.array(a) for a in script())
    if agree < W:
        ahead[:, agree] = np.roll(ahead[:, agree], 1, axis=-1)
    ((ids, accepted, _),) = decode(
        (jnp.array(after), jnp.array(ahead)), plans.verify(W, branched=branched), max_new_tokens=21
    )
    assert ids == sequence(3, 21).tolist()
    warm = agree + 1
    pattern = [1] + [warm] * 30 if branched or agree == W else [1, warm] * 30
    counted = np.cumsum(pattern)
    full = int((counted < 21).sum())
    assert accepted[:full] == pattern[:full]


def test_a_forward_without_room_for_its_run_ends_with_length():
    ((ids, accepted, reason),) = decode(script(), tau=0.0, prompts=[sequence(0, N - 6).tolist()])
    assert (ids, accepted, reason) == (sequence(N - 6, 6).tolist(), [4, 2], "length")
