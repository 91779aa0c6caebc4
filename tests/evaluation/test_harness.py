"""What the harness asks of us and gets, with decoding scripted."""

import dataclasses

import pytest
from helpers.paths import TINY_QWEN2

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from mars_jax.decoding.requests import DecodeOptions, Generation
from mars_jax.errors import UserError
from mars_jax.evaluation.cache import AnswerCache
from mars_jax.evaluation.harness import MarsLM
from mars_jax.models.loading import load

OPTIONS = DecodeOptions(mode="window", tau=0.5)


@pytest.fixture(scope="module")
def model():
    return load(TINY_QWEN2)


class Script:
    """A decoder that answers every prompt with the same text and remembers what it was asked."""

    def __init__(self, tokenizer, text="two three. Q: four", die_after=None):
        self.token_ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        self.asked = []
        self.die_after = die_after

    def __call__(self, requests):
        for i, request in enumerate(requests):
            if len(self.asked) == self.die_after:
                raise RuntimeError("the machine went away")
            self.asked.append(request)
            accepted = [2] * (len(self.token_ids) // 2) + [1] * (len(self.token_ids) % 2)
            yield i, Generation(self.token_ids, "", accepted, "stop", len(request.token_ids), request.options)


def ask(prompts, task="counting", **options):
    return [
        Instance("generate_until", {}, (prompt, dict(options)), 0, metadata=(task, i, 1))
        for i, prompt in enumerate(prompts)
    ]


def language_model(model, script, cache=None, options=OPTIONS, **changes):
    if changes:
        model = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, **changes))
    return MarsLM(model, script, options, cache=cache or AnswerCache(), batch_size=2)


@pytest.mark.parametrize(
    ("until", "text"),
    [
        ({"until": ["Q:", "never"]}, "two three. "),
        ({"until": "Q:"}, "two three. "),
        ({"until": ["never"]}, "two three. Q: four"),
        ({"until": []}, "two three. Q: four"),
        ({"until": [""]}, "two three. Q: four"),
        ({}, "two three. Q: four"),
        ({"until": ["four", "three"]}, "two "),
    ],
)
def test_stops_in_every_form_cut_the_answer_and_never_the_prompt(model, until, text):
    script = Script(model.tokenizer)
    prompt = "Q: one two three four?\n\nA:"
    assert language_model(model, script).generate_until(ask([prompt], **until)) == [text]
    [request] = script.asked
    assert model.tokenizer.decode(request.token_ids) == prompt
    given = until.get("until", [])
    assert request.options.stop == tuple(stop for stop in ([given] if isinstance(given, str) else given) if stop)


def test_no_blank_line_stop_is_made_up(model):
    """Text after a blank line is part of a chat answer."""
    script = Script(model.tokenizer, text="one\n\ntwo")
    assert language_model(model, script).generate_until(ask(["A:"])) == ["one\n\ntwo"]


def test_the_length_is_the_tasks_own(model):
    script = Script(model.tokenizer)
    language_model(model, script).generate_until(
        ask(["a"], max_gen_toks=7) + ask(["b"], max_new_tokens=9) + ask(["c"]) + ask(["d"], max_gen_toks="11")
    )
    assert {r.options.max_new_tokens for r in script.asked} == {7, 9, 256, 11}
    assert {(r.options.mode, r.options.tau) for r in script.asked} == {("window", 0.5)}


def test_sampling_is_the_tasks_own_and_repeats_differ(model):
    script = Script(model.tokenizer)
    lm = language_model(model, script)
    lm.generate_until(ask(["a", "a", "a"], do_sample=True, temperature=0.8, top_p=0.95) + ask(["a"], do_sample=False))
    sampled = [r.options for r in script.asked if r.options.temperature]
    assert [(o.temperature, o.top_p) for o in sampled] == [(0.8, 0.95)] * 3
    assert len({o.seed for o in sampled}) == 3
    assert [r.options.temperature for r in script.asked].count(0.0) == 1


def test_an_over_long_prompt_loses_its_left_end_and_is_counted(model):
    script = Script(model.tokenizer)
    lm = language_model(model, script, max_positions=40)
    ids = model.tokenizer.encode("one two three four five six seven eight nine ten " * 4)
    lm.generate_until(ask([model.tokenizer.decode(ids), "short"], max_gen_toks=16))
    by_length = sorted(script.asked, key=lambda r: len(r.token_ids))
    assert list(by_length[1].token_ids) == ids[-24:]
    assert lm.tallies["counting"].truncated_prompts == 1
    with pytest.raises(UserError, match="40"):
        lm.generate_until(ask(["x"], max_gen_toks=40))


