"""`python -m mars_jax.estimate`: whether a run fits a TPU slice, how long it takes there at least, what that costs."""

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mars_jax import cli
from mars_jax.errors import UserError

GIB = 2**30
EXAMPLE = (
    "python -m mars_jax.estimate --config configs/paper/0p5b_mars_b4.yaml --topology v5e:4x4 --rows 2000000 \\\n"
    "    --architecture configs/architectures/qwen2p5_0p5b.json"
)


class DoesNotFitError(Exception):
    """The step needs more memory than a chip has."""


@dataclass(frozen=True)
class RunEstimate:
    """What a run takes on its slices.

    memory_gib: of a chip. step_seconds: `least_step_seconds` over the efficiency. cost: in the unit of the prices
    file, None without one.
    """

    topology: str
    slices: int
    chips: int
    memory_gib: float
    least_step_seconds: float
    bound: str
    step_seconds: float
    steps: int
    hours: float
    device_hours: float
    cost: float | None


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "estimate",
        "Whether a run fits a TPU slice, how long it takes there at least, and what that costs. Compiles the step as\n"
        "mars_jax.compile does and asks no cloud. Exit code 1 if it does not fit.",
        EXAMPLE,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of a run, as for mars_jax.train")
    parser.add_argument("--topology", required=True, metavar="NAME", help="one slice: v5e:4x4, v5p:2x2x2, v6e:16x16, …")
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="slices that share the batch (default 1)")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of an epoch; needed with train.epochs")
    parser.add_argument(
        "--efficiency",
        type=float,
        default=1.0,
        metavar="F",
        help="least over real step time, as measured on such a slice; default 1: all times are then lower bounds",
    )
    parser.add_argument("--architecture", metavar="FILE", help="config.json in place of that of model.path")
    parser.add_argument("--prices", metavar="FILE", help="YAML of GENERATION: PRICE of a chip-hour, such as v5e: 1.0")
    parser.add_argument("--json", action="store_true", help="JSON instead of text on stdout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that replace those of the file")
    return parser


def slice_share(cfg, slices: int) -> list[str]:
    """The overrides that make of a run's configuration the share of one of its slices; `mesh.data` lies across them."""
    share = [f"train.global_batch={cfg.train.global_batch // slices}"]
    if cfg.mesh.data > 0 and cfg.mesh.data % slices == 0:
        share.append(f"mesh.data={cfg.mesh.data // slices}")
    return share


def compile_step(args: argparse.Namespace, share: list[str]) -> dict:
    """What `mars_jax.compile --json` says of one slice's share of a step. Raises UserError and DoesNotFitError."""
    words = [sys.executable, "-m", "mars_jax.compile", "--json", "--config", args.config, "--topology", args.topology]
    if args.architecture is not None:
        words += ["--architecture", args.architecture]
    words += [*args.overrides, *share]
    result = subprocess.run(words, capture_output=True, text=True)
    message = result.stderr.strip().removeprefix("error: ").removesuffix(" (--debug shows where)")
    if result.returncode == cli.EXIT_USAGE:
        raise UserError(message)
    if result.returncode != cli.EXIT_DONE:
        kind, _, rest = message.partition("DoesNotFitError: ")
        raise DoesNotFitError(rest) if not kind else RuntimeError(f"mars_jax.compile failed: {message}")
    return json.loads(result.stdout)


def count_steps(train, rows: int | None) -> int:
    """Steps of a run; `train` is its config's section."""
    if train.steps is not None:
        return train.steps
    if rows is None:
        raise UserError(
            f"train.epochs={train.epochs}: say with --rows N how many rows an epoch has (chats, with data.pack=false)"
        )
    return math.ceil(train.epochs * rows / train.global_batch)  # as `data.pipeline` counts: epochs run into each other


def chip_hour_price(file: str, topology: str) -> float:
    from omegaconf import OmegaConf

    generation = topology.partition(":")[0]
    if not Path(file).is_file():
        raise UserError(f"--prices {file}: no such file")
    prices = OmegaConf.to_container(OmegaConf.load(file))
    price = prices.get(generation) if isinstance(prices, dict) else None
    if not isinstance(price, int | float) or price < 0:
        raise UserError(f"--prices {file}: no price of a {generation} chip-hour; add a line such as {generation}: 1.0")
    return float(price)


def estimate_run(args: argparse.Namespace) -> RunEstimate:
    from mars_jax.config import load_config

    cfg = load_config(args.config, args.overrides)
    train = cfg.train
    if args.slices < 1 or train.global_batch % args.slices:
        raise UserError(f"--slices {args.slices} do not share train.global_batch={train.global_batch} rows evenly")
    if not 0 < args.efficiency <= 1:
        raise UserError(f"--efficiency {args.efficiency}: expected a share in (0, 1]")
    steps = count_steps(train, args.rows)
    price = None if args.prices is None else chip_hour_price(args.prices, args.topology)
    compiled = compile_step(args, slice_share(cfg, args.slices))
    memory = compiled["memory"]
    total = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["code"]
    chips = args.slices * math.prod(compiled["mesh"].values())
    least = compiled["estimate"]["step_seconds"]
    hours = steps * least / args.efficiency / 3600
    return RunEstimate(
        topology=args.topology,
        slices=args.slices,
        chips=chips,
        memory_gib=total / GIB,
        least_step_seconds=least,
        bound=compiled["estimate"]["bound"],
        step_seconds=least / args.efficiency,
        steps=steps,
        hours=hours,
        device_hours=hours * chips,
        cost=None if price is None else hours * chips * price,
    )


def describe(run: RunEstimate, efficiency: float) -> str:
    at_least = "at least " if efficiency == 1 else f"at an efficiency of {efficiency:g}, "
    lines = [
        f"{run.slices} x {run.topology}: {run.chips} chips; the step fits, with {run.memory_gib:.2f} GiB on each chip",
        f"least step time: {run.least_step_seconds:.3f} s, bound by {run.bound}",
        f"{run.steps} steps: {at_least}{run.hours:.1f} h, {run.device_hours:.0f} chip-hours",
    ]
    if run.slices > 1:
        lines.append("the network between slices is not counted")
    if run.cost is not None:
        lines.append(f"cost: {at_least}{run.cost:.2f}")
    return "\n".join(lines)


def command(args: argparse.Namespace) -> None:
    run = estimate_run(args)
    print(json.dumps(vars(run), indent=2) if args.json else describe(run, args.efficiency))


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, command))
