"""When drafts pay: the choice from numbers alone, and rows that change shape in mid-text."""

import numpy as np
import pytest
from helpers import tiny

from mars_jax.decoding import adaptation
from mars_jax.decoding.adaptation import Adaptation, Known, Turn, drafts_pay, trial_interval
from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.loop import decode
from mars_jax.decoding.requests import DecodeOptions, Request

CASES = tiny.decode_cases()
ROWS = 8
CALL = 16  # steps of an ordinary call


def test_drafts_pay_when_a_step_commits_more_than_it_costs():
    assert drafts_pay(Known(narrow=1.0, wide=2.0, tokens_per_forward=2.2), wide=False)
    assert not drafts_pay(Known(narrow=1.0, wide=3.0, tokens_per_forward=2.2), wide=True)


def test_a_difference_below_the_margin_changes_nothing():
    close = Known(narrow=1.0, wide=2.0, tokens_per_forward=2.01)
    assert drafts_pay(close, wide=True)
    assert not drafts_pay(close, wide=False)


def test_the_dearer_a_trial_the_rarer():
    cheap, dear = Known(1.0, 2.1, 2.0), Known(1.0, 6.0, 1.5)
    assert trial_interval(cheap, wide=False) < trial_interval(dear, wide=False)
    # 4 steps of 6 give 6 tokens worth 6 steps, and the cold one loses 5 more.
    assert trial_interval(dear, wide=False) == pytest.approx((4 * 1.5 * (6 / 1.5 - 1) + 5) / 0.02)
    assert trial_interval(Known(1.0, 1.0, 3.0), wide=False) == adaptation.LEAST_INTERVAL


def simulated(cost, accepted, tokens: int, noise: float = 0.0, seed: int = 0, policy=None) -> tuple[float, float]:
    """Time per token of a row's share, in autoregressive steps, and the share of steps with drafts.

    cost: of a step with drafts. accepted: tokens a forward, a function of the tokens so far.
    """
    rng = np.random.default_rng(seed)
    policy = Adaptation() if policy is None else policy
    time = done = wide_steps = all_steps = 0.0
    was_wide, unread = False, None
    while done < tokens:
        turn = policy.turn(512)
        steps = turn.steps or CALL
        seconds = steps * (cost if turn.wide else 1.0)
        cold = np.full(ROWS, turn.wide and not was_wide)
        warm = steps - int(cold[0])
        per_row = np.full(ROWS, float(steps))
        if turn.wide:
            per_row = cold + warm * np.clip(rng.normal(accepted(done), 0.2, ROWS), 1, None)
        time, done = time + seconds, done + per_row.mean()
        wide_steps, all_steps = wide_steps + steps * turn.wide, all_steps + steps
        if turn.timed:
            policy.took(turn.wide, steps, seconds * (1 + noise * abs(rng.standard_normal())))
        if unread:
            policy.saw(*unread)  # one call late
        unread = (turn.wide, per_row, np.full(ROWS, steps), cold)
        was_wide = turn.wide
    return time / done, wide_steps / all_steps


