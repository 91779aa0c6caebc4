import json

import pytest
from helpers import tiny

from mars_jax import benchmark, cli
from mars_jax.benchmarks import decode, decode_report
from mars_jax.decoding.requests import DecodeOptions
from mars_jax.errors import UserError
from mars_jax.models.loading import load

CASES = json.loads((tiny.GOLDEN / "decode.json").read_text())[:4]


@pytest.fixture(scope="module")
def speeds():
    base = DecodeOptions(max_new_tokens=48)
    chosen = [v for v in decode.variants(base) if v.name in ("ar", "window τ=0.9", "verify tree K=3")]
    prompts = [tuple(case["prompt_ids"]) for case in CASES]
    return decode.measure(load(tiny.FOLDER), prompts, chosen, batches=[2], repeats=1)


def expected(**settings):
    """The golden runs with these settings."""
    matching = [[r for r in case["runs"] if settings.items() <= r.items()] for case in CASES]
    return [run for (run,) in matching]


def test_tokens_and_forwards_are_those_of_the_golden_runs(speeds):
    by_name = {s.name: s for s in speeds}
    golden = {
        "ar": expected(mode="ar"),
        "window τ=0.9": expected(mode="window", tau=0.9, window=3, gate_first=False),
        "verify tree K=3": expected(mode="verify", draft=3, layout="tree"),
    }
    for name, runs in golden.items():
        assert by_name[name].tokens == sum(len(r["token_ids"]) for r in runs)
        assert by_name[name].forwards == sum(len(r["accepted"]) for r in runs)
        lengths = [n for r in runs for n in r["accepted"]]
        assert by_name[name].accepted_at == [
            sum(n >= k for n in lengths) / len(lengths) for k in range(1, max(lengths) + 1)
        ]


def test_ratios_are_against_ar_at_the_same_batch_size(speeds):
    ar, *others = speeds
    assert (ar.speed_up, ar.retention, ar.same_as_ar) == (1.0, 1.0, 1.0)
    for s in others:
        assert s.speed_up == pytest.approx(s.tokens_per_second / ar.tokens_per_second)
        assert s.retention == pytest.approx(s.speed_up / s.tokens_per_forward)
    assert others[-1].same_as_ar == 1.0  # verify is exact


def test_transformers_generate_gives_the_same_tokens():
    pytest.importorskip("torch", reason="the comparison with transformers needs torch")
    prompts = [tuple(case["prompt_ids"]) for case in CASES]
    chosen = decode.variants(DecodeOptions(max_new_tokens=48))[:1]
    ours, theirs = decode.measure(load(tiny.FOLDER), prompts, chosen, [4], 1, transformers_folder=tiny.FOLDER)
    assert theirs.name == decode.TRANSFORMERS
    assert theirs.tokens == ours.tokens and theirs.same_as_ar == 1.0


def test_paper_table_sets_only_measured_cells(speeds):
    lines = decode_report.paper_table(speeds).splitlines()
    assert sum("not measured" in line for line in lines) == 7
    assert any("1.71×" in line and "B_cache" not in line for line in lines)


def test_unknown_mode_is_refused():
    with pytest.raises(UserError, match="--modes: 'wind'"):
        decode.select(decode.variants(DecodeOptions()), ["wind"])


def test_command_writes_json_and_picture(tmp_path, capsys):
    arguments = (
        f"decode --model {tiny.FOLDER} --output {tmp_path} --count 2 --batches 1 --modes window "
        "--max-new-tokens 8 --repeats 1"
    )
    assert cli.main(benchmark.build_parser, benchmark.command, arguments.split()) == cli.EXIT_DONE
    assert "window τ=0.9" in capsys.readouterr().out
    report = json.loads((tmp_path / "decode.json").read_text())
    assert report["speeds"][0]["name"] == "ar" and report["prompts"] == 2
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")
