"""`python -m mars_jax.train`: train, or continue training, a model."""

import argparse
import sys

from mars_jax import cli

EXAMPLE = "python -m mars_jax.train --config configs/quickstart_mars.yaml train.steps=50 output_dir=runs/try"


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser("train", __doc__.split(": ", 1)[1], EXAMPLE)
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML file; mars_jax/config_sections.py lists its keys"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resulting configuration and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that replace those of the file")
    return parser


def command(args: argparse.Namespace) -> None:
    from mars_jax.config import dump_config, load_config
    from mars_jax.parallel import processes

    cfg = load_config(args.config, args.overrides)
    if args.print_config:
        print(dump_config(cfg), end="")
        return
    processes.join(cfg.mesh.distributed)
    from mars_jax.training.loop import train

    train(cfg)


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, command))
