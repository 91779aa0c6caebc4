import pytest

from mars_jax.evaluation.tally import Tally, total


def test_counts_of_two_answers():
    tally = Tally()
    tally.add([1, 3, 2], prompt_tokens=7, seconds=0.5, truncated=False)
    tally.add([4], prompt_tokens=9, seconds=1.5, truncated=True)
    assert tally.summary() == {
        "answers": 2,
        "prompt_tokens": 16,
        "truncated_prompts": 1,
        "tokens": 10,
        "forwards": 4,
        "tokens_per_forward": 2.5,
        "acceptance_by_offset": [1.0, 0.75, 0.5, 0.25],
        "seconds": 2.0,
        "tokens_per_second": 5.0,
    }
    # The tokens per forward are the sum of the acceptances.
    assert sum(tally.summary()["acceptance_by_offset"]) == pytest.approx(2.5)


def test_nothing_generated_has_no_rates():
    summary = Tally().summary()
    assert (summary["tokens_per_forward"], summary["tokens_per_second"], summary["acceptance_by_offset"]) == (
        None,
        None,
        [],
    )


def test_a_total_is_the_tally_of_all():
    a, b, both = Tally(), Tally(), Tally()
    for tally, runs in [(a, [1, 1]), (b, [3])]:
        for t in (tally, both):
            t.add(runs, prompt_tokens=1, seconds=1.0, truncated=False)
    assert total([a, b]) == both
