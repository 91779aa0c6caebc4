"""The points of a sweep, its files and its picture."""

import csv
import json

import pytest

pytest.importorskip("lm_eval")

from helpers.paths import TINY_QWEN2, shared_data

from mars_jax import cli, report, sweep
from mars_jax.evaluation.points import EXACT, FAMILIES, Point, Setting, measured, pareto, settings, write_points


def point(family="probability", score=30.0, rate=1.0, **changes):
    values = dict(family=family, name="x", tau=0.9, draft=None, score=score, stderr=1.0, tokens_per_forward=rate,
                  tokens_per_second=10 * rate, answers=5, tokens=50, forwards=25, seconds=5.0)  # fmt: skip
    return Point(**{**values, **changes})


def test_what_is_measured():
    found = settings(FAMILIES, window=3)
    names = [setting.name for setting in found]
    assert names[:8] == ["ar", "τ=1", "τ=0.95", "τ=0.9", "τ=0.8", "τ=0.7", "τ=0.6", "τ=0.5"]
    assert [n for n in names if n.startswith("exact")] == [
        f"exact {name.format(k)}" for name in ("chain K={}", "tree K={}", "tree K={} + lookup") for k in range(1, 8)
    ]
    assert len(set(names)) == len(names)
    folders = [setting.folder for setting in found]
    assert folders[:3] == ["ar", "probability-1", "probability-0.95"] and folders[-1] == "tree_lookup-7"
    assert len(set(folders)) == len(folders)
    assert any(n.startswith("entropy≤") for n in names) and any(n.startswith("margin≥") for n in names)
    assert names[-14:-7] == [f"lookup K={k}" for k in range(1, 8)]
    assert {s.family for s in settings(["ar", "tree"], 3)} == {"ar", "tree"}


def test_a_point_comes_from_the_results():
    results = {
        "results": {
            "bbh": {"exact_match,get-answer": 0.2, "exact_match_stderr,get-answer": 0.03},
            "bbh_cot_fewshot_snarks": {"exact_match,get-answer": 0.2, "exact_match_stderr,get-answer": 0.03},
            "gsm8k_cot": {
                "alias": "gsm8k_cot", "sample_len": 5,
                "exact_match,strict-match": 0.1, "exact_match_stderr,strict-match": 0.0,
                "exact_match,flexible-extract": 0.4, "exact_match_stderr,flexible-extract": 0.04,
            },
        },
        "group_subtasks": {"bbh": ["bbh_cot_fewshot_snarks"]},
        "decode": {"total": {"tokens_per_forward": 2.0, "tokens_per_second": 9.0, "answers": 10, "tokens": 80,
                             "forwards": 40, "seconds": 8.9, "acceptance_by_offset": [1.0, 1.0]}},
    }  # fmt: skip
    found = measured(Setting("probability", {"mode": "window", "tau": 0.9, "window": 3}), results)
    assert found.score == pytest.approx(30.0)  # bbh once, not with its members; gsm8k by the extraction its table shows
    assert found.stderr == pytest.approx(2.5)
    assert (found.name, found.tau, found.draft, found.tokens_per_forward) == ("τ=0.9", 0.9, None, 2.0)


def test_the_front_holds_what_nothing_beats():
    slow_good, fast_bad = point(score=30, rate=1.0), point(score=20, rate=3.0)
    beaten, exact = point(score=19, rate=2.0), point("tree", score=30, rate=2.5)
    assert pareto([slow_good, fast_bad, beaten, exact], "tokens_per_forward") == [exact, fast_bad]
    assert pareto([slow_good], "tokens_per_second") == [slow_good]


def test_files_of_points_agree(tmp_path):
    points = [point("ar", tau=None), point("tree", draft=3, tau=None)]
    write_points(points, {"label": "tiny"}, tmp_path)
    found = json.loads((tmp_path / "points.json").read_text())
    rows = list(csv.DictReader((tmp_path / "points.csv").open()))
    assert found["label"] == "tiny" and [p["family"] for p in found["points"]] == ["ar", "tree"]
    assert [float(row["score"]) for row in rows] == [p["score"] for p in found["points"]]
    assert [row["draft"] for row in rows] == ["", "3"]


def test_the_picture_marks_every_family(tmp_path):
    pytest.importorskip("matplotlib", reason="MATPLOTLIB ABSENT: no picture was drawn")
    from matplotlib.image import imread

    from mars_jax.evaluation import curve

    points = [
        point(family, 30 - i, 1 + i / 3, draft=i + 1, tau=None if family in EXACT else 0.9 - i / 10)
        for family in FAMILIES
        for i in range(1 if family == "ar" else 3)
    ]
    figure = curve.draw(points, "title", "score, %")
    figure.savefig(tmp_path / "curve.png", dpi=140)
    image = imread(tmp_path / "curve.png")
    assert image.shape[0] > 500 and image.shape[1] > 1200
    for panel, label in zip(figure.axes, ("tokens per forward", "tokens per second"), strict=True):
        assert panel.get_xlabel() == label
        names = panel.get_legend_handles_labels()[1]
        assert {look[2] for look in curve.LOOKS.values()} | {"Pareto front"} <= set(names)


@pytest.mark.slow
def test_a_sweep_of_the_golden_model(tmp_path):
    out = tmp_path / "sweep"
    data = ["--data-dir", str(shared_data()), "--tasks", "gsm8k_cot,mmlu_pro_law", "--limit", "4"]
    arguments = ["--model", str(TINY_QWEN2), *data, "--families", "ar,probability,chain", "--max-new-tokens", "16"]
    assert cli.main(sweep.build_parser, sweep.run, [*arguments, "--output", str(out)]) == 0
    points = json.loads((out / "points.json").read_text())["points"]
    assert [p["family"] for p in points] == ["ar"] + ["probability"] * 7 + ["chain"] * 7
    by_name = {p["name"]: p for p in points}
    # τ = 1 and every exact mode give the answers of ar.
    for name in ("τ=1", *(f"exact chain K={k}" for k in range(1, 8))):
        assert (by_name[name]["score"], by_name[name]["tokens"]) == (by_name["ar"]["score"], by_name["ar"]["tokens"])
    assert by_name["ar"]["tokens_per_forward"] == by_name["τ=1"]["tokens_per_forward"] == 1.0
    assert by_name["τ=0.5"]["tokens_per_forward"] >= by_name["τ=0.95"]["tokens_per_forward"] >= 1.0
    assert (out / "curve.png").stat().st_size > 20_000
    runs = [str(path) for path in (out / "points").iterdir()]
    assert cli.main(report.build_parser, report.run, [*runs, "--html", str(tmp_path / "r.html")]) == 0


def test_unknown_families_are_refused(tmp_path, capsys):
    arguments = ["--model", "x", "--output", str(tmp_path), "--families", "treee"]
    assert cli.main(sweep.build_parser, sweep.run, arguments) == 2
    assert "'treee'" in capsys.readouterr().err


def test_no_rows_at_a_time_are_refused(tmp_path, capsys):
    arguments = ["--model", "x", "--output", str(tmp_path), "--batch-size", "0"]
    assert cli.main(sweep.build_parser, sweep.run, arguments) == 2
    assert "--batch-size 0" in capsys.readouterr().err
