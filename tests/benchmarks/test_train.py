"""The cost benchmark: same chats everywhere, work that is right, goals that only layout can miss."""

import json

import jax
import numpy as np
import pytest
from helpers.paths import GOLDEN

from mars_jax.benchmark import build_parser, command
from mars_jax.benchmarks.train import Cost, count_tiles, make_batch, used_chunks, variants
from mars_jax.benchmarks.train_report import ratios, table
from mars_jax.config import ObjectiveSection
from mars_jax.data.chat import Chat
from mars_jax.objective.streams import Batch

CONFIG = f"""
output_dir: unused
model: {{path: {GOLDEN / "tiny-qwen2"}, remat: true}}
data: {{path: {GOLDEN / "synth" / "train.jsonl"}, eval_rows: 0}}
objective: {{recipe: mars, block_size: 4, row_length: 256}}
train: {{global_batch: 8, steps: 1}}
"""
OBJECTIVE = ObjectiveSection(row_length=64)


def _chat(prompt: int, answer: int) -> Chat:
    return Chat(np.arange(4, 4 + prompt + answer, dtype=np.int32), np.array([[prompt, prompt + answer]]))


CHATS = [_chat(8, 20), _chat(12, 31), _chat(5, 9), _chat(20, 40), _chat(7, 3)]


def _batch(name: str) -> tuple[Batch, ObjectiveSection]:
    variant = next(v for v in variants(OBJECTIVE) if v.name == name)
    return make_batch(CHATS, variant.objective.stream_config(3), 2), variant.objective


@pytest.mark.parametrize("name", ["sft", "mars", "mars_sampled", "dense_2l"])
def test_every_variant_trains_every_answer_token(name):
    batch, _ = _batch(name)
    assert int(batch.trained.sum()) == 20 + 31 + 9 + 40 + 3
    assert batch.tokens.shape[0] >= 2 and batch.tokens.shape[1] == 2


def test_tiles_are_counted_from_the_mask():
    batch, objective = _batch("mars")
    flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), batch.visibility)
    computed, useful = count_tiles(flat, objective.attention)
    assert computed == useful  # the plan computes what the mask shows, no more
    tiles_a_row = -(-flat.segment.shape[1] // 64)
    assert count_tiles(flat, "dense") == (len(flat.segment) * tiles_a_row**2, useful)


def test_used_chunks_is_the_share_with_any_weight():
    batch, _ = _batch("sft")
    entries = ((batch.weight_ar + batch.weight_mask) > 0).sum(-1)  # front-packed
    chunks = -(-entries.max(-1) // 16).sum() / (len(batch.tokens) * (64 // 16))
    assert used_chunks(batch, 16) == pytest.approx(float(chunks))


def test_report_relates_everything_to_sft():
    sft = Cost("sft", "packed SFT", 4, 64, 0, 103, 2e12, 4e9, 8_000_000_000, 1, 2.0, 10, 10)
    other = Cost("mars", "MARS", 4, 112, 48, 103, 3e12, 5e9, 9_000_000_000, 2, 2.5, 23, 20)
    assert ratios([sft, other])["mars"] == {"flops": 1.5, "bytes": 1.25, "memory": 1.125, "seconds": 1.25}
    line = table([sft, other]).splitlines()[2]
    assert "3.000 (1.50x)" in line and "2.500 (1.25x)" in line and line.endswith("1.15")


@pytest.mark.slow
def test_command_measures_and_meets_the_goals(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)
    arguments = ["train", "--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "out"), "--json"]
    command(build_parser().parse_args([*arguments, "--chats", "60", "--repeats", "1"]))
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "out" / "train.json").read_text()) == report
    assert (tmp_path / "out" / "train.png").read_bytes().startswith(b"\x89PNG")
    costs = {cost["name"]: cost for cost in report["costs"]}
    assert len({cost["trained_tokens"] for cost in costs.values()}) == 1
    sft = costs["sft"]
    layers = 3 * (96 * 16 * (2 * 6 + 2 * 2) + 3 * 96 * 256)
    head = 384 * 96
    per_token = 2 * 4 * (layers + head)  # forward, recomputed forward, two products backward
    assert 0.8 * per_token * sft["trained_tokens"] < sft["flops"] < 1.5 * per_token * sft["rows"] * sft["row_tokens"]
    times_sft = report["times_sft"]
    assert times_sft["mars_sampled"]["flops"] < times_sft["mars"]["flops"] < times_sft["dense_2l"]["flops"]
    for name in ("sft", "mars", "mars_sampled"):
        assert costs[name]["tiles_computed"] <= 1.15 * costs[name]["tiles_useful"]
    assert all(cost["seconds"] > 0 for cost in costs.values())
