"""`python -m mars_jax.evaluate`: lm-evaluation-harness tasks through our decoder."""

import argparse
import json
import logging
import math
import sys
from pathlib import Path

from mars_jax import cli
from mars_jax.errors import UserError

logger = logging.getLogger("mars_jax.evaluate")

EXAMPLE = (
    "python -m mars_jax.evaluate --model runs/quickstart/export --tasks synthetic --limit 100 \\\n"
    "    --mode window --tau 0.9 --output runs/evaluation"
)
DATA_LAYOUT = """
layout of --data-dir:
  gsm8k/{train,test}.jsonl  ifeval/input_data.jsonl  bbh/<subset>.json  mmlu_pro/test.jsonl.gz
  humaneval/HumanEval.jsonl  mbpp/mbpp.jsonl  mt_bench/question.jsonl
  gpqa/gpqa_main.csv (its authors ask that it not be put online: get it from them)
"""


def build_parser() -> argparse.ArgumentParser:
    from mars_jax.generate import add_decode_arguments

    parser = cli.parser("evaluate", "Run lm-evaluation-harness tasks, several tokens a forward.", EXAMPLE)
    parser.epilog += "\n" + DATA_LAYOUT
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="folder, hub id, .gguf file or a run's output_dir"
    )
    parser.add_argument(
        "--tasks",
        type=task_names,
        metavar="a,b",
        help="tasks or groups by the harness's names, mt_bench, or synthetic: the quickstart's held-out questions",
    )
    parser.add_argument(
        "--preset",
        choices=["paper"],
        help="the paper's six sets with its settings, MBPP and MT-bench; what cannot run is named in the results",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="results.json, and what a second run resumes from; without it, to stdout",
    )
    parser.add_argument(
        "--label", metavar="TEXT", help="the checkpoint's name in tables, such as 'MARS B=4' (its path)"
    )
    add_task_arguments(parser)
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples shown (as each task defines)")
    parser.add_argument("--log-samples", action="store_true", help="write prompts, answers and scores, a file a task")
    parser.add_argument("--raw", action="store_true", help="no chat template: prompts as they stand")
    parser.add_argument("--system", metavar="TEXT", help="system message of each chat")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows decoded together (8)")
    add_decode_arguments(parser)
    return parser


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of what is evaluated, shared with `sweep`."""
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="local files instead of the hub (layout below)")
    parser.add_argument("--limit", type=limit, metavar="N", help="first N documents of each task (below 1: a share)")
    parser.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run the code that the model writes, in a child process that cannot write, connect or start anything",
    )


def task_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}: expected names with commas between them")
    return names


def limit(text: str) -> float:
    """A whole number of documents, or a share of them between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < 1 or (value >= 1 and value.is_integer())):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of documents, or a share of them below 1")
    return value


def run(args: argparse.Namespace) -> None:
    from mars_jax.evaluation.run import Conditions, dumps, evaluate, quiet_libraries, select, write
    from mars_jax.evaluation.tasks import PAPER, PAPER_MAX_NEW_TOKENS, TaskChoice
    from mars_jax.generate import decode_options, given_options

    if (args.tasks is None) == (args.preset is None):
        raise UserError("give either --tasks a,b or --preset paper")
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: expected at least 1")
    given = given_options(args)
    if args.preset:
        choices = [*PAPER, TaskChoice("mt_bench")]
        given.setdefault("max_new_tokens", PAPER_MAX_NEW_TOKENS)
    else:
        choices = [TaskChoice(name, args.num_fewshot) for name in args.tasks]
    options = decode_options(given)
    conditions = Conditions(
        limit=args.limit,
        chat_template=not args.raw,
        system=args.system,
        max_new_tokens=given.get("max_new_tokens"),
        log_samples=args.log_samples,
        allow_code=args.allow_code_execution,
        data_dir=args.data_dir,
    )
    quiet_libraries()
    selection = select(choices, conditions, strict=args.preset is None)
    lm = language_model(args.model, options, args.batch_size, args.output and args.output / "answers.jsonl")
    results, answers = evaluate(lm, selection, conditions, label=args.label or args.model, model_path=args.model)
    if args.output is None:
        sys.stdout.write(dumps(results))
        return
    path = write(results, args.output)
    if answers:
        lines = [json.dumps(line, ensure_ascii=False) for line in answers]
        (args.output / "mt_bench.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    logger.info("wrote %s", path)


def language_model(path: str, options, batch_size: int, cache: Path | None):
    """The model behind the harness's interface, its answers cached in a file."""
    from mars_jax.decoding.engine import DecodeEngine
    from mars_jax.evaluation.cache import AnswerCache
    from mars_jax.evaluation.harness import MarsLM
    from mars_jax.models.loading import load

    cli.keep_compiled_programs()
    model = load(path)
    engine = DecodeEngine(model, slots=batch_size)
    return MarsLM(model, engine.completed, options, cache=AnswerCache(cache), batch_size=batch_size)


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, run))
