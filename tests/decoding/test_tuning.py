"""Choosing a width: expected tokens against runs that happened, the choice from made-up costs, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny

from mars_jax.decoding import tuning
from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions, Generation
from mars_jax.decoding.tuning import Candidate, choose, expected_tokens, step_seconds, survival_of, table, tune
from mars_jax.errors import UserError
from mars_jax.generate import main

CASES = tiny.decode_cases()
VERIFY = DecodeOptions(mode="verify")


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_expected_tokens_where_every_candidate_stands_equally_often(agreement, width):
    """The closed forms, with a**i for the share of runs that reach offset i."""
    survival = [agreement**i for i in range(1, 8)]
    tree = sum(agreement**i for i in range(width + 1))
    assert expected_tokens(survival, width, "tree") == pytest.approx(tree)
    chain = (tree + 1 - agreement**width) / (2 - agreement**width)
    assert expected_tokens(survival, width, "chain") == pytest.approx(chain)


def golden(**settings) -> list[Generation]:
    """Expected decodes of all prompts with these settings."""
    options = DecodeOptions(**settings)
    runs = [run for case in CASES for run in case["runs"] if settings.items() <= run.items()]
    return [Generation(r["token_ids"], "", r["accepted"], "stop", 1, options) for r in runs]


def test_one_run_with_the_widest_tree_tells_what_narrower_shapes_yield():
    survival = survival_of(golden(mode="verify", draft=5, layout="tree"), 5)
    assert survival == sorted(survival, reverse=True)
    for layout in ("tree", "chain"):
        for width in (1, 3, 5):
            results = golden(mode="verify", draft=width, layout=layout)
            happened = np.mean([length for result in results for length in result.accepted[1:-1]])
            assert expected_tokens(survival, width, layout) == pytest.approx(happened, rel=0.1)


def test_cut_and_cold_runs_do_not_count():
    def result(mode, accepted):
        return Generation([], "", accepted, "stop", 1, DecodeOptions(mode=mode))

    assert survival_of([result("verify", [1, 3, 2, 4, 1])], 3) == pytest.approx([1, 2 / 3, 1 / 3])
    assert survival_of([result("window", [1, 3, 1, 4])], 2) == pytest.approx([1 / 3, 1 / 3])
    assert survival_of([result("verify", [1, 4])], 2) == [0.0, 0.0]


def test_the_fastest_is_chosen_and_plain_ar_where_nothing_is_faster():
    ar = Candidate("ar", VERIFY, 1.0, 1.0)
    good, dear = Candidate("good", VERIFY, 1.5, 2.0), Candidate("dear", VERIFY, 4.0, 3.0)
    assert choose([ar, dear, good]) is good
    assert choose([ar, dear]) is ar
    lines = table([ar, good, dear], slots=6).splitlines()
    assert lines[2].startswith("* good")
    assert lines[2].split() == ["*", "good", "1500.00", "2.00", "8.0"]
    assert "chosen: good" in lines[-1]


@pytest.fixture(scope="module")
def engine():
    return DecodeEngine(tiny.model(), slots=3)


PROMPTS = [case["prompt_ids"] for case in CASES[:3]]


def test_what_cannot_win_is_not_measured(engine):
    """Tree steps cost (K + 1)² tokens here, chains 2 K + 1: at some width no acceptance could pay for them."""

    def cost(engine, options, context):
        tree = options.layout == "tree" and options.mode == "verify"
        return float((options.width + 1) ** 2 if tree else 2 * options.width + 1)

    candidates = tune(engine, PROMPTS, VERIFY, cost)
    names = [c.name for c in candidates]
    assert names[0] == "ar"
    assert "verify tree K=1" in names
    assert "verify tree K=7" not in names
    assert choose(candidates).name == "ar"


def test_where_every_step_costs_the_same_the_widest_tree_wins(engine):
    candidates = tune(engine, PROMPTS, VERIFY, lambda *_: 1.0)
    assert len(candidates) == 15
    best = max(c.tokens_per_forward for c in candidates)
    assert choose(candidates).tokens_per_forward == best > 1.5
    assert choose(candidates).options.layout == "tree"


def test_drafts_of_lookup_are_tuned_beside_those_of_placeholders(engine):
    candidates = tune(engine, PROMPTS, replace(VERIFY, lookup=True), lambda *_: 1.0)
    assert [c.options.lookup for c in candidates] == [False] + [True] * 14
    alone = tune(engine, PROMPTS, VERIFY, lambda *_: 1.0)
    assert choose(candidates).tokens_per_forward >= choose(alone).tokens_per_forward


def test_a_step_is_timed_here(engine):
    assert 0 < step_seconds(engine, DecodeOptions(mode="ar"), context=40) < 5


def test_modes_without_a_width_are_refused(engine):
    with pytest.raises(UserError, match="mode 'block' has nothing to tune"):
        tune(engine, PROMPTS, DecodeOptions(mode="block"), lambda *_: 1.0)


def test_the_command_prints_the_table_and_uses_the_choice(monkeypatch, capsys, caplog):
    """A narrow chain is made the cheapest."""

    def cost(engine, options, context):
        return 0.1 if (options.mode, options.layout, options.draft) == ("verify", "chain", 1) else 1.0

    monkeypatch.setattr(tuning, "step_seconds", cost)
    caplog.set_level("INFO", "mars_jax.generate")
    texts = [case["messages"][0]["content"] for case in CASES[:3]]
    assert main(["--model", str(tiny.FOLDER), "--prompt", *texts, "--mode", "verify", "--tune", "--json"]) == 0
    assert "chosen: verify chain K=1" in caplog.text  # logs go to stderr, results to stdout
    for case, line in zip(CASES, capsys.readouterr().out.splitlines(), strict=False):
        (expected,) = [r for r in case["runs"] if (r.get("draft"), r.get("layout")) == (1, "chain")]
        assert json.loads(line)["accepted"] == expected["accepted"]
