"""The quality report against answers, margins and likelihoods of plain decoding with independently rounded weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plain_decode, tiny

from mars_jax import benchmark, cli
from mars_jax.benchmarks import weights
from mars_jax.benchmarks.weights import Flip, Precision, Quality
from mars_jax.decoding.requests import DecodeOptions

LIMIT = 32
PROMPTS = [tuple(case["prompt_ids"]) for case in tiny.decode_cases()[:6]]


def on_int8_grid(path, array):
    """What int8 stands for: every output's column of a kernel `[..., in, out]` on its own grid."""
    if path[-1].key != "kernel":
        return array
    kernel = np.asarray(array, np.float64)
    step = np.abs(kernel).max(axis=-2, keepdims=True) / 127
    return jnp.asarray(np.rint(kernel / step) * step, jnp.float32)


def in_bfloat16(path, array):
    return array if path[-1].key == "scale" else array.astype(jnp.bfloat16).astype(jnp.float32)


def plain_model(rounding=lambda path, array: array):
    params = jax.tree_util.tree_map_with_path(rounding, tiny.params())
    return plain_decode.model_of(params, tiny.CONFIG, tiny.MASK_ID)


def answers(model):
    settings = {"window": 0, "tau": 1.0, "max_new_tokens": LIMIT}
    return [plain_decode.window(model, list(p), tiny.emit_mask(), tiny.STOP_IDS, **settings)[0] for p in PROMPTS]


def likelihood(model, prompt, answer):
    logits, _ = model([*prompt, *answer], [], 0)
    p = plain_decode.probabilities(logits[len(prompt) - 1 : -1], tiny.emit_mask())
    return -np.log(p[np.arange(len(answer)), answer])


@pytest.fixture(scope="module")
def measured():
    precisions = [Precision("float32"), Precision("bfloat16"), Precision("int8")]
    return weights.measure(tiny.model(), PROMPTS, DecodeOptions(max_new_tokens=LIMIT), 6, precisions)


@pytest.fixture(scope="module")
def exact():
    model = plain_model()
    return model, answers(model)


@pytest.mark.parametrize(("name", "rounding"), [("bfloat16", in_bfloat16), ("int8", on_int8_grid)])
def test_a_report_is_that_of_plain_decoding_with_rounded_weights(measured, exact, name, rounding):
    full, expected = exact
    (quality,) = [q for q in measured if q.precision.weights == name]
    model = plain_model(rounding)
    flips = []
    for number, (prompt, answer, other) in enumerate(zip(PROMPTS, expected, answers(model), strict=True)):
        places = [i for i in range(min(len(answer), len(other))) if answer[i] != other[i]]
        if places:
            logits, _ = full([*prompt, *answer[: places[0]]], [], 0)
            best = sorted(logits[-1][tiny.emit_mask()])
            flips.append((number, places[0], best[-1] - best[-2]))
    assert [(flip.prompt, flip.position) for flip in quality.flips] == [flip[:2] for flip in flips]
    np.testing.assert_allclose([flip.margin for flip in quality.flips], [flip[2] for flip in flips], atol=1e-4)
    nats = [likelihood(model, *pair) for pair in zip(PROMPTS, expected, strict=True)]
    exact_nats = [likelihood(full, *pair) for pair in zip(PROMPTS, expected, strict=True)]
    assert quality.nll == pytest.approx(np.concatenate(nats).mean(), abs=1e-5)
    assert measured[0].nll == pytest.approx(np.concatenate(exact_nats).mean(), abs=1e-5)
    assert quality.verify_flips == []


def test_float32_is_itself(measured):
    assert measured[0].flips == [] and measured[0].same == 1.0
    sizes = [q.bytes for q in measured]
    assert sizes[0] == sum(a.nbytes for a in jax.tree.leaves(tiny.params()))
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.01)
    assert sizes[2] < 0.5 * sizes[0]


def test_table_and_file_tell_where_answers_part(tmp_path):
    full = Quality(Precision("float32"), 4, 4_000_000, [], [], 0.25)
    flips = [Flip(0, 3, 0.125), Flip(2, 9, 0.5)]
    half = Quality(Precision("float32", "bfloat16"), 4, 4_000_000, flips, flips[:1], 0.3125)
    line = weights.table([full, half]).splitlines()[2].split()
    assert line == ["float32", "bfloat16", "4.0", "50.0%", "6", "0.312/0.500", "+0.06250", "75.0%", "0.125/0.125"]
    weights.write([full, half], tmp_path / "weights.json", {"model": "m"})
    record = json.loads((tmp_path / "weights.json").read_text())["precisions"][1]
    assert (record["same"], record["verify_same"], record["nll_over_float32"]) == (0.5, 0.75, 0.0625)
    assert record["flips"][1] == {"prompt": 2, "position": 9, "margin": 0.5}


def test_command(tmp_path, capsys):
    arguments = f"weights --model {tiny.FOLDER} --output {tmp_path} --count 2 --batch-size 2 --max-new-tokens 4"
    assert cli.main(benchmark.build_parser, benchmark.command, arguments.split()) == cli.EXIT_DONE
    assert "verify=ar" in capsys.readouterr().out
    written = json.loads((tmp_path / "weights.json").read_text())["precisions"]
    assert [record["precision"]["activations"] for record in written].count("bfloat16") == 2
