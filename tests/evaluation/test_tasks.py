"""Local tasks against the harness's own definitions and against the files."""

import csv
import json

import pytest
from helpers.paths import shared_data

pytest.importorskip("lm_eval")

from mars_jax.data.synthetic import make_chats
from mars_jax.errors import UserError
from mars_jax.evaluation.tasks import PAPER, TaskChoice, load_tasks


def load(name, num_fewshot=None, data_dir=None, allow_code=True):
    [task] = load_tasks([TaskChoice(name, num_fewshot)], data_dir or shared_data(), allow_code=allow_code)
    return task


def prompt(task, number=0):
    doc = task.eval_docs[number]
    return doc, task.fewshot_context(doc, task.config.num_fewshot)


def score(task, doc, response):
    """What the task's filters and metrics say of one response, by filter."""
    [instance] = [task.construct_requests(doc, "", metadata=("x", 0, 1))]
    instance.resps = [response]
    task._instances = [instance]
    task.apply_filters()
    return {name: task.process_results(doc, [instance.filtered_resps[name]]) for name in instance.filtered_resps}


def test_all_but_gpqa_load_without_network_at_their_full_size():
    sizes = {}
    for choice in PAPER:
        if choice.name.startswith("gpqa"):
            continue
        task = load(choice.name, choice.num_fewshot)
        leaves = task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]
        sizes[choice.name] = (len(leaves), sum(len(leaf.eval_docs) for leaf in leaves))
        assert {leaf.config.num_fewshot for leaf in leaves} == {choice.num_fewshot}
    assert sizes == {
        "ifeval": (1, 541),
        "bbh": (27, 6511),
        "mmlu_pro": (14, 12032),
        "gsm8k_cot": (1, 1319),
        "humaneval_instruct": (1, 164),
        "mbpp_instruct": (1, 500),
    }


def test_the_packages_own_questions_need_no_data():
    [task] = load_tasks([TaskChoice("synthetic", 0)], None, allow_code=False)
    doc, text = prompt(task)
    assert (text, doc) == (doc["question"], task.eval_docs[0])
    [found] = score(task, doc, doc["answer"]).values()
    assert found == {"exact_match": 1.0}
    [found] = score(task, doc, doc["answer"] + " ").values()
    assert found == {"exact_match": 0.0}
    trained = {m["content"] for chat in make_chats("train", 5000) for m in chat if m["role"] == "user"}
    asked = [d["question"] for d in task.eval_docs]
    assert len(asked) > 500 and len(set(asked)) == len(asked) and not trained & set(asked)
    with pytest.raises(UserError, match="--num-fewshot 2 must be 0"):
        load_tasks([TaskChoice("synthetic", 2)], None, allow_code=False)


def test_bbh_shows_the_three_published_examples():
    """The harness's definition against the authors' own prompt file."""
    task = load("bbh_cot_fewshot_boolean_expressions", 3)
    published = (shared_data() / "bbh" / "cot-prompts" / "boolean_expressions.txt").read_text().split("-----\n", 1)[1]
    doc, text = prompt(task)
    assert text == f"{published}\n\nQ: {doc['input']}\nA: Let's think step by step.\n"
    assert score(task, doc, f"So the answer is {doc['target']}.")["get-answer"] == {"exact_match": 1.0}
    assert score(task, doc, "So the answer is 42.")["get-answer"] == {"exact_match": 0.0}


def test_gsm8k_reads_the_last_number():
    task = load("gsm8k_cot", 0)
    doc, text = prompt(task)
    assert text.startswith("Q: Janet") and text.endswith("\nA:") and text.count("Q:") == 1
    scored = score(task, doc, "She sells 16 - 3 - 4 = 9 eggs, so she makes 9 * 2 = $18.")
    assert scored["flexible-extract"] == {"exact_match": 1.0} and scored["strict-match"] == {"exact_match": 0.0}
    assert score(task, doc, "The answer is 18.")["strict-match"] == {"exact_match": 1.0}


def test_mmlu_pro_letters():
    task = load("mmlu_pro", 0).get("mmlu_pro_law")
    assert {doc["category"] for doc in task.eval_docs} == {"law"}
    doc, text = prompt(task)
    assert f"A. {doc['options'][0]}\n" in text and text.endswith("Answer: Let's think step by step.")
    assert score(task, doc, f"the answer is ({doc['answer']})")["custom-extract"] == {"exact_match": 1.0}


