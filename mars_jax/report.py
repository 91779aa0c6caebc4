"""`python -m mars_jax.report`: the paper's tables with our results beside its numbers."""

import argparse
import logging
import sys
from pathlib import Path

from mars_jax import cli

logger = logging.getLogger("mars_jax.report")


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "report",
        "Turn results of `evaluate` (or the points of `sweep`) into the paper's tables, its numbers beside ours. "
        "A run is set beside the paper's row of the same label (`evaluate --label 'MARS B=4'`), mode and nearest size.",
        "python -m mars_jax.report runs/evaluation --markdown report.md --html report.html",
    )
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="PATH", help="results.json, or a folder that holds one"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="Markdown (default: to stdout)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one HTML page")
    return parser


def run(args: argparse.Namespace) -> None:
    from mars_jax.evaluation import render
    from mars_jax.evaluation.results import read_run
    from mars_jax.evaluation.tables import all_tables

    tables = all_tables([read_run(path) for path in args.results])
    if args.html:
        _write(args.html, render.page(tables))
    if args.markdown:
        _write(args.markdown, render.markdown(tables))
    if not (args.html or args.markdown):
        sys.stdout.write(render.markdown(tables))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    logger.info("wrote %s", path)


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, run))
