"""`python -m mars_jax.export`, as a user runs it."""

import subprocess
import sys

import pytest
from helpers.paths import REPOSITORY, TINY_QWEN2

from mars_jax.export import main


def test_the_command_prints_the_folder_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mars_jax.export", "--checkpoint", TINY_QWEN2, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout == f"{out}\n"
    assert (out / "model.safetensors").read_bytes() == (TINY_QWEN2 / "model.safetensors").read_bytes()


def test_options_reach_the_export(tmp_path, capsys):
    out = str(tmp_path / "out")
    base = ["--checkpoint", str(TINY_QWEN2), "--out", out]
    assert main([*base, "--dtype", "bfloat16", "--max-shard-size", "200KB", "--mask-token", "<hole>"]) == 0
    assert len(list((tmp_path / "out").glob("model-*-of-00004.safetensors"))) == 4
    assert '"<hole>"' in (tmp_path / "out" / "mars_jax.json").read_text()


def test_a_size_without_a_unit_is_a_wrong_argument(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--checkpoint", str(TINY_QWEN2), "--out", str(tmp_path / "out"), "--max-shard-size", "many"])
    assert stop.value.code == 2
    assert "--max-shard-size: 'many' is not a size such as 5GB or 200MB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "absent/folder/x"], "absent/folder/x: no such file or folder"),
        (["--checkpoint", str(TINY_QWEN2), "--step", "3"], "step=3"),
        (["--checkpoint", str(TINY_QWEN2), "--adapter"], "no low-rank update (lora.rank) to export"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error
