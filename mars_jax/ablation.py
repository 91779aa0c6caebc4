"""`python -m mars_jax.ablation`: the same small experiment for every choice of training, from one AR model."""

import argparse
import importlib.util
import logging
import sys
from pathlib import Path

from mars_jax import cli
from mars_jax.errors import UserError

logger = logging.getLogger("mars_jax.ablation")

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
START, RESULT = "start", "result.json"


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "ablation",
        "Train small variants of MARS from one AR model and compare cost, AR quality and tokens per forward.",
        "python -m mars_jax.ablation --output runs/ablation --only mars,quarter,b8",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR",
                        help="results.json, table.md, ablation.png, a folder a variant; resumes")  # fmt: skip
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,…", help="variants (all)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each variant (as configs/ablation_mars.yaml)")
    parser.add_argument(
        "--prompts", type=int, default=128, metavar="N", help="held-out prompts to decode (%(default)s)"
    )
    parser.add_argument("--table", action="store_true", help="only print the table of what is finished")
    return parser


def command(args: argparse.Namespace) -> None:
    from mars_jax.benchmarks.ablation import select
    from mars_jax.benchmarks.ablation_report import table

    if args.prompts < 1 or (args.steps is not None and args.steps < 1):
        raise UserError(f"--prompts {args.prompts} --steps {args.steps}: expected at least 1")
    variants = select(args.only)
    if not args.table and not run_all(args, variants):
        logger.info("stopped by SIGTERM; the same command continues")
        return
    results = read_results(args.output)
    if not results:
        raise UserError(f"--output {args.output}: no variant is finished there")
    print(table(results))


def run_all(args: argparse.Namespace, variants) -> bool:
    """Train and measure what is unfinished; false if stopped on the way."""
    from mars_jax.benchmarks.ablation import is_finished, run_variant, train_to_end, write_result
    from mars_jax.quickstart import held_out_chats

    jobs = [(variant, stage_2(args, variant)) for variant in variants]
    jobs = [job for job in jobs if not is_finished(args.output / job[0].name / RESULT, job[1], args.prompts)]
    if jobs and not train_to_end(stage("ar_sft", [f"output_dir={args.output / START}"])):
        return False
    chats = held_out_chats(args.prompts)
    for variant, cfg in jobs:
        result = run_variant(variant.name, cfg, chats)
        if result is None:
            return False
        write_result(result, args.output / variant.name / RESULT)
        write_report(args.output)
    return True


def stage_2(args: argparse.Namespace, variant):
    """The variant's `RunConfig`."""
    overrides = [f"output_dir={args.output / variant.name}", f"model.path={args.output / START}", *variant.overrides]
    if args.steps is not None:
        overrides += [f"train.steps={args.steps}", f"train.save_every={args.steps}"]
    return stage("mars", overrides)


def stage(name: str, overrides: list[str]):
    from mars_jax.config import load_config

    path = CONFIGS / f"ablation_{name}.yaml"
    if not path.is_file():
        raise UserError(f"{path}: no such file; ablations run from a checkout of the repository")
    logger.info("python -m mars_jax.train --config configs/%s %s", path.name, " ".join(overrides))
    return load_config(path, overrides)


def read_results(folder: Path) -> list:
    from mars_jax.benchmarks.ablation import VARIANTS, read_result

    found = (read_result(folder / variant.name / RESULT) for variant in VARIANTS)
    return [result for result in found if result]


def write_report(folder: Path) -> None:
    from mars_jax.benchmarks.ablation_report import as_json, draw, table

    results = read_results(folder)
    (folder / "results.json").write_text(as_json(results), encoding="utf-8")
    (folder / "table.md").write_text(table(results) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        draw(results, folder / "ablation.png")
    else:
        logger.info("matplotlib is not installed: no picture")


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, command))
