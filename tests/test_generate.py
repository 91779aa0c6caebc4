"""The command's contract: what it reads, writes and refuses."""

import io
import json

import pytest
from helpers import tiny

import mars_jax
from mars_jax.decoding.prompts import read_prompts
from mars_jax.generate import main

MODEL = ["--model", str(tiny.FOLDER)]
CASES = tiny.decode_cases()
TEXTS = [case["messages"][0]["content"] for case in CASES[:3]]


def run_of(case, mode, **settings):
    (run,) = [r for r in case["runs"] if {"mode": mode, **settings}.items() <= r.items()]
    return run


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def test_json_lines_of_the_contract_in_input_order(capsys):
    assert main([*MODEL, "--prompt", *TEXTS, "--json", "--mode", "verify", "--batch-size", "2"]) == 0
    records = lines(capsys.readouterr().out)
    assert [r["id"] for r in records] == ["0", "1", "2"]
    for case, record in zip(CASES, records, strict=False):
        expected = run_of(case, "verify", draft=3, layout="tree")
        assert list(record) == [
            "id", "text", "token_ids", "finish_reason", "prompt_tokens", "forwards", "accepted", "mode", "tau",
        ]  # fmt: skip
        assert record["token_ids"] == expected["token_ids"]
        assert record["accepted"] == expected["accepted"]
        assert record["forwards"] == len(record["accepted"])
        assert record["prompt_tokens"] == len(case["prompt_ids"])
        assert (record["mode"], record["finish_reason"]) == ("verify", "stop")
        assert record["text"] == tiny.model().tokenizer.decode(expected["token_ids"][:-1])


def test_a_file_of_prompts_with_settings_of_their_own(tmp_path, capsys):
    case = CASES[0]
    source = write_jsonl(
        tmp_path / "prompts.jsonl",
        [
            {"prompt": TEXTS[0], "id": "text"},
            {"messages": case["messages"], "id": "chat", "mode": "ar"},
            {"token_ids": case["prompt_ids"], "tau": 1.0, "max_new_tokens": 5},
        ],
    )
    out = tmp_path / "out.jsonl"
    assert main([*MODEL, "--prompts", source, "--output", str(out), "--tau", "0.9"]) == 0
    assert capsys.readouterr().out == ""
    text, chat, ids = lines(out.read_text())
    assert text["accepted"] == run_of(case, "window", tau=0.9, window=3, gate_first=False)["accepted"]
    assert (text["id"], chat["id"], ids["id"]) == ("text", "chat", "2")
    assert (chat["mode"], set(chat["accepted"])) == ("ar", {1})
    assert (ids["tau"], ids["accepted"], ids["finish_reason"]) == (1.0, [1] * 5, "length")
    assert text["prompt_tokens"] == chat["prompt_tokens"] == ids["prompt_tokens"]


def test_a_line_may_leave_out_the_lookup_of_the_others(tmp_path):
    own = {"prompt": TEXTS[0], "mode": "ar", "lookup": False}
    source = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": TEXTS[0]}, own])
    out = tmp_path / "out.jsonl"
    assert main([*MODEL, "--prompts", source, "--output", str(out), "--mode", "verify", "--lookup"]) == 0
    both, plain = lines(out.read_text())
    assert both["token_ids"] == plain["token_ids"] and both["forwards"] < plain["forwards"] == len(plain["token_ids"])


