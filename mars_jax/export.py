"""`python -m mars_jax.export`: a checkpoint as a Hugging Face folder."""

import argparse
import re
import sys

from mars_jax import cli


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "export",
        "Write a checkpoint as a Hugging Face folder, which transformers and every server load without custom code.",
        "python -m mars_jax.export --checkpoint runs/quickstart/mars --out runs/exported",
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="a run's output_dir; also a Hugging Face folder, a hub id, a .gguf file or an adapter's folder",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="the folder to write; an earlier export is replaced"
    )
    parser.add_argument("--step", type=int, metavar="N", help="of the run's checkpoints; default: the latest")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the low-rank update of a LoRA run alone, as a PEFT adapter; default: merged into the weights",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of all tensors; default: each keeps the type it has in the source (an adapter: float32)",
    )
    parser.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of a weight file; default: %(default)s"
    )
    parser.add_argument(
        "--mask-token", metavar="TEXT", help="the token recorded as [MASK]; default: the source's choice"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a folder that is not an export, with all it holds"
    )
    return parser


def _size(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 200MB")
    return text


def command(args: argparse.Namespace) -> None:
    from mars_jax.models.export import export, export_adapter
    from mars_jax.models.loading import load

    model = load(args.checkpoint, step=args.step, mask_token=args.mask_token)
    if args.adapter:
        print(export_adapter(model, args.out, dtype=args.dtype, force=args.force))
        return
    print(export(model, args.out, dtype=args.dtype, max_shard_size=args.max_shard_size, force=args.force))


def main(argv=None) -> int:
    return cli.main(build_parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
