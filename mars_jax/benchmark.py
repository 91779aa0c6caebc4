"""`python -m mars_jax.benchmark`: speed and cost, side by side in one run."""

import argparse
import sys
from pathlib import Path

from mars_jax import cli


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "benchmark",
        "Speed and cost, side by side in one run.",
        "python -m mars_jax.benchmark train --config configs/smollm2_135m_mars.yaml --output runs/benchmark",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="train")
    train = kinds.add_parser(
        "train",
        help="FLOPs, memory and time of a training step: SFT, MARS, sampled blocks, the paper's way",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("--config", required=True, metavar="FILE", help="YAML file of a run, as for mars_jax.train")
    train.add_argument("--output", required=True, metavar="DIR", help="for train.json and train.png")
    train.add_argument("--chats", type=int, default=64, metavar="N", help="chats of a pass; default: %(default)s")
    train.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="timed passes; 0 only compiles; default: %(default)s"
    )
    train.add_argument("--json", action="store_true", help="JSON instead of the table on stdout")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that replace those of the file")
    train.set_defaults(command=train_command)
    return parser


def train_command(args: argparse.Namespace) -> None:
    from mars_jax.benchmarks import train, train_report
    from mars_jax.config import load_config

    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    cfg = load_config(args.config, [*args.overrides, f"output_dir={folder}"])
    costs = train.measure(cfg, args.chats, args.repeats)
    (folder / "train.json").write_text(train_report.as_json(costs), encoding="utf-8")
    train_report.draw(costs, folder / "train.png")
    print(train_report.as_json(costs) if args.json else train_report.table(costs))


def command(args: argparse.Namespace) -> None:
    args.command(args)


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, command))
