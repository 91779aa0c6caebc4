"""The command from arguments to files, with decoding scripted."""

import json

import pytest
from helpers.paths import TINY_QWEN2, shared_data

pytest.importorskip("lm_eval")

from mars_jax import cli, evaluate, report, sweep
from mars_jax.decoding.requests import Generation
from mars_jax.evaluation import mt_bench
from mars_jax.evaluation.cache import AnswerCache
from mars_jax.evaluation.harness import MarsLM
from mars_jax.models.loading import load

ANSWER = "So the answer is (A). The answer is 18."


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command with a decoder that says `ANSWER` to everything; returns its exit code, stdout and stderr."""

    def language_model(path, options, batch_size, cache):
        model = load(path)
        token_ids = [*model.tokenizer.encode(ANSWER), model.tokenizer.eos_token_id]
        runs = [3] * (len(token_ids) // 3) + [1] * (len(token_ids) % 3)

        def decode(requests):
            run.decoded += len(requests)
            for i, request in enumerate(requests):
                yield i, Generation(token_ids, "", runs, "stop", len(request.token_ids), request.options)

        return MarsLM(model, decode, options, cache=AnswerCache(cache), batch_size=batch_size)

    def run(*arguments):
        data = ["--data-dir", str(shared_data())]
        code = cli.main(evaluate.build_parser, evaluate.run, ["--model", str(TINY_QWEN2), *data, *arguments])
        return code, *capsys.readouterr()

    run.decoded = 0
    monkeypatch.setattr(evaluate, "language_model", language_model)
    return run


def test_results_are_the_harnesss_with_two_sections_more(run, tmp_path):
    out = tmp_path / "out"
    arguments = ("--tasks", "gsm8k_cot", "--limit", "4", "--num-fewshot", "0", "--mode", "window", "--tau", "0.8")
    code, stdout, _ = run(*arguments, "--output", str(out), "--label", "MARS B=4", "--log-samples")
    assert code == 0 and stdout == ""
    results = json.loads((out / "results.json").read_text())
    assert results["results"]["gsm8k_cot"]["exact_match,flexible-extract"] == 0.25  # the first answer is 18
    assert results["n-shot"] == {"gsm8k_cot": 0} and results["n-samples"]["gsm8k_cot"]["effective"] == 4
    assert results["configs"]["gsm8k_cot"]["generation_kwargs"]["until"] == ["Q:", "</s>", "<|im_end|>"]
    assert results["run"]["label"] == "MARS B=4" and results["run"]["skipped"] == {}
    assert results["run"]["parameters"] == 332_928
    decode = results["decode"]
    assert (decode["settings"]["mode"], decode["settings"]["tau"]) == ("window", 0.8)
    assert decode["tasks"]["gsm8k_cot"]["answers"] == 4
    assert decode["total"]["tokens_per_forward"] > 2 and len(decode["total"]["acceptance_by_offset"]) == 3
    samples = [json.loads(line) for line in (out / "samples_gsm8k_cot.jsonl").read_text().splitlines()]
    assert len(samples) == 8 and samples[0]["resps"] == [[ANSWER]]  # two filters
    assert "<|im_start|>user\nQ: Janet" in samples[0]["arguments"][0][0]


def test_without_an_output_folder_stdout_is_json_and_nothing_else(run):
    code, stdout, _ = run("--tasks", "gsm8k_cot", "--limit", "2", "--num-fewshot", "0")
    assert code == 0 and json.loads(stdout)["results"]["gsm8k_cot"]["sample_len"] == 2
    assert "samples" not in json.loads(stdout)


def test_finished_answers_are_not_run_again(run, tmp_path):
    arguments = ("--tasks", "gsm8k_cot", "--num-fewshot", "0", "--output", str(tmp_path / "out"))
    run(*arguments, "--limit", "3")
    code, _, _ = run(*arguments, "--limit", "5")
    assert code == 0 and run.decoded == 5


def test_raw_prompts_and_a_system_message(run, tmp_path):
    shared = ("--tasks", "gsm8k_cot", "--limit", "1", "--num-fewshot", "0", "--log-samples")
    for name, arguments in [("raw", ["--raw"]), ("system", ["--system", "Be brief."])]:
        run(*shared, *arguments, "--output", str(tmp_path / name))
    prompts = {
        name: json.loads((tmp_path / name / "samples_gsm8k_cot.jsonl").read_text().splitlines()[0])["arguments"][0][0]
        for name in ("raw", "system")
    }
    assert prompts["raw"].startswith("Q: Janet") and prompts["raw"].endswith("\nA:")
    assert prompts["system"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_mt_bench_takes_two_turns(run, tmp_path):
    out = tmp_path / "out"
    code, _, _ = run("--tasks", "mt_bench", "--limit", "3", "--output", str(out), "--label", "tiny")
    lines = [json.loads(line) for line in (out / "mt_bench.jsonl").read_text().splitlines()]
    assert code == 0 and [line["question_id"] for line in lines] == [81, 82, 83]
    assert lines[0]["choices"] == [{"index": 0, "turns": [ANSWER, ANSWER]}] and lines[0]["model_id"] == "tiny"
    assert json.loads((out / "results.json").read_text())["decode"]["tasks"]["mt_bench"]["answers"] == 6


@pytest.mark.slow
def test_the_papers_preset_runs_offline_and_its_table_says_what_is_missing(run, tmp_path):
    out = tmp_path / "out"
    code, _, _ = run("--preset", "paper", "--limit", "1", "--label", "AR SFT", "--mode", "ar", "--output", str(out))
    assert code == 0
    results = json.loads((out / "results.json").read_text())
    assert {"ifeval", "bbh", "mmlu_pro", "gsm8k_cot"} <= set(results["results"])
    assert set(results["run"]["skipped"]) == {"gpqa_main_cot_zeroshot", "humaneval_instruct", "mbpp_instruct"}
    assert results["n-shot"]["bbh_cot_fewshot_snarks"] == 3 and results["n-shot"]["mmlu_pro_law"] == 0
    assert results["decode"]["total"]["answers"] == 1 + 27 + 14 + 1 + 2
    limits = {c["generation_kwargs"]["max_gen_toks"] for c in results["configs"].values()}
    assert limits == {256}
    assert cli.main(report.build_parser, report.run, [str(out), "--markdown", str(tmp_path / "report.md")]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "gpqa_main.csv: no such file" in text and "--allow-code-execution" in text


def test_code_is_run_when_allowed(run, tmp_path):
    shared = ("--tasks", "humaneval_instruct", "--limit", "2", "--max-new-tokens", "64")
    code, _, stderr = run(*shared)
    assert code == 2 and "--allow-code-execution" in stderr
    code, stdout, stderr = run(*shared, "--allow-code-execution")
    assert code == 0, stderr
    assert json.loads(stdout)["results"]["humaneval_instruct"]["pass@1,confined"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --tasks a,b or --preset paper"),
        (["--tasks", "gsm8k_cot", "--preset", "paper"], "either --tasks a,b or --preset paper"),
        (["--tasks", "mmlu_pro_law"], "--num-fewshot 0"),
        (["--tasks", "mt_bench", "--raw"], "--raw"),
        (["--tasks", "gsm8k_cot", "--tau", "-1"], "tau"),
        (["--tasks", "gsm8k_cot", "--batch-size", "0"], "--batch-size 0"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(run, arguments, message):
    code, stdout, stderr = run(*arguments, "--limit", "1")
    assert code == 2 and stdout == ""
    [line] = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert message in line and "Traceback" not in stderr


@pytest.mark.parametrize("parser", [evaluate.build_parser, sweep.build_parser], ids=["evaluate", "sweep"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[(["--limit", n], f"--limit: '{n}': expected a number") for n in ("0", "-1", "nan", "inf", "1.5", "x")],
        (["--tasks", ","], "--tasks: ',': expected names"),
    ],
)
def test_amounts_and_names_are_checked_before_anything_is_loaded(parser, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(["--model", "x", "--output", "y", *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_limit_is_a_number_or_a_share(tmp_path):
    (tmp_path / "mt_bench").mkdir()
    lines = [json.dumps({"question_id": i, "turns": ["a"]}) for i in range(5)]
    (tmp_path / "mt_bench" / "question.jsonl").write_text("\n".join(lines) + "\n")
    amounts = {limit: len(mt_bench.questions(tmp_path, limit)) for limit in (None, 3.0, 0.5, 0.01, 9.0)}
    assert amounts == {None: 5, 3.0: 3, 0.5: 3, 0.01: 1, 9.0: 5}
