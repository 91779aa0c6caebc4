"""One evaluation: tasks through the harness, what decoding did, and files of results."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_jax.evaluation.tally import total

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conditions:
    """How prompts are made and how much is asked.

    chat_template: render prompts as chats; few-shot examples then stand in one user turn with the question.
    max_new_tokens: of every generating task; None leaves each its own.
    """

    limit: float | None = None
    chat_template: bool = True
    system: str | None = None
    max_new_tokens: int | None = None
    log_samples: bool = False
    allow_code: bool = False
    seed: int = 0


def run_tasks(lm, tasks: Sequence[Any], conditions: Conditions) -> dict:
    """The harness's results of its `Task` and `Group` objects, with a `decode` section (`tally.Tally.summary`)."""
    from lm_eval.evaluator import simple_evaluate

    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    limit = None if conditions.max_new_tokens is None else {"max_gen_toks": conditions.max_new_tokens}
    results = simple_evaluate(
        model=lm,
        tasks=list(tasks),
        limit=conditions.limit,
        log_samples=conditions.log_samples,
        apply_chat_template=conditions.chat_template,
        fewshot_as_multiturn=False,
        system_instruction=conditions.system,
        gen_kwargs=limit,
        confirm_run_unsafe_code=conditions.allow_code,
        random_seed=conditions.seed,
    )
    return results


def decode_section(lm, settings: dict) -> dict:
    """What decoding did, by task and in all."""
    tasks = {name: tally.summary() for name, tally in sorted(lm.tallies.items())}
    return {"settings": settings, "tasks": tasks, "total": total(list(lm.tallies.values())).summary()}


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
