"""The examples of every command's `--help`: words that the command takes, files that are there."""

import importlib
import re
import shlex

import pytest
from helpers.commands import ROOT

COMMANDS = sorted(path.stem for path in (ROOT / "mars_jax").glob("*.py") if "cli.main(" in path.read_text())


def parser_of(name: str):
    module = importlib.import_module(f"mars_jax.{name}")
    return (getattr(module, "build_parser", None) or module.build)()


def examples(help_text: str) -> list[list[str]]:
    """The words of each command behind `example:`."""
    _, _, shown = help_text.partition("example:\n")
    return [shlex.split(line) for line in re.findall(r"^  (python -m .*)$", shown.replace("\\\n", " "), re.M)]


def test_all_commands_are_looked_at():
    assert {"train", "generate", "export", "evaluate", "sweep", "benchmark", "compile", "estimate"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_taken_and_name_files_that_are_there(name):
    shown = examples(parser_of(name).format_help())
    assert shown
    for words in shown:
        assert words[:3] == ["python", "-m", f"mars_jax.{name}"]
        given = vars(parser_of(name).parse_args(words[3:]))  # exits where a word is not taken
        for option in ("config", "architecture"):
            assert given.get(option) is None or (ROOT / given[option]).is_file(), given[option]
        assert given.get("model") in (None, "runs/quickstart/export")  # what `make quickstart` leaves
        assert given.get("data_dir") is None


@pytest.mark.parametrize("kind", ["train", "decode"])
def test_each_benchmark_shows_its_own_example(kind, capsys):
    with pytest.raises(SystemExit) as stopped:
        parser_of("benchmark").parse_args([kind, "--help"])
    assert stopped.value.code == 0
    (words,) = examples(capsys.readouterr().out)
    assert words[3] == kind
    parser_of("benchmark").parse_args(words[3:])
