"""The engine on the golden checkpoint: many requests, few slots, settings of their own, stops."""

import jax
import numpy as np
import pytest
from helpers import plain_decode, tiny

from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.loop import decode
from mars_jax.decoding.planning import shares_steps_with
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.decoding.stops import find_stop
from mars_jax.errors import UserError

CASES = tiny.decode_cases()


@pytest.fixture(scope="module")
def engine():
    return DecodeEngine(tiny.model(), slots=3, steps=4)


def requests(count=11, **options):
    return [Request(tuple(case["prompt_ids"]), DecodeOptions(**options)) for case in CASES[:count]]


def expected(case, **settings):
    (run,) = [r for r in case["runs"] if settings.items() <= r.items()]
    return run["token_ids"], run["accepted"]


WINDOW = {"mode": "window", "tau": 0.9, "window": 3, "score": "probability", "gate_first": False}
CHAIN = {"mode": "verify", "draft": 3, "layout": "chain"}


def test_more_requests_than_slots_of_different_modes_and_settings_share_a_batch(engine):
    """Eleven requests in three slots; modes, limits and thresholds of neighbours all differ."""
    kinds = [{"mode": "ar"}, WINDOW, CHAIN, WINDOW | {"tau": 0.0}]
    mixed = [
        Request(tuple(case["prompt_ids"]), DecodeOptions(**kinds[i % 4], max_new_tokens=48 - i))
        for i, case in enumerate(CASES[:11])
    ]
    for i, result in enumerate(engine.generate(mixed)):
        assert (result.token_ids, result.accepted) == expected(CASES[i], **kinds[i % 4])


ALL_SOURCES = [
    {"mode": "lookup", "draft": 2},
    {"mode": "verify", "draft": 3, "layout": "tree"},
    {"mode": "jacobi", "draft": 2},
    WINDOW,
    {"mode": "verify", "draft": 2, "layout": "tree", "lookup": True},
    {"mode": "lookup", "draft": 5},
    {"mode": "ar"},
    {"mode": "jacobi", "draft": 4},
]


def test_rows_with_drafts_of_all_sources_and_widths_share_a_batch_and_go_on_as_if_alone(engine):
    """Runs too, not only texts: a row's own drafts are checked, as many as it asked for."""
    groups = {shares_steps_with(DecodeOptions(**kind)) for kind in ALL_SOURCES}
    assert len(groups) == 1
    asked = [
        Request(tuple(case["prompt_ids"]), DecodeOptions(**kind, seed=7, max_new_tokens=40))
        for case, kind in zip(CASES, ALL_SOURCES * 3, strict=False)
    ]
    together = engine.generate(asked)
    for i, kind in enumerate(ALL_SOURCES):
        alone = engine.generate(asked[i :: len(ALL_SOURCES)])
        found = [(r.token_ids, r.accepted) for r in together[i :: len(ALL_SOURCES)]]
        assert found == [(r.token_ids, r.accepted) for r in alone], kind


@pytest.mark.parametrize("mode", ["lookup", "jacobi"])
def test_drafts_of_other_sources_give_the_autoregressive_text(engine, mode):
    results = engine.generate(requests(mode=mode, draft=3))
    for case, result in zip(CASES, results, strict=False):
        assert result.token_ids == expected(case, mode="ar")[0]
    tokens, forwards = sum(len(r.token_ids) for r in results), sum(r.forwards for r in results)
    assert forwards < tokens, "no draft ever stood"


@pytest.mark.parametrize("values", [{"slots": 0}, {"slots": 2, "steps": 0}])
def test_an_engine_without_slots_or_steps_is_refused(values):
    with pytest.raises(UserError, match="expected at least 1"):
        DecodeEngine(tiny.model(), **values)


def test_nothing_compiles_for_new_prompts_settings_or_counts(engine):
    engine.generate(requests(5, **WINDOW, max_new_tokens=90))
    before = decode._cache_size()
    engine.generate(requests(9, **WINDOW | {"tau": 0.3, "score": "margin", "gate_first": True}, max_new_tokens=17))
    longer = [Request(r.token_ids[:7], r.options) for r in requests(2, **WINDOW, max_new_tokens=23)]
    engine.generate(longer)
    assert decode._cache_size() == before