def test_mmlu_pro_refuses_examples_it_does_not_have():
    with pytest.raises(UserError, match=r"validation.*--num-fewshot 0"):
        load("mmlu_pro_law", 5)


def test_ifeval_checks_instructions():
    task = load("ifeval", 0)
    by_key = {doc["key"]: doc for doc in task.eval_docs}
    commas = by_key[1001]  # Shakespearean, without commas
    assert commas["instruction_id_list"] == ["punctuation:no_comma"]
    assert score(task, commas, "Hark! No comma here.")["none"]["prompt_level_strict_acc"] is True
    assert score(task, commas, "Hark, a comma.")["none"]["prompt_level_strict_acc"] is False


def test_sentences_are_counted_without_nltks_own_data():
    load("ifeval", 0)
    from lm_eval.tasks.ifeval.instructions_util import count_sentences

    assert count_sentences("Dr. Smith met Mr. Jones, e.g. at 5 p.m. on Jan. 5. They talked! Did they agree?") == 3


def test_humaneval_runs_the_canonical_solution():
    task = load("humaneval_instruct", 0)
    doc, text = prompt(task)
    assert text.startswith("Write a solution") and doc["prompt"] in text
    assert score(task, doc, doc["canonical_solution"] + "```\nThat is it.")["confined"] == {"pass@1": 1.0}
    assert score(task, doc, "    return False\n```")["confined"] == {"pass@1": 0.0}
    assert score(task, doc, "    import sys; sys.exit(0)\n")["confined"] == {"pass@1": 0.0}


def test_mbpp_runs_the_canonical_solution():
    task = load("mbpp_instruct", 0)
    assert [doc["task_id"] for doc in task.eval_docs] == list(range(11, 511))
    doc, text = prompt(task)
    assert all(test in text for test in doc["test_list"])
    assert score(task, doc, doc["code"] + "\n```")["confined"] == {"pass@1": 1.0}
    assert score(task, doc, "def remove_Occ(s, ch): return s")["confined"] == {"pass@1": 0.0}
    shown = prompt(load("mbpp_instruct", 1))[1]
    assert "tc[i][j]" in shown and shown.count("Your code should pass these tests") == 2  # task 1's code, then ours


@pytest.mark.parametrize("name", ["humaneval", "humaneval_instruct", "mbpp", "mbpp_instruct"])
def test_code_runs_only_when_allowed(name):
    with pytest.raises(UserError, match="--allow-code-execution"):
        load(name, 0, allow_code=False)


def test_code_tasks_that_the_sandbox_does_not_know_are_refused():
    with pytest.raises(UserError, match="unconfined"):
        load("humaneval_plus", 0)


def write_gpqa(folder):
    columns = ["Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
    folder.joinpath("gpqa").mkdir()
    with folder.joinpath("gpqa", "gpqa_main.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for i in range(8):
            writer.writerow([f"Made-up question {i}?", f"right {i}", f"wrong {i} a", f"wrong {i} b", f"wrong {i} c"])


def test_gpqa_runs_from_the_users_copy(tmp_path):
    with pytest.raises(UserError, match=r"gpqa_main\.csv.*idavidrein"):
        load("gpqa_main_cot_zeroshot", 0, tmp_path)
    write_gpqa(tmp_path)
    task = load("gpqa_main_cot_zeroshot", 0, tmp_path)
    for number, doc in enumerate(task.eval_docs):
        letter = doc["answer"].strip("()")
        assert doc["choices"]["ABCD".index(letter)] == f"right {number}"
        assert score(task, doc, f"It must be ({letter}).")["flexible-extract"] == {"exact_match": 1.0}
    answers = [doc["answer"] for doc in task.eval_docs]
    assert len(set(answers)) > 1
    assert [doc["answer"] for _, doc in task.doc_iterator()] == answers  # asked and scored in the same order
    again = load("gpqa_main_cot_zeroshot", 0, tmp_path)
    assert [doc["answer"] for doc in again.eval_docs] == answers


def test_wrong_names_and_folders_say_so(tmp_path):
    with pytest.raises(UserError, match="'gsm9k'"):
        load("gsm9k")
    with pytest.raises(UserError, match=r"input_data\.jsonl"):
        load("ifeval", data_dir=tmp_path)


def test_lines_keep_their_unicode_separators(tmp_path):
    from mars_jax.evaluation.local_data import read_lines

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\n\n" + json.dumps({"text": "c"}))
    assert read_lines(path) == [{"text": "a\u2028b"}, {"text": "c"}]
