"""Tasks: the harness's own definitions, on local files where a folder is given, with code run in the sandbox only."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_jax.errors import UserError
from mars_jax.evaluation import embedded, punkt, sandbox
from mars_jax.evaluation.local_data import READERS

# Where the harness defines the paper's tasks: indexing these takes a moment, indexing all of its tasks ten seconds.
USUAL_FOLDERS = ("ifeval", "bbh/cot_fewshot", "mmlu_pro", "gpqa", "gsm8k", "humaneval", "mbpp")
CODE_TASKS = ("humaneval", "humaneval_instruct", "mbpp", "mbpp_instruct")


@dataclass(frozen=True)
class TaskChoice:
    """A task or group by the harness's name, and how many examples it shows (None: as many as its definition says)."""

    name: str
    num_fewshot: int | None = None


# arXiv 2604.07023 and its published evaluation scripts; MBPP is an extra. For MT-bench see `mt_bench.py`.
PAPER = (
    TaskChoice("ifeval", 0),
    TaskChoice("bbh", 3),
    TaskChoice("mmlu_pro", 0),
    TaskChoice("gpqa_main_cot_zeroshot", 0),
    TaskChoice("gsm8k_cot", 0),
    TaskChoice("humaneval_instruct", 0),
    TaskChoice("mbpp_instruct", 0),
)
PAPER_MAX_NEW_TOKENS = 256


def load_tasks(choices: Sequence[TaskChoice], data_dir: Path | None, *, allow_code: bool) -> list:
    """The harness's `Task` and `Group` objects of the choices; `synthetic` is the package's own.

    Raises `UserError` for an unknown name, for data that is not there, and for a task that would run model-written code
    without `allow_code` or outside the sandbox.
    """
    if any(choice.name.startswith("ifeval") for choice in choices):
        punkt.provide()
    manager = _manager([choice.name for choice in choices if choice.name != embedded.NAME])
    try:
        return [
            embedded.task(choice.num_fewshot or 0)
            if choice.name == embedded.NAME
            else _load(manager, choice, data_dir, allow_code)
            for choice in choices
        ]
    except ConnectionError as error:
        raise UserError(
            f"the data of {', '.join(c.name for c in choices)} cannot be fetched ({error}); "
            "use --data-dir for local files"
        ) from None


@functools.cache
def _usual_manager():
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=[root / f for f in USUAL_FOLDERS])


def _manager(names: Sequence[str]):
    """An index of tasks that has these."""
    import lm_eval.tasks

    manager = _usual_manager()
    if all(name in manager.task_index for name in names):
        return manager
    manager = lm_eval.tasks.TaskManager()
    for name in names:
        if name not in manager.task_index:
            raise UserError(f"task {name!r}: the harness has no such task or group (`lm-eval ls tasks` lists them)")
    return manager


def _load(manager, choice: TaskChoice, data_dir: Path | None, allow_code: bool):
    definition = manager.task_index[choice.name].cfg or {}  # none for a tag, which is only a list of tasks
    if data_dir is None and choice.name not in CODE_TASKS:
        return _published(manager, choice)
    if "task" not in definition:
        names = sorted(manager.task_index[choice.name].tags)
        raise UserError(f"{choice.name!r} stands for several tasks; with --data-dir name them: {', '.join(names)}")
    if "group" not in definition:
        return _changed_task(manager, choice, data_dir, allow_code)

    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    group = Group.from_config(GroupConfig(**definition))
    for member in definition["task"]:
        group.add(_load(manager, TaskChoice(member, choice.num_fewshot), data_dir, allow_code))
    return group


def _published(manager, choice: TaskChoice):
    """A task or group exactly as the harness has it, with data from the hub."""
    loaded = manager.load([choice.name])
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            _check_code(name, allow_code=False)
        if choice.num_fewshot is not None:
            task.set_config("num_fewshot", choice.num_fewshot)
    return loaded["groups"].get(choice.name) or loaded["tasks"][choice.name]