@pytest.mark.parametrize("cost", [1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("accepted", [1.0, 1.4, 2.2, 3.5])
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_it_is_never_much_slower_than_the_better_shape(cost, accepted, noise):
    time, _ = simulated(cost, lambda done: accepted, tokens=4000, noise=noise)
    best = min(1.0, cost / accepted)
    assert time < best * 1.04


def test_it_follows_the_text():
    """Plain text for long, then text that drafts know: they come back."""
    time, share = simulated(2.0, lambda done: 1.2 if done < 4000 else 3.6, tokens=24_000)
    ideal = (4000 + 20_000 * 2.0 / 3.6) / 24_000
    assert time < 1.05 * ideal
    assert share > 0.5


def test_what_was_learned_serves_the_next_batch_from_its_first_step():
    policy = Adaptation()
    simulated(4.0, lambda done: 1.3, tokens=500, policy=policy)
    assert policy.turn(512) == Turn(wide=False)


def test_no_call_that_compiles_is_timed():
    policy, seen = Adaptation(), set()
    for slots in (512, 512, 512, 512, 1024, 1024, 1024, 512):
        turn = policy.turn(slots)
        assert turn.timed is False or (turn.wide, slots) in seen
        seen.add((turn.wide, slots))
        if turn.timed:
            policy.took(turn.wide, 4, 4.0)


class AtRandom(Adaptation):
    """Changes the shape at random, for a random number of steps."""

    def __init__(self, seed: int):
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.shapes = []

    def turn(self, sizes):
        self.shapes.append(bool(self.rng.integers(2)))
        return Turn(self.shapes[-1], steps=int(self.rng.integers(1, 5)), timed=bool(self.rng.integers(2)))


KINDS = {
    "tree": {"mode": "verify", "draft": 3, "layout": "tree"},
    "chain": {"mode": "verify", "draft": 3, "layout": "chain"},
    "lookup": {"mode": "lookup", "draft": 3},
    "jacobi": {"mode": "jacobi", "draft": 3},
}


def switching(seed: int) -> tuple[DecodeEngine, AtRandom]:
    engine, policy = DecodeEngine(tiny.model(), slots=3, steps=4, adapt=True), AtRandom(seed)
    engine._adaptations.default_factory = lambda: policy
    return engine, policy


@pytest.mark.parametrize("kind", KINDS)
def test_changing_the_shape_at_random_points_leaves_the_text_as_it_is(kind):
    engine, policy = switching(seed=1)
    requests = [Request(tuple(case["prompt_ids"]), DecodeOptions(**KINDS[kind])) for case in CASES[:9]]
    for case, result in zip(CASES, engine.generate(requests), strict=False):
        (expected,) = [run["token_ids"] for run in case["runs"] if run["mode"] == "ar"]
        assert result.token_ids == expected
        assert sum(result.accepted) == len(result.token_ids)
        assert min(result.accepted) >= 1
    assert {True, False} == set(policy.shapes)
    known = policy.known
    assert known is not None
    assert 1 < known.tokens_per_forward <= 4, "drafts must have stood and fallen"


def test_changing_the_shape_compiles_nothing_and_moves_no_cache():
    engine, policy = switching(seed=2)
    requests = [Request(tuple(case["prompt_ids"]), DecodeOptions(**KINDS["tree"])) for case in CASES[:6]]
    engine.generate(requests)
    before = decode._cache_size()
    engine.generate(requests)
    assert decode._cache_size() == before
    assert sum(a != b for a, b in zip(policy.shapes, policy.shapes[1:], strict=False)) > 10


def test_coming_back_to_a_shape_compiles_nothing():
    """A trial is timed, long after both shapes were first seen."""

    class TwoByTwo(Adaptation):
        calls, sizes = 0, []

        def turn(self, sizes):
            self.sizes.append(decode._cache_size())
            self.calls += 1
            return Turn(self.calls % 4 in (1, 2), steps=1)

    engine, policy = DecodeEngine(tiny.model(), slots=5, adapt=True), TwoByTwo()
    engine._adaptations.default_factory = lambda: policy
    engine.generate([Request(tuple(CASES[0]["prompt_ids"]), DecodeOptions(**KINDS["tree"], max_new_tokens=40))] * 5)
    assert len(policy.sizes) > 8
    assert policy.sizes[3] == policy.sizes[0] + 2, "one program for each shape"
    assert policy.sizes[3:] == [policy.sizes[3]] * len(policy.sizes[3:])


def test_a_batch_that_trusts_scores_keeps_its_shape():
    engine, policy = switching(seed=3)
    options = [DecodeOptions(**KINDS["tree"]), DecodeOptions(mode="window", tau=0.9)]
    results = engine.generate([Request(tuple(CASES[0]["prompt_ids"]), o) for o in options])
    assert policy.shapes == []
    assert max(results[1].accepted) > 1


def test_without_adapt_run_lengths_are_those_of_the_full_width():
    engine, policy = switching(seed=4)
    engine.adapt = False
    (result,) = engine.generate([Request(tuple(CASES[0]["prompt_ids"]), DecodeOptions(**KINDS["tree"]))])
    assert policy.shapes == []
    expected = [run for run in CASES[0]["runs"] if KINDS["tree"].items() <= run.items()]
    assert result.accepted == expected[0]["accepted"]


def test_the_adapting_engine_measures_both_shapes_and_settles():
    engine = DecodeEngine(tiny.model(), slots=2, adapt=True)
    requests = [Request(tuple(case["prompt_ids"]), DecodeOptions(**KINDS["tree"])) for case in CASES[:12]]
    results = engine.generate(requests)
    for case, result in zip(CASES, results, strict=False):
        (expected,) = [run["token_ids"] for run in case["runs"] if run["mode"] == "ar"]
        assert result.token_ids == expected
    (policy,) = engine._adaptations.values()
    known = policy.known
    assert known.narrow > 0
    assert known.wide > 0
    assert 1 < known.tokens_per_forward <= 7