def test_standard_input_and_plain_text(monkeypatch, capsys):
    piped = io.BytesIO(json.dumps({"prompt": TEXTS[0]}).encode() + b"\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(piped))
    assert main([*MODEL, "--mode", "ar", "-"]) == 0
    expected = tiny.model().tokenizer.decode(run_of(CASES[0], "ar")["token_ids"], skip_special_tokens=True)
    assert capsys.readouterr().out == expected + "\n"


def test_show_steps_colours_each_forward(capsys):
    assert main([*MODEL, "--prompt", TEXTS[0], "--show-steps"]) == 0
    shown = capsys.readouterr().out
    run = run_of(CASES[0], "window", tau=0.9, window=3, gate_first=False)
    pieces = [piece.split("m", 1)[1] for piece in shown.split("\033[0m")[:-1]]
    assert len(pieces) == len(run["accepted"])
    assert "".join(pieces) == tiny.model().tokenizer.decode(run["token_ids"])
    first = run["accepted"][0]
    assert pieces[0] == tiny.model().tokenizer.decode(run["token_ids"][:first])


def test_sampling_and_stops_from_arguments_and_lines(tmp_path, capsys):
    case = CASES[0]
    text = tiny.model().tokenizer.decode(run_of(case, "ar")["token_ids"], skip_special_tokens=True)
    lines_in = [
        {"token_ids": case["prompt_ids"], "stop": [text[5:8]]},
        {"token_ids": case["prompt_ids"], "temperature": 1.5, "seed": 5, "stop": []},
        {"token_ids": case["prompt_ids"], "temperature": 1.5, "seed": 5, "stop": []},
        {"token_ids": case["prompt_ids"], "temperature": 1.5, "seed": 6, "stop": []},
    ]
    source = write_jsonl(tmp_path / "prompts.jsonl", lines_in)
    assert main([*MODEL, "--prompts", source, "--json", "--mode", "ar", "--stop", text[2:4]]) == 0
    stopped, first, again, other = lines(capsys.readouterr().out)
    assert (stopped["text"], stopped["finish_reason"]) == (text[:5], "stop")
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_log_probabilities_say_which_come_from_placeholders(capsys):
    arguments = [*MODEL, "--prompt", TEXTS[0], "--json", "--max-new-tokens", "6", "--tau", "0", "--logprobs", "2"]
    assert main(arguments) == 0
    (record,) = lines(capsys.readouterr().out)
    tokens = record["logprobs"]
    assert [token["from_placeholder"] for token in tokens] == [False, True, True, True, False, True]
    for token_id, token in zip(record["token_ids"], tokens, strict=True):
        assert len(token["top"]) == 2 and token["logprob"] <= 0
        assert token["top"][str(token_id)] == token["logprob"] == max(token["top"].values())


def test_bias_from_arguments(capsys):
    arguments = [*MODEL, "--prompt", TEXTS[0], "--json", "--max-new-tokens", "6", "--mode", "verify"]
    first, second = run_of(CASES[0], "ar")["token_ids"][:2]
    assert main([*arguments, "--logit-bias", f"{first}=-100", "--logit-bias", f"{second}=-99.5"]) == 0
    (record,) = lines(capsys.readouterr().out)
    assert not {first, second} & set(record["token_ids"])
    assert main([*arguments, "--logit-bias", "77=1e3"]) == 0
    (record,) = lines(capsys.readouterr().out)
    assert record["token_ids"] == [77] * 6 and "logprobs" not in record


def test_raw_continues_the_text_and_system_adds_a_turn(capsys):
    assert main([*MODEL, "--prompt", "stone", "--raw", "--json", "--max-new-tokens", "1"]) == 0
    assert main([*MODEL, "--prompt", "stone", "--system", "Be brief.", "--json", "--max-new-tokens", "1"]) == 0
    assert main([*MODEL, "--prompt", "stone", "--json", "--max-new-tokens", "1"]) == 0
    raw, system, chat = lines(capsys.readouterr().out)
    tokenizer = tiny.model().tokenizer
    assert raw["prompt_tokens"] == len(tokenizer("stone")["input_ids"])
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "stone"}],
        add_generation_prompt=True,
        return_dict=True,
    )
    assert system["prompt_tokens"] == len(rendered["input_ids"])
    assert chat["prompt_tokens"] < system["prompt_tokens"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"prompt": "a", "token_ids": [1]}', "expected exactly one of prompt, messages, token_ids, found prompt, tok"),
        ('{"id": 1}', "found none"),
        ('{"prompt": 3}', "prompt must be a text"),
        ('{"token_ids": ["a"]}', "token_ids must be a list of integers"),
        ('{"token_ids": []}', "the prompt has no tokens"),
        ('{"token_ids": [' + "9" * 5000 + "]}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (r'{"prompt": "\ud800"}', "half a character"),
        ('{"messages": [{"role": "user", "content": 7}]}', "the chat template rejects the messages"),
        ('{"prompt": "a", "stop": 5}', "stop=5: expected a list of texts"),
        ('{"prompt": "a", "stop": null}', "stop=None: expected a list of texts"),
        ('{"prompt": "a", "tau": Infinity}', "tau=inf: expected a number"),
        ('{"token_ids": [384]}', "token id 384, but the model's go from 0 to 383"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list"),
        ('{"prompt": "a", "tua": 1}', "unknown key 'tua'"),
        ('{"prompt": "a", "mode": "fast"}', "mode='fast': expected one of"),
        ('{"prompt": "a", "tau": -1}', "tau=-1: expected a number of at least 0"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens=0"),
        (json.dumps({"token_ids": [5] * 1024}), "1024 tokens, but the model's context of 1024"),
    ],
)
def test_bad_input_is_one_line_that_names_file_and_line(tmp_path, capsys, record, message):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "fine"}\n' + record + "\n")
    assert main([*MODEL, "--prompts", str(source), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error")]
    assert f"{source}:2: " in line
    assert message in line


def test_lines_end_at_line_feeds_alone():
    text = "a\u2028b\x85c"
    content = "\ufeff" + json.dumps({"prompt": text, "id": None}, ensure_ascii=False) + "\r\n\r\n" + '{"prompt": "d"}'
    first, second = read_prompts(content.encode(), "prompts.jsonl")
    assert (first.content, first.id, first.where) == (text, "0", "prompts.jsonl:1")
    assert (second.content, second.id, second.where) == ("d", "2", "prompts.jsonl:3")


def test_prompts_that_are_no_utf8_are_refused(tmp_path, monkeypatch, capsys):
    source = tmp_path / "prompts.jsonl"
    source.write_bytes(b'{"prompt": "\xff"}\n')
    assert main([*MODEL, "--prompts", str(source)]) == 2
    assert f"{source}: not UTF-8" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "\xff"}\n'), encoding="utf-8"))
    assert main([*MODEL, "-"]) == 2
    assert "standard input: not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--window", "0"], "window=0"),
        (["--prompt", "a", "--tau", "inf"], "tau=inf"),
        (["--prompt", "a", "--top-p", "2"], "top_p=2.0: expected a number from 0 to 1"),
        (["--prompt", "a", "--logit-bias", "5=nan"], "logit_bias[5]=nan: expected a number from -10000.0 to 10000.0"),
        (["--prompt", "a", "--logit-bias", "9999=1"], "token id 9999"),
        (["--prompt", "a", "--min-new-tokens", "3000000000"], "min_new_tokens=3000000000: expected an integer"),
        (["--prompt", "a", "--top-k", "3000000000", "--temperature", "1"], "top_k=3000000000: expected an integer"),
        (["--prompt", "a", "--window", "100000"], "window=100000: expected an integer from 1 to 1024"),
        (["--prompt", "a", "--lookup", "--mode", "lookup"], "belongs to mode 'verify', not to 'lookup'"),
        (["--prompt", "a", "--lookup", "--mode", "verify", "--temperature", "1"], "needs temperature 0, not 1"),
        (["--prompt", "a", "--batch-size", "0"], "--batch-size 0"),
        (["--prompt", "a", "--raw", "--system", "b"], "--system"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl: cannot be read"),
        (["--prompt", "a", "--output", "/nowhere/out.jsonl"], "cannot be written"),
    ],
)
def test_bad_arguments_exit_with_2(capsys, arguments, message):
    assert main([*MODEL, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["-", "--prompt", "a"],
        ["--prompt", "a", "b", "-", "--prompts", "c"],
        ["--prompt", "a", "--mode", "x"],
        ["--prompt", "a", "--prompts", "b"],
        ["--prompt", "a", "--logit-bias", "5"],
    ],
)
def test_arguments_that_argparse_refuses(arguments):
    with pytest.raises(SystemExit) as stopped:
        main([*MODEL, *arguments])
    assert stopped.value.code == 2


def test_the_package_function_is_as_short_as_the_command():
    for generate in (mars_jax.generate, mars_jax.generate.generate):
        (result,) = generate(tiny.model(), TEXTS[0], mode="verify", layout="chain")
        assert result.accepted == run_of(CASES[0], "verify", draft=3, layout="chain")["accepted"]
    with pytest.raises(mars_jax.errors.UserError, match="'taw' is no decode option"):
        mars_jax.generate(tiny.model(), TEXTS, taw=1)