def _changed_task(manager, choice: TaskChoice, data_dir: Path | None, allow_code: bool):
    """A task with local data, or one whose scoring runs code."""
    from lm_eval.api.task import ConfigurableTask

    definition = manager.task_index[choice.name].cfg
    if definition.get("unsafe_code"):
        _check_code(choice.name, allow_code)
    changes: dict[str, Any] = {} if choice.num_fewshot is None else {"num_fewshot": choice.num_fewshot}
    if data_dir is not None:
        changes |= _local_data(choice.name, {**definition, **changes}, data_dir)
    if choice.name in CODE_TASKS:
        return ConfigurableTask(config={**definition, **changes, **_confined_scoring(choice.name)})
    # An inline group is the harness's way to change a registered definition.
    task = manager.load([{"group": "changed", "task": [{"task": choice.name, **changes}]}])["tasks"][choice.name]
    return _settled(task)


def _settled(task):
    """The task with its documents processed once and for all.

    The harness processes them again at every look and relies on the hub's disk cache to get the same. In memory, GPQA
    would be scored against another shuffle of the answers than it was asked with.
    """
    process = task.config.process_docs
    if process is not None:
        random.seed(0)  # the same shuffle whatever was loaded before
        task.dataset = {split: process(rows) for split, rows in task.dataset.items()}
        task.config.process_docs = task.fewshot_cfg.process_docs = None
    return task


def _check_code(name: str, allow_code: bool) -> None:
    if name not in CODE_TASKS:
        raise UserError(f"task {name!r} runs model-written code unconfined; confined here are {', '.join(CODE_TASKS)}")
    if not allow_code:
        raise UserError(f"task {name!r} runs code that the model wrote: allow it with --allow-code-execution")
    sandbox.check_available()


def _local_data(name: str, definition: dict, data_dir: Path) -> dict:
    """Changes to a definition that make it read local files."""
    if definition.get("dataset_path") not in READERS:
        raise UserError(f"task {name!r} has no local form here: leave out --data-dir to fetch its data from the hub")
    splits = READERS[definition["dataset_path"]](data_dir, definition.get("dataset_name"))
    named = {key: definition.get(key) for key in ("training_split", "validation_split", "fewshot_split")}
    absent = {key: None for key, split in named.items() if split is not None and split not in splits}
    if "fewshot_split" in absent and definition.get("num_fewshot"):
        raise UserError(
            f"task {name!r} takes its examples from the split {named['fewshot_split']!r}, which the local files lack: "
            "use --num-fewshot 0"
        )

    def local_dataset(**_):
        import datasets

        return {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}

    return {"custom_dataset": local_dataset, **absent}


def _confined_scoring(name: str) -> dict:
    """The harness's prompts, with pass@1 by our sandbox."""
    passes = _humaneval_passes if name.startswith("humaneval") else _mbpp_passes
    changes = {
        "process_results": lambda doc, results: {"pass@1": float(passes(doc, results[0]))},
        "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [{"name": "confined", "filter": [{"function": "take_first"}]}],
    }
    if name.startswith("mbpp"):
        ending = "\n```" if name.endswith("instruct") else "\n[DONE]"
        examples = {"sampler": "first_n", "split": "prompt", "doc_to_target": "{{code}}" + ending}
        changes["fewshot_config"] = examples
    return changes


def _humaneval_passes(doc: dict, response: str) -> bool:
    body = response.split("```")[0]
    return sandbox.run(f"{doc['prompt']}{body}\n{doc['test']}\ncheck({doc['entry_point']})\n").passed


def _mbpp_passes(doc: dict, response: str) -> bool:
    code = response.split("```")[0].split("[DONE]")[0]
    return sandbox.run("\n".join([code, doc.get("test_setup_code") or "", *doc["test_list"], ""])).passed