def test_prompts_are_the_chat_templates_and_nothing_is_added(model):
    script = Script(model.tokenizer)
    lm = language_model(model, script)
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Count from 2 to 6."}]
    for messages in (chat, chat[1:]):
        lm.generate_until(ask([lm.apply_chat_template(messages)], task=str(len(messages))))
        expected = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert list(script.asked[-1].token_ids) == expected
    begun = lm.apply_chat_template([*chat, {"role": "assistant", "content": "2, 3"}], add_generation_prompt=False)
    assert begun.endswith("2, 3")


def test_a_bos_in_the_text_is_not_doubled(model):
    import copy

    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(model.tokenizer)
    bos, bos_id = tokenizer.eos_token, tokenizer.eos_token_id  # any token will do
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    lm = language_model(dataclasses.replace(model, tokenizer=tokenizer), Script(tokenizer))
    assert lm.tok_encode("one").count(bos_id) == 1
    assert lm.tok_encode(bos + "one").count(bos_id) == 1


def test_counts_by_task(model):
    script = Script(model.tokenizer)
    lm = language_model(model, script)
    lm.generate_until(ask(["a", "b"]) + ask(["c"], task="spelling"))
    size = len(script.token_ids)
    summary = lm.tallies["counting"].summary()
    assert (summary["answers"], summary["tokens"], summary["forwards"]) == (2, 2 * size, 2 * ((size + 1) // 2))
    assert lm.tallies["spelling"].answers == 1
    assert summary["seconds"] > 0


def test_a_second_run_takes_up_where_the_first_died(model, tmp_path):
    path = tmp_path / "answers.jsonl"
    prompts = [f"number {i}" for i in range(5)]
    with pytest.raises(RuntimeError):
        language_model(model, Script(model.tokenizer, die_after=3), AnswerCache(path)).generate_until(ask(prompts))
    script = Script(model.tokenizer)
    resumed = language_model(model, script, AnswerCache(path))
    texts = resumed.generate_until(ask(prompts, until="Q:"))
    assert len(script.asked) == 5  # other stops: other answers
    again = Script(model.tokenizer)
    resumed = language_model(model, again, AnswerCache(path))
    assert resumed.generate_until(ask(prompts)) == ["two three. Q: four"] * 5 and texts == ["two three. "] * 5
    assert len(again.asked) == 2
    assert resumed.tallies["counting"].answers == 5  # counts cover what was cached


def test_other_weights_or_settings_share_no_answers(model):
    cache = AnswerCache()
    scripts = [Script(model.tokenizer) for _ in range(3)]
    language_model(model, scripts[0], cache).generate_until(ask(["a"]))
    language_model(model, scripts[1], cache, DecodeOptions(mode="window", tau=0.6)).generate_until(ask(["a"]))
    trained = dataclasses.replace(
        model, params={**model.params, "final_norm": {"scale": model.params["final_norm"]["scale"] * 1.01}}
    )
    language_model(trained, scripts[2], cache).generate_until(ask(["a"]))
    assert [len(script.asked) for script in scripts] == [1, 1, 1]


def test_equal_greedy_requests_are_decoded_once(model):
    script = Script(model.tokenizer)
    lm = language_model(model, script)
    assert len(lm.generate_until(ask(["a", "a", "b"]))) == 3
    assert len(script.asked) == 2 and lm.tallies["counting"].answers == 3


def test_rolling_windows_add_up(model):
    """The rolling log-likelihood of a text is the sum over its windows, whatever their length."""
    lm = language_model(model, Script(model.tokenizer))
    text = "Count from 2 to 6. 2, 3, 4, 5, 6."
    ids = model.tokenizer.encode(text)
    [whole] = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    [(expected, _)] = lm._loglikelihood_tokens([(None, [lm.prefix_token_id], ids)])
    assert whole == pytest.approx(expected, abs=1e-3)
    short = language_model(model, Script(model.tokenizer), max_positions=8)
    [windowed] = short.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    assert windowed < whole + 5 and windowed != pytest.approx(whole, abs=1e-3)  # less context, other numbers


def test_loglikelihoods_are_cached(model, monkeypatch):
    from mars_jax.evaluation import harness

    requests = [Instance("loglikelihood", {}, ("Count from 2", " to 6"), 0)] * 2
    cache = AnswerCache()
    first = language_model(model, None, cache).loglikelihood(requests, disable_tqdm=True)
    assert first[0] == first[1]
    monkeypatch.setattr(harness, "score_continuations", lambda params, cfg, pairs, **_: zip(pairs, pairs, strict=True))
    assert language_model(model, None, cache).loglikelihood(requests, disable_tqdm=True) == first
