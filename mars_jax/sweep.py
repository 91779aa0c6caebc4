"""`python -m mars_jax.sweep`: quality against speed for thresholds and exact modes of one checkpoint."""

import argparse
import logging
import sys
from pathlib import Path

from mars_jax import cli
from mars_jax.errors import UserError
from mars_jax.evaluate import add_task_arguments, task_names

logger = logging.getLogger("mars_jax.sweep")

EXAMPLE = "python -m mars_jax.sweep --model runs/quickstart/export --tasks synthetic --limit 100 --output runs/sweep"


def build_parser() -> argparse.ArgumentParser:
    from mars_jax.evaluation.points import FAMILIES

    parser = cli.parser("sweep", "Measure quality against speed: thresholds, exact modes, and AR to compare.", EXAMPLE)
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="folder, hub id, .gguf file or a run's output_dir"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR",
                        help="points.json, points.csv, curve.png, results of each point; resumes")  # fmt: skip
    parser.add_argument("--tasks", type=task_names, default=["gsm8k_cot"], metavar="a,b",
                        help="generating tasks; quality is the mean of their scores (gsm8k_cot)")  # fmt: skip
    parser.add_argument("--num-fewshot", type=int, default=0, metavar="N", help="examples shown (0, as the paper does)")
    parser.add_argument("--families", type=task_names, default=list(FAMILIES), metavar="a,b",
                        help=f"what to measure: {', '.join(FAMILIES)} (all)")  # fmt: skip
    parser.add_argument("--window", type=int, default=3, metavar="W", help="placeholders a forward for thresholds (3)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="most tokens of an answer (256)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows decoded together (8)")
    parser.add_argument("--label", metavar="TEXT", help="the checkpoint's name (its path)")
    parser.add_argument("--raw", action="store_true", help="no chat template: prompts as they stand")
    add_task_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from mars_jax.evaluation.curve import draw
    from mars_jax.evaluation.points import FAMILIES, measured, settings, write_points
    from mars_jax.evaluation.run import Conditions, evaluate, quiet_libraries, select, write
    from mars_jax.evaluation.tasks import TaskChoice

    for family in args.families:
        if family not in FAMILIES:
            raise UserError(f"--families {family!r}: expected some of {', '.join(FAMILIES)}")
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: expected at least 1")
    conditions = Conditions(
        limit=args.limit,
        chat_template=not args.raw,
        max_new_tokens=args.max_new_tokens,
        allow_code=args.allow_code_execution,
        data_dir=args.data_dir,
    )
    choices = [TaskChoice(name, args.num_fewshot) for name in args.tasks]
    quiet_libraries()
    select(choices, conditions, strict=True)  # a wrong name or folder shows before the model is loaded
    make_lm = _language_models(args)
    label, points = args.label or args.model, []
    for setting in settings(args.families, args.window):
        selection = select(choices, conditions, strict=True)  # the harness's tasks keep what they were asked
        results, _ = evaluate(make_lm(setting), selection, conditions, label=label, model_path=args.model)
        write(results, args.output / "points" / setting.folder)
        points.append(measured(setting, results))
        write_points(points, {"label": label, "tasks": args.tasks, "limit": args.limit}, args.output)
        logger.info("%-20s score %.1f  tokens/forward %.2f  tokens/s %.1f", points[-1].name, points[-1].score,
                    points[-1].tokens_per_forward, points[-1].tokens_per_second)  # fmt: skip
    amount = f"{points[0].answers} answers, batch {args.batch_size}"
    title = f"{label}: {', '.join(args.tasks)} ({amount})"
    draw(points, title, "score, %").savefig(args.output / "curve.png", dpi=140)
    logger.info("wrote %s", args.output / "curve.png")


def _language_models(args: argparse.Namespace):
    """A maker of the harness's model for a setting; the weights are loaded once."""
    from mars_jax.decoding.engine import DecodeEngine
    from mars_jax.decoding.requests import DecodeOptions
    from mars_jax.evaluation.cache import AnswerCache
    from mars_jax.evaluation.harness import MarsLM
    from mars_jax.models.loading import load

    cli.keep_compiled_programs()
    model = load(args.model)
    engine = DecodeEngine(model, slots=args.batch_size)
    cache = AnswerCache(args.output / "answers.jsonl")

    def warm_up(requests) -> None:
        """Decode a first batch unmeasured, so that no point's seconds hold its compilation. The longest come first."""
        engine.generate(requests[: args.batch_size])

    def make(setting):
        options = DecodeOptions(**setting.options)
        return MarsLM(model, engine.completed, options, cache=cache, batch_size=args.batch_size, warm_up=warm_up)

    return make


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, run))