def test_results_come_as_rows_finish(engine):
    """A long answer holds one slot; short ones pass it in the two others."""
    long, *short = requests(6, mode="ar", max_new_tokens=90)
    short = [Request(r.token_ids, DecodeOptions(mode="ar", max_new_tokens=2)) for r in short]
    order = [index for index, _ in engine.completed([long, *short])]
    assert sorted(order) == list(range(6))
    assert order.index(0) >= 3


SAMPLED = {"mode": "verify", "temperature": 0.8, "top_p": 0.95, "max_new_tokens": 24}


def test_a_seeded_row_does_not_depend_on_its_neighbours_or_slot(engine):
    """Alone; then in each place among rows with other seeds, temperatures and modes. Always the same step shape."""
    prompt = tuple(CASES[0]["prompt_ids"])
    own = Request(prompt, DecodeOptions(**SAMPLED, seed=42))
    mates = [
        Request(tuple(CASES[3]["prompt_ids"]), DecodeOptions(**SAMPLED)),
        Request(tuple(CASES[5]["prompt_ids"]), DecodeOptions(tau=0.5, temperature=1.3, max_new_tokens=9)),
    ]
    alone = engine.generate([own])[0]
    for place in range(3):
        batch = [*mates[:place], own, *mates[place:]]
        result = engine.generate(batch)[place]
        assert (result.token_ids, result.accepted) == (alone.token_ids, alone.accepted)


def test_without_a_seed_answers_differ_and_with_one_they_do_not(engine):
    prompt = tuple(CASES[0]["prompt_ids"])
    free = engine.generate([Request(prompt, DecodeOptions(**SAMPLED)) for _ in range(5)])
    assert len({tuple(r.token_ids) for r in free}) > 1
    seeded = engine.generate([Request(prompt, DecodeOptions(**SAMPLED, seed=7)) for _ in range(4)])
    assert len({tuple(r.token_ids) for r in seeded}) == 1


@pytest.mark.parametrize("mode", ["ar", "window", "verify"])
def test_stop_strings_end_at_the_same_place_in_every_mode(engine, mode):
    """Each piece of each text in turn, whether inside one token, one run, or across them."""
    full = engine.generate(requests(3, mode=mode, tau=0.0))
    batch, wanted = [], []
    for case, result in zip(CASES, full, strict=False):
        for start in range(0, len(result.text) - 2, 5):
            stop = result.text[start : start + 3]
            batch.append(Request(tuple(case["prompt_ids"]), DecodeOptions(mode=mode, tau=0.0, stop=("zzz", stop))))
            wanted.append(result.text[: result.text.index(stop)])
    for request, text, result in zip(batch, wanted, engine.generate(batch), strict=True):
        assert (result.text, result.finish_reason) == (text, "stop")
        assert sum(result.accepted) == len(result.token_ids)
        complete = engine.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        assert request.options.stop[1] in complete
        before = engine.tokenizer.decode(result.token_ids[:-1], skip_special_tokens=True)
        assert request.options.stop[1] not in before, "tokens after the stop were kept"


def test_the_first_completed_stop_counts():
    def text(ids):
        return "".join("abcdef"[i] for i in ids)

    assert find_stop(text, [0, 1, 2, 3], ["cd", "b"]) == (2, "a")
    assert find_stop(text, [0, 1, 2, 3], ["bcd", "cd"]) == (4, "a")
    assert find_stop(text, [0, 1, 2], ["x", "cd"]) is None
    assert find_stop(text, [0, 1, 2, 3], ["b"], least=3) == (3, "a")


def test_penalties_and_bias_hold_at_every_position_of_a_run(engine):
    plain = engine.generate(requests(3, mode="window", tau=0.0))
    banned = {token: -100.0 for r in plain for token in r.token_ids[:6] if token not in tiny.STOP_IDS}
    for options in ({"mode": "window", "tau": 0.0}, {"mode": "verify"}, {"mode": "ar"}):
        for result in engine.generate(requests(3, **options, logit_bias=banned)):
            assert not set(result.token_ids) & set(banned)
    penalised = [
        engine.generate(requests(3, **options, frequency_penalty=1.5, repetition_penalty=1.2, max_new_tokens=20))
        for options in ({"mode": "ar"}, {"mode": "window", "tau": 1.0}, {"mode": "verify"}, {"mode": "lookup"})
    ]
    texts = [[r.token_ids for r in results] for results in penalised]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert texts[0] != [r.token_ids[:20] for r in plain]


