"""The quickstart after its trainings: the comparison, the picture and the last words, on the golden checkpoint."""

import json

import pytest
from helpers.paths import GOLDEN, TINY_QWEN2

from mars_jax import quickstart
from mars_jax.config import load_config
from mars_jax.models.loading import load
from mars_jax.pictures import decoding_picture


@pytest.fixture(scope="module")
def compared():
    model = load(TINY_QWEN2)
    lines = (GOLDEN / "synth" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    chats = [json.loads(line)["messages"][:2] for line in lines]
    return model, chats, *quickstart.compare(model, chats)


def test_comparison_counts_what_was_decoded(compared):
    _, chats, results, rows = compared
    assert [row.mode for row in rows] == ["AR", "window τ=0.9", "exact"]
    for row in rows:
        generations = results[row.mode]
        tokens = sum(len(g.token_ids) for g in generations)
        assert row.tokens_per_forward == pytest.approx(tokens / sum(len(g.accepted) for g in generations))
        right = sum(g.text == chat[1]["content"] for g, chat in zip(generations, chats, strict=True))
        assert row.right_answers == right / len(chats)
    ar, window, exact = rows
    assert ar.tokens_per_forward == 1 and ar.same_as_ar == 1
    assert exact.same_as_ar == 1 and exact.tokens_per_forward > 1.3
    assert window.tokens_per_forward > 1.5


def test_ending_names_every_result(compared, tmp_path, capsys):
    model, chats, results, rows = compared
    picture = quickstart.draw(tmp_path / "quickstart.png", results, rows, model.tokenizer)
    quickstart.show(tmp_path, results, rows, chats, model.tokenizer, picture, seconds=1)
    printed = capsys.readouterr().out
    for name in ("mars", "export", "results.json", "quickstart.png"):
        assert str(tmp_path / name) in printed
    assert "100%" in printed and "\033[" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_takes_texts_with_line_breaks_and_long_lines(tmp_path):
    decoding_picture(tmp_path / "a.png", {"AR": 1.0}, {"AR": [1, 1]}, {"AR": ["a\n\nb", "x" * 150, ""]})
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_held_out_chats_are_not_trained_on():
    from mars_jax.data.synthetic import make_chats

    questions = {chat[-2]["content"] for chat in quickstart.held_out_chats(64)}
    trained = {m["content"] for chat in make_chats("train", 2000) for m in chat if m["role"] == "user"}
    assert not questions & trained


@pytest.mark.parametrize("name", ["ar_sft", "mars"])
def test_configurations_are_valid(name):
    cfg = load_config(quickstart.CONFIGS / f"quickstart_{name}.yaml")
    assert cfg.objective.recipe == name
    assert cfg.output_dir == f"runs/quickstart/{name}"
