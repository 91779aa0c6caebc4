"""One evaluation: tasks through the harness, what decoding did, and files of results."""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_jax.errors import UserError
from mars_jax.evaluation.tally import total
from mars_jax.evaluation.tasks import TaskChoice, load_tasks

logger = logging.getLogger(__name__)

MT_BENCH = "mt_bench"


@dataclass(frozen=True)
class Conditions:
    """How prompts are made and how much is asked.

    limit: documents of each task, a share of them below 1; None for all.
    chat_template: render prompts as chats; few-shot examples then stand in one user turn with the question.
    max_new_tokens: of every generating task; None leaves each its own.
    """

    limit: float | None = None
    chat_template: bool = True
    system: str | None = None
    max_new_tokens: int | None = None
    log_samples: bool = False
    allow_code: bool = False
    data_dir: Path | None = None


@dataclass
class Selection:
    """Loaded tasks, MT-bench's questions, and what was left out: `{name: reason}`."""

    tasks: list[Any]
    questions: list[dict]
    skipped: dict[str, str]


def select(choices: Sequence[TaskChoice], conditions: Conditions, *, strict: bool) -> Selection:
    """Load what was chosen. What cannot be had raises `UserError` if `strict`, else is left out with the reason."""
    selection = Selection([], [], {})
    for choice in choices:
        try:
            if choice.name == MT_BENCH:
                selection.questions = _questions(conditions)
            else:
                selection.tasks += load_tasks([choice], conditions.data_dir, allow_code=conditions.allow_code)
        except UserError as error:
            if strict:
                raise
            logger.warning("left out: %s", error)
            selection.skipped[choice.name] = str(error)
    if not selection.tasks and not selection.questions:
        raise UserError("none of the tasks can run: " + "; ".join(selection.skipped.values()))
    return selection


def _questions(conditions: Conditions) -> list[dict]:
    from mars_jax.evaluation import mt_bench

    if conditions.data_dir is None:
        raise UserError(f"{MT_BENCH} needs its questions: --data-dir DIR with mt_bench/question.jsonl")
    if not conditions.chat_template:
        raise UserError(f"{MT_BENCH} is a conversation: it needs the chat template, so leave out --raw")
    return mt_bench.questions(conditions.data_dir, conditions.limit)


def evaluate(
    lm, selection: Selection, conditions: Conditions, *, label: str, model_path: str
) -> tuple[dict, list[dict]]:
    """The harness's results with a `run` and a `decode` section more, and MT-bench's answers."""
    results = run_tasks(lm, selection.tasks, conditions) if selection.tasks else {"results": {}}
    answers = []
    if selection.questions:
        from mars_jax.evaluation import mt_bench

        limit = conditions.max_new_tokens or lm.max_gen_toks
        answers = mt_bench.answer(
            lm, selection.questions, model_id=label, system=conditions.system, max_new_tokens=limit
        )
    results["run"] = {
        "label": label,
        "model": model_path,
        "conditions": dataclasses.asdict(conditions),
        "skipped": selection.skipped,
        **lm.description(),
    }
    tasks = {name: tally.summary() for name, tally in sorted(lm.tallies.items())}
    results["decode"] = {
        "settings": dataclasses.asdict(lm.options),
        "tasks": tasks,
        "total": total(list(lm.tallies.values())).summary(),
    }
    return results, answers


def run_tasks(lm, tasks: Sequence[Any], conditions: Conditions) -> dict:
    """The harness's own results of its `Task` and `Group` objects."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    if conditions.chat_template and lm.tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template: use --raw to put prompts as they stand")
    limit = conditions.limit if conditions.limit is None or conditions.limit < 1 else int(conditions.limit)
    longest = conditions.max_new_tokens
    return simple_evaluate(
        model=lm,
        tasks=list(tasks),
        limit=limit,
        log_samples=conditions.log_samples,
        apply_chat_template=conditions.chat_template,
        fewshot_as_multiturn=False,
        system_instruction=conditions.system,
        gen_kwargs=None if longest is None else {"max_gen_toks": longest},
        confirm_run_unsafe_code=conditions.allow_code,
        task_manager=TaskManager(include_defaults=False),  # the tasks are loaded: spare it the index of all others
    )


def quiet_libraries() -> None:
    """Keep the harness and its data library from writing hints, and bars where there is no terminal. Call it first."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def write(results: dict, folder: Path) -> Path:
    """`results.json`, and `samples_<task>.jsonl` where samples were logged."""
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(parents=True, exist_ok=True)
    for task, samples in results.get("samples", {}).items():
        lines = (json.dumps(s, default=handle_non_serializable, ensure_ascii=False) for s in samples)
        (folder / f"samples_{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / "results.json"
    path.write_text(dumps(results), encoding="utf-8")
    return path


def dumps(results: dict) -> str:
    from lm_eval.utils import handle_non_serializable

    kept = {key: value for key, value in results.items() if key != "samples"}
    return json.dumps(kept, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n"