def test_a_minimum_length_bans_end_tokens_before_it(engine):
    results = engine.generate(requests(4, mode="verify", min_new_tokens=30, max_new_tokens=40))
    for result in results:
        assert len(result.token_ids) >= 30
        assert not set(result.token_ids[:29]) & set(tiny.STOP_IDS)


@pytest.mark.parametrize("mode", ["window", "verify"])
def test_log_probabilities_are_those_of_a_plain_forward(engine, mode):
    plain = plain_decode.model_of(tiny.params(), tiny.CONFIG, tiny.MASK_ID)
    for request, result in zip(asked := requests(2, mode=mode, logprobs=2), engine.generate(asked), strict=True):
        assert len(result.logprobs) == len(result.token_ids)
        prompt, done, place = list(request.token_ids), 0, 0
        for length in result.accepted:
            for i in range(length):
                from_placeholder = mode == "window" and i > 0
                known = prompt + result.token_ids[: done if from_placeholder else place]
                token_logits, mask_logits = plain(known, [len(known)], 3)
                logits = mask_logits[0, i - 1] if from_placeholder else token_logits[-1]
                p = np.log(plain_decode.probabilities(logits, tiny.emit_mask()) + 1e-30)
                entry = result.logprobs[place]
                assert entry.from_placeholder == from_placeholder
                assert entry.logprob == pytest.approx(p[result.token_ids[place]], abs=1e-3)
                assert list(entry.top) == np.argsort(-p)[:2].tolist()
                assert list(entry.top.values()) == pytest.approx(np.sort(-p)[:2] * -1, abs=1e-3)
                place += 1
            done = place


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "best"}, "mode='best'"),
        ({"tau": "x"}, "tau='x'"),
        ({"window": 1.5}, "window=1.5: expected an integer"),
        ({"top_p": 1.1}, "top_p=1.1: expected a number from 0 to 1"),
        ({"stop": "end"}, "stop='end': expected a list"),
        ({"stop": ("",)}, "none of them empty"),
        ({"seed": -1}, "seed=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(UserError, match=message):
        DecodeOptions(**options)


def test_every_program_is_said_to_be_compiled_once(caplog):
    caplog.set_level("INFO", logger="mars_jax")
    engine = DecodeEngine(tiny.model(), slots=2)
    prompt = tuple(range(20, 30))
    short = [Request(prompt, DecodeOptions(mode="ar", max_new_tokens=n)) for n in (2, 3)]
    engine.generate(short)
    engine.generate(short)
    said = [
        "compiling the prefill of 32 tokens, cache 2 × 128",
        "compiling the decoding step of 2 × 1 tokens, cache 2 × 128, texts up to 128",
    ]
    assert [r.getMessage() for r in caplog.records if r.name == "mars_jax.decoding.batch"] == said
    engine.generate([Request(prompt, DecodeOptions(mode="verify", draft=1, max_new_tokens=2))])
    more = caplog.records[-1].getMessage()
    assert more == "compiling the decoding step of 2 × 4 tokens, cache 2 × 128, texts up to 128"


def test_a_step_does_not_copy_the_cache():
    """Temporary memory of the loop stays far below the cache's size, and the cache's buffers are reused."""
    engine = DecodeEngine(tiny.model(), slots=4)
    from mars_jax.decoding.batch import Batch

    batch = Batch(engine, [Request((1,), DecodeOptions(mode="ar", max_new_tokens=900))])
    batch._grow(1024)
    arguments = (engine.weights, engine.vocabulary, batch.settings, batch.state, 8, False)
    compiled = decode.lower(engine.network, batch.plan, *arguments).compile()
    memory = compiled.memory_analysis()
    cache_bytes = sum(a.nbytes for a in jax.tree.leaves(batch.state.cache))
    assert memory.alias_size_in_bytes >= cache_bytes
    one_array = cache_bytes / (2 * tiny.CONFIG.num_layers)
    assert memory.temp_size_in_bytes < one_array
