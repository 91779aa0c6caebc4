"""What `generate` says of prompts and options that cannot be meant so, before any model is loaded."""

import json

import pytest
from helpers.tiny import FOLDER

from mars_jax.generate import main

MODEL = ["--model", str(FOLDER)]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "stone"}\n')
    return path


def refusal(capsys, *arguments: str) -> str:
    assert main([*MODEL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_no_prompt_at_all_says_how_to_give_one(capsys):
    assert refusal(capsys) == (
        "error: nothing to answer: give --prompt TEXT, --prompts FILE.jsonl, or - for standard input\n"
    )


def test_a_prompt_without_its_option_is_named(capsys):
    assert "'Count from 2 to 6.' belongs to no option: texts follow --prompt" in refusal(capsys, "Count from 2 to 6.")


@pytest.mark.parametrize("way", ["same", "link", "dots"])
def test_the_file_of_prompts_is_not_overwritten(capsys, prompts, way):
    output = {"same": prompts, "link": prompts.parent / "link", "dots": prompts.parent / "x" / ".." / prompts.name}[way]
    if way == "link":
        output.symlink_to(prompts)
    before = prompts.read_text()
    assert "is the file of --prompts" in refusal(capsys, "--prompts", str(prompts), "--output", str(output))
    assert prompts.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "1e300"], "temperature=1e+300: expected a number from 0 to 3.4028234e+38"),
        (["--tau", "1e39", "--score", "entropy"], "tau=1e+39: expected a number from 0 to 3.4028234e+38"),
        (["--repetition-penalty", "1e300"], "repetition_penalty=1e+300: expected a number from 0.01"),
        (["--temperature", "-1"], "temperature=-1.0: expected a number of at least 0"),
        (["--temperature", "nan"], "temperature=nan: expected a number of at least 0"),
    ],
)
def test_numbers_that_the_device_cannot_hold_are_refused(capsys, arguments, message):
    assert message in refusal(capsys, "--prompt", "stone", *arguments)


def test_the_largest_temperature_draws_without_a_warning(capsys, recwarn):
    assert main([*MODEL, "--prompt", "stone", "--max-new-tokens", "2", "--temperature", "3.4e38", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) >= 1
    assert not [warning for warning in recwarn if "overflow" in str(warning.message)]


@pytest.mark.parametrize(("mode", "tau"), [("window", 0.75), ("ar", None), ("verify", None)])
def test_tau_is_null_where_no_score_is_trusted(capsys, caplog, mode, tau):
    arguments = ["--prompt", "stone", "--max-new-tokens", "2", "--tau", "0.75", "--mode", mode, "--json"]
    with caplog.at_level("INFO", "mars_jax.generate"):
        assert main([*MODEL, *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["tau"] == tau
    assert caplog.messages[-1].startswith("1 prompt, ")
