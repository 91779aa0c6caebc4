"""Drafts found in the text beside those of placeholders, in one forward: against plain decoding of both chains."""

import numpy as np
import pytest
from helpers import plain_decode, tiny
from helpers.plain_decode import cut, probabilities

from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.errors import UserError

CASES = tiny.decode_cases()
K = 3
# Texts that repeat themselves, where the model has something to look up.
PERIODIC = [tuple((list(range(20, 20 + n)) * 9)[:31]) for n in (2, 3, 5, 7)]


@pytest.fixture(scope="module")
def engine():
    return DecodeEngine(tiny.model(), slots=20)


def decode(engine, prompts, **options):
    return engine.generate([Request(tuple(p), DecodeOptions(mode="verify", draft=K, **options)) for p in prompts])


def found(known):
    """What followed the latest of the longest earlier matches, of at most four tokens, of the last tokens."""
    best = (0, None)
    for end in range(len(known) - 1):
        length = 0
        while length < min(4, end + 1) and known[end - length] == known[-1 - length]:
            length += 1
        best = max(best, (length, end)) if length else best
    return known[best[1] + 1 :][:K] if best[0] else []


def plain(model, prompt, layout, max_new_tokens):
    """`(token_ids, accepted, finish_reason, forwards in which lookup won)`."""
    out, accepted, drafts, reason, wins = [], [], [], None, 0
    while reason is None:
        known, offered = prompt + out, []
        for chain, every in ((drafts, layout == "tree"), (found(prompt + out), False)):
            stops = [len(known) + i for i in range(len(chain) + 1)]
            token_logits, mask_logits = model(known + chain, stops if every else stops[-1:], K)
            greedy = probabilities(token_logits, tiny.emit_mask()).argmax(-1)[len(known) - 1 :].tolist()
            confirmed = 0
            while confirmed < len(chain) and chain[confirmed] == greedy[confirmed]:
                confirmed += 1
            after = mask_logits[confirmed] if every else mask_logits[0]
            ahead = probabilities(after, tiny.emit_mask()).argmax(-1).tolist()
            at_hand = every or confirmed == len(chain)
            offered.append((confirmed, [*chain[:confirmed], greedy[confirmed]], ahead if at_hand else []))
        wins += offered[1][0] > offered[0][0]
        _, run, drafts = offered[offered[1][0] > offered[0][0]]
        run, reason = cut(run, tiny.STOP_IDS, max_new_tokens - len(out))
        out += run
        accepted.append(len(run))
    return out, accepted, reason, wins


@pytest.mark.parametrize("layout", ["chain", "tree"])
def test_runs_are_those_of_plain_decoding_of_both_chains(engine, layout):
    model = plain_decode.model_of(tiny.params(), tiny.CONFIG, tiny.MASK_ID)
    prompts = [*PERIODIC, *(case["prompt_ids"] for case in CASES[:4])]
    results = decode(engine, prompts, layout=layout, lookup=True, max_new_tokens=24)
    expected = [plain(model, list(prompt), layout, 24) for prompt in prompts]
    assert [(r.token_ids, r.accepted, r.finish_reason) for r in results] == [e[:3] for e in expected]
    assert sum(e[3] for e in expected) >= 5, "lookup hardly ever won"


@pytest.mark.parametrize("layout", ["chain", "tree"])
def test_all_golden_answers_are_those_of_ar(engine, layout):
    prompts = [case["prompt_ids"] for case in CASES]
    ar = [next(r for r in case["runs"] if r["mode"] == "ar")["token_ids"] for case in CASES]
    results = decode(engine, prompts, layout=layout, lookup=True, max_new_tokens=48)
    assert [r.token_ids for r in results] == ar


def test_penalties_and_log_probabilities_hold_on_the_branch_that_is_taken(engine):
    options = {"logprobs": 1, "frequency_penalty": 0.3, "max_new_tokens": 16}
    both = decode(engine, PERIODIC, lookup=True, **options)
    ar = engine.generate([Request(p, DecodeOptions(mode="ar", **options)) for p in PERIODIC])
    assert [r.token_ids for r in both] == [r.token_ids for r in ar]
    for ours, theirs in zip(both, ar, strict=True):
        np.testing.assert_allclose([t.logprob for t in ours.logprobs], [t.logprob for t in theirs.logprobs], atol=1e-4)
        assert not any(t.from_placeholder for t in ours.logprobs)


def test_leaving_drafts_out_leaves_the_lookup_out_too(engine):
    engine.adapt = True
    try:
        adapted = decode(engine, PERIODIC * 8, lookup=True, max_new_tokens=60)
    finally:
        engine.adapt = False
    ar = engine.generate([Request(p, DecodeOptions(mode="ar", max_new_tokens=60)) for p in PERIODIC])
    assert [r.token_ids for r in adapted] == [r.token_ids for r in ar] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "window"}, "belongs to mode 'verify', not to 'window'"),
        ({"mode": "lookup"}, "belongs to mode 'verify', not to 'lookup'"),
        ({"mode": "verify", "temperature": 0.5}, "needs temperature 0, not 0.5"),
    ],
)
def test_it_belongs_to_greedy_verify(options, message):
    with pytest.raises(UserError, match=message):
        DecodeOptions(lookup=True, **options)
