"""`python -m mars_jax.prepare`: tokenise and pack a corpus ahead of training."""

import argparse
import logging
import os
import sys

from mars_jax import cli

EXAMPLE = (
    "python -m mars_jax.prepare --data tests/golden/synth/train.jsonl --tokenizer tests/golden/tiny-qwen2 "
    "--row-length 256 --out runs/prepared"
)

log = logging.getLogger("mars_jax.prepare")


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "prepare",
        "Tokenise chats and pack them into rows, in parallel, into a folder for data.path. The rows do not depend on "
        "the number of workers. Run again after an interruption, it writes only the shards that are missing.",
        EXAMPLE,
    )
    parser.add_argument("--data", required=True, metavar="PATH", help="chats, as data.path of a training config")
    parser.add_argument(
        "--tokenizer", required=True, metavar="PATH", help="a Hugging Face folder, a hub id, a .gguf file or a run"
    )
    parser.add_argument("--row-length", required=True, type=int, metavar="N", help="objective.row_length of training")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to fill")
    parser.add_argument("--split", default="train", help="of a hub or tfds data set; default: %(default)s")
    parser.add_argument("--subset", metavar="NAME", help="configuration of a hub or tfds data set")
    parser.add_argument("--prompt-column", metavar="NAME", help="where data has no messages; default: prompt, question")
    parser.add_argument("--answer-column", metavar="NAME", help="default: answer")
    parser.add_argument("--max-rows", type=int, metavar="N", help="chats read at most")
    parser.add_argument("--no-pack", action="store_true", help="one chat a row")
    parser.add_argument("--shard-chats", type=int, default=10_000, metavar="N", help="a shard; default: %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="default: %(default)s")
    return parser


def command(args: argparse.Namespace) -> None:
    from mars_jax.data.config import DataConfig
    from mars_jax.data.preparing import prepare
    from mars_jax.errors import UserError

    for name in ("row_length", "shard_chats", "workers"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    try:
        cfg = DataConfig(
            path=args.data,
            subset=args.subset,
            split=args.split,
            prompt_column=args.prompt_column,
            answer_column=args.answer_column,
            max_rows=args.max_rows,
            pack=not args.no_pack,
            eval_rows=0,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    report = prepare(
        cfg, args.tokenizer, args.out, row_length=args.row_length, shard_chats=args.shard_chats, workers=args.workers
    )
    log.info("%s: %s", args.out, report)


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, command))
