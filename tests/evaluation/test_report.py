"""The paper's tables with ours beside them."""

import json
import re

import pytest

from mars_jax import report
from mars_jax.cli import main
from mars_jax.evaluation import paper
from mars_jax.evaluation.results import Missing, describe_mode, read_run
from mars_jax.evaluation.tables import all_tables, nearest_size, quality_table

OPTIONS = {
    "mode": "window", "tau": 0.95, "score": "probability", "gate_first": False, "window": 3,
    "cache_block": 16, "draft": 3, "layout": "tree",
}  # fmt: skip


def results_file(folder, label="MARS B=4", scores=(1, 2, 3, 4, 5, 6), skipped=(), rate=50.0, batch=8, **options):
    """A results file as `evaluate` writes it, with scores in percent for the columns that are not skipped."""
    results, tasks = {}, {}
    for (column, (task, metric)), score in zip(paper.COLUMNS.items(), scores, strict=True):
        if column in skipped:
            continue
        results[task] = {metric: score / 100, "alias": task}
        tasks[task] = {"answers": 20, "tokens_per_second": rate, "seconds": 9.0}
    folder.mkdir()
    found = {
        "results": results,
        "run": {
            "label": label, "parameters": 135_000_000, "batch_size": batch, "conditions": {"limit": 20},
            "skipped": {paper.COLUMNS[column][0]: "no copy of it was given" for column in skipped},
        },
        "decode": {"settings": OPTIONS | options, "tasks": tasks, "total": {"tokens_per_forward": 1.5}},
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(found))
    return folder


def test_the_papers_averages_follow_from_its_scores():
    """A typing error in a score would show here: the paper rounds to one decimal."""
    for row in (*paper.MAIN, *paper.ABLATION):
        assert sum(row.scores) / 6 == pytest.approx(row.average, abs=0.051), row
    for row in paper.SPEED:
        baseline = next(other for other in paper.SPEED if other.batch == row.batch)
        assert baseline.seconds / row.seconds == pytest.approx(row.speedup, abs=0.0051), row


def test_rows_both_tables_share_are_the_same():
    main_rows = {(r.size, r.label, r.mode): r for r in paper.MAIN}
    for row in paper.ABLATION:
        assert main_rows.get((row.size, row.label, row.mode), row) == row


def test_a_run_stands_under_the_papers_row_of_its_label_and_mode(tmp_path):
    fast = read_run(results_file(tmp_path / "fast"))
    slow = read_run(results_file(tmp_path / "slow", scores=(10, 20, 30, 40, 50, 60), mode="ar"))
    own = read_run(results_file(tmp_path / "own", label="another idea"))
    rows = quality_table("t", paper.MAIN, [fast, slow, own]).rows
    labels = [row[:3] for row in rows]
    at = labels.index(("MARS B=4", "paper 0.5B", "τ=0.95"))
    assert rows[at + 1] == ("MARS B=4", "ours 135M, first 20 a task", "τ=0.95", 1, 2, 3, 4, 5, 6, 3.5, 1.5)
    at = labels.index(("MARS B=4", "paper 0.5B", "τ=1"))
    assert rows[at + 1][2:5] == ("ar", 10, 20) and rows[at + 1][-2] == 35
    assert rows[-1][0] == "another idea"
    seven = labels.index(("MARS B=4", "paper 7B", "τ=0.95"))
    assert isinstance(rows[seven + 1][3], Missing)  # 135M is no 7B


def test_every_missing_cell_says_why(tmp_path):
    run = read_run(results_file(tmp_path / "a", skipped=("GPQA",)))
    assert run.scores["GPQA"] == Missing("MARS B=4 has no GPQA (gpqa_main_cot_zeroshot): no copy of it was given")
    assert isinstance(run.average, Missing) and "lacks GPQA" in run.average.reason
    text = report_text(tmp_path, tmp_path / "a")
    marks = set(re.findall(r"–\[\^(\d+)\]", text))
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.+)$", text, re.M))
    assert marks == set(notes) and all(len(note) > 20 for note in notes.values())
    assert any("no copy of it was given" in note for note in notes.values())
    assert any("no results file labelled 'MARS B=16'" in note for note in notes.values())


def report_text(tmp_path, *results):
    out = tmp_path / "out.md"
    assert main(report.build_parser, report.run, [*map(str, results), "--markdown", str(out)]) == 0
    return out.read_text()


def test_speed_is_against_ar_at_the_same_batch(tmp_path):
    results_file(tmp_path / "ar", mode="ar", rate=40.0)
    results_file(tmp_path / "window", rate=60.0)
    results_file(tmp_path / "other", rate=60.0, batch=4)
    runs = [read_run(tmp_path / name) for name in ("ar", "window", "other")]
    rows = {(row[0], row[1].split()[0], row[2]): row for row in all_tables(runs)[2].rows}
    assert rows["8", "ours", "MARS B=4, τ=0.95"][3:] == (60.0, 9.0, 1.5)
    assert rows["8", "ours", "MARS B=4, ar"][5] == 1.0
    assert isinstance(rows["4", "ours", "MARS B=4, τ=0.95"][5], Missing)
    assert rows["4", "paper", "MARS, block cache 32"][5] == 1.71


def test_markdown_rows_have_as_many_cells_as_their_header(tmp_path):
    text = report_text(tmp_path, results_file(tmp_path / "a"))
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_html_escapes_labels_and_links_every_footnote(tmp_path):
    results_file(tmp_path / "a", label="<b>&", skipped=("BBH",))
    out = tmp_path / "out.html"
    assert main(report.build_parser, report.run, [str(tmp_path / "a"), "--html", str(out)]) == 0
    page = out.read_text()
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert set(re.findall(r'href="#(why\d+)"', page)) == set(re.findall(r'id="(why\d+)"', page)) != set()


@pytest.mark.parametrize("content", [None, "not json", "[]", '{"results": {}}'])
def test_a_wrong_file_is_named(tmp_path, content, capsys):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    assert main(report.build_parser, report.run, [str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mode": "ar"}, "ar"),
        ({}, "τ=0.95"),
        ({"tau": 1.0}, "τ=1"),
        ({"gate_first": True}, "τ=0.95, gated"),
        ({"score": "entropy", "tau": 0.5}, "entropy≤0.5"),
        ({"score": "margin", "tau": 0.8}, "margin≥0.8"),
        ({"mode": "block", "cache_block": 32}, "τ=0.95, block cache 32"),
        ({"mode": "recompute"}, "τ=0.95, no cache"),
        ({"mode": "verify", "draft": 4}, "exact tree K=4"),
        ({"mode": "verify", "lookup": True}, "exact tree K=3 + lookup"),
        ({"mode": "diffusion", "tau": 1.0}, "block diffusion"),
        ({"mode": "diffusion", "tau": 0.5}, "block diffusion τ=0.5"),
        ({"mode": "lookup", "draft": 4}, "lookup K=4"),
    ],
)
def test_modes_have_names(options, name):
    assert describe_mode(OPTIONS | options) == name


def test_sizes():
    assert [nearest_size(n) for n in (135_000_000, 494_000_000, 1_500_000_000, 7_600_000_000)] == ["0.5B"] * 3 + ["7B"]
