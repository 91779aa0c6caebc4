import json

import pytest
from helpers import tiny

from mars_jax import benchmark, cli
from mars_jax.benchmarks import decode, decode_report
from mars_jax.benchmarks.records import Records
from mars_jax.decoding.requests import DecodeOptions
from mars_jax.errors import UserError
from mars_jax.models.loading import load

CASES = json.loads((tiny.GOLDEN / "decode.json").read_text())[:4]


PROMPTS = [tuple(case["prompt_ids"]) for case in CASES]
CHOSEN = ["window τ=0.9", "verify tree K=3", "verify tree K=3 adapt"]
VARIANTS = decode.variants(DecodeOptions(max_new_tokens=48))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    records = Records(tmp_path_factory.mktemp("decode") / "passes.jsonl", {})
    chosen = decode.select(VARIANTS, CHOSEN)
    decode.measure(load(tiny.FOLDER), PROMPTS, chosen, [2], repeats=1, records=records)
    return records


@pytest.fixture(scope="module")
def speeds(records):
    return decode.speeds(records)


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
    assert list(by_name) == [*golden, "verify tree K=3 adapt"]
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
    assert [s.same_as_ar for s in others[1:]] == [1.0, 1.0]  # verify is exact


def test_transformers_generate_gives_the_same_tokens(tmp_path):
    pytest.importorskip("torch", reason="the comparison with transformers needs torch")
    records = Records(tmp_path / "passes.jsonl", {})
    decode.measure(load(tiny.FOLDER), PROMPTS, VARIANTS[:1], [4], 1, records, transformers_folder=tiny.FOLDER)
    ours, theirs = decode.speeds(records)
    assert theirs.name == decode.TRANSFORMERS
    assert theirs.tokens == ours.tokens and theirs.same_as_ar == 1.0


def test_paper_table_sets_only_measured_cells(speeds):
    lines = decode_report.paper_table(speeds).splitlines()
    assert sum("not measured" in line for line in lines) == 7
    assert any("1.71×" in line and "B_cache" not in line for line in lines)


def recorded(records, name, seconds):
    """As passes at batch 2, the first one slow; each of two prompts took two forwards for three tokens."""
    for number, took in enumerate([9.0, *seconds]):
        results = [([5, 6, 7], [1, 2] if name != "ar" else [1, 1, 1])] * 2
        records.add("pass", name=name, mode=name, batch=2, first=number == 0, seconds=took, results=results)


def test_speeds_of_recorded_passes(tmp_path):
    records = Records(tmp_path / "passes.jsonl", {"model": "m"})
    recorded(records, "ar", [4.0, 3.0, 8.0])
    recorded(records, "window", [2.0, 1.0])
    recorded(records, "block", [])  # not timed yet
    ar, window = decode.speeds(records)
    assert (ar.seconds, ar.passes, ar.first_seconds) == (4.0, 3, 9.0)
    assert (window.seconds, window.passes, window.tokens, window.forwards) == (1.5, 2, 6, 4)
    assert window.speed_up == pytest.approx(4 / 1.5)
    assert window.retention == pytest.approx(4 / 1.5 / 1.5)
    assert window.accepted_at == [1.0, 0.5]
    assert "medians of 2 or 3 passes" in decode_report.table([ar, window])


def test_a_run_that_was_ended_goes_on(records, tmp_path):
    """Nothing measured is measured again, a half-written line is lost alone, and other settings are refused."""
    lines = records.path.read_text().splitlines(keepends=True)
    path = tmp_path / "passes.jsonl"
    path.write_text("".join(lines[:-1]) + lines[-1][:30])
    ended = Records(path, {})
    missing = json.loads(lines[-1])
    assert not ended.of("pass", name=missing["name"], first=False)
    chosen = decode.select(VARIANTS, CHOSEN)
    decode.measure(load(tiny.FOLDER), PROMPTS, chosen, [2], repeats=1, records=ended)
    added = [json.loads(line) for line in path.read_text().splitlines()[len(lines) - 1 :]]
    assert [(entry["name"], entry["first"]) for entry in added] == [(missing["name"], True), (missing["name"], False)]
    assert [ids for ids, _ in added[-1]["results"]] == [ids for ids, _ in missing["results"]]
    with pytest.raises(UserError, match="measured with model None, not 'other'"):
        Records(path, {"model": "other"})


def test_variants_are_chosen_by_name_or_beginning():
    def chosen(*names):
        return [v.name for v in decode.select(VARIANTS, names)]

    assert chosen("window tau=0.9") == ["ar", "window τ=0.9"]  # and not 0.95
    assert chosen("verify tree K=3", "verify chain") == [
        "ar", "verify chain K=1", "verify chain K=3", "verify tree K=3",
    ]  # fmt: skip
    assert chosen("block") == ["ar"] + [f"block {n} τ=0.95" for n in (8, 16, 32, 64)]
    with pytest.raises(UserError, match="--variants: 'wnd' is none of ar, window"):
        chosen("wnd")


def test_command_writes_json_and_picture(tmp_path, capsys):
    arguments = (
        f"decode --model {tiny.FOLDER} --output {tmp_path} --count 2 --batches 1 --variants verify "
        "--max-new-tokens 8 --repeats 1"
    )
    assert cli.main(benchmark.build_parser, benchmark.command, arguments.split()) == cli.EXIT_DONE
    printed = capsys.readouterr().out
    assert "verify tree K=3 adapt: at least" in printed
    report = json.loads((tmp_path / "decode.json").read_text())
    assert report["speeds"][0]["name"] == "ar" and report["prompts"] == 2
    assert "verify tree K=1" in [step["name"] for step in report["steps"]]
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")

    lines = len((tmp_path / "passes.jsonl").read_text().splitlines())
    assert cli.main(benchmark.build_parser, benchmark.command, arguments.split()) == cli.EXIT_DONE
    *before, added = map(json.loads, (tmp_path / "passes.jsonl").read_text().splitlines())
    assert len(before) == lines and added["kind"] == "machine"
    again = json.loads((tmp_path / "decode.json").read_text())
    assert again["speeds"] == report["speeds"]
    for limit, best in again["machine"].items():
        assert best == max(report["machine"][limit], added[limit])
