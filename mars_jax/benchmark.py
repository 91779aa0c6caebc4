"""`python -m mars_jax.benchmark`: speed and cost, side by side in one run."""

import argparse
import dataclasses
import sys
from pathlib import Path

from mars_jax import cli
from mars_jax.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "benchmark",
        "Speed and cost, side by side in one run.",
        "python -m mars_jax.benchmark train --config configs/smollm2_135m_mars.yaml --output runs/benchmark",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="train|decode")
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
    _add_decode(kinds)
    return parser


def _add_decode(kinds) -> None:
    decode = kinds.add_parser(
        "decode",
        help="tokens a second of every decode mode at several batch sizes",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    decode.add_argument("--model", required=True, metavar="PATH", help="as for mars_jax.generate")
    decode.add_argument("--output", required=True, metavar="DIR", help="for decode.json and decode.png")
    decode.add_argument(
        "--prompts", metavar="FILE.jsonl", help="as for mars_jax.generate; default: chats made by the package"
    )
    decode.add_argument("--count", type=int, default=16, metavar="N", help="prompts used; default: %(default)s")
    decode.add_argument("--batches", default="1,4,8", metavar="B,…", help="slots of the engine; default: %(default)s")
    decode.add_argument(
        "--modes",
        default="window,block,verify,lookup,jacobi",
        metavar="M,…",
        help="measured besides ar; default: %(default)s",
    )
    decode.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    decode.add_argument("--window", type=int, default=3, metavar="W", help="placeholders; default: %(default)s")
    decode.add_argument("--repeats", type=int, default=3, metavar="N", help="timed passes; default: %(default)s")
    decode.add_argument(
        "--context", type=int, default=256, metavar="N", help="tokens before the single steps; default: %(default)s"
    )
    decode.add_argument(
        "--transformers", metavar="DIR", help="exported folder whose `generate` is timed too; needs torch"
    )
    decode.add_argument("--paper-table", action="store_true", help="also the paper's wall-clock table, ours beside")
    decode.add_argument("--json", action="store_true", help="JSON instead of the table on stdout")
    decode.set_defaults(command=decode_command)


def decode_command(args: argparse.Namespace) -> None:
    from mars_jax.benchmarks import decode, decode_report, decode_steps
    from mars_jax.decoding.requests import DecodeOptions
    from mars_jax.models.loading import load

    if args.count < 1 or args.repeats < 1:
        raise UserError(f"--count {args.count} --repeats {args.repeats}: expected at least 1")
    base = DecodeOptions(max_new_tokens=args.max_new_tokens, window=args.window)
    chosen = decode.select(decode.variants(base), args.modes.split(","))
    batches = _batch_sizes(args.batches)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    model = load(args.model)
    prompts = _benchmark_prompts(args, model)
    transformers_folder = Path(args.transformers) if args.transformers else None
    machine = decode_steps.measure_machine()
    steps = decode_steps.measure_steps(model, chosen, batches, args.context, args.repeats, machine)
    speeds = decode.measure(model, prompts, chosen, batches, args.repeats, transformers_folder)
    about = {
        "model": args.model,
        "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "machine": dataclasses.asdict(machine),
        "steps": [dataclasses.asdict(s) | {"roofline_share": s.roofline_share} for s in steps],
    }
    (folder / "decode.json").write_text(decode_report.as_json(speeds, about), encoding="utf-8")
    decode_report.draw(speeds, folder / "decode.png")
    if args.json:
        print(decode_report.as_json(speeds, about))
        return
    print(decode_report.table(speeds) + "\n\n" + decode_steps.table(steps, machine))
    if args.paper_table:
        print("\n" + decode_report.paper_table(speeds))


def _batch_sizes(text: str) -> list[int]:
    sizes = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise UserError(f"--batches {text}: expected numbers of at least 1, separated by commas")
    return sizes


def _benchmark_prompts(args: argparse.Namespace, model) -> list[tuple[int, ...]]:
    """Token ids of the first prompts of the file, or of the package's own held-out chats."""
    from mars_jax.data.synthetic import make_chats
    from mars_jax.decoding.prompts import encode, read_prompts

    if args.prompts is None:
        contents = [chat[:-1] for chat in make_chats("held_out", args.count)]
    else:
        try:
            content = Path(args.prompts).read_bytes()
        except OSError as error:
            raise UserError(f"--prompts {args.prompts}: cannot be read: {error}") from error
        contents = [prompt.content for prompt in read_prompts(content, args.prompts)][: args.count]
    if not contents:
        raise UserError(f"--prompts {args.prompts}: no prompts")
    return [encode(model.tokenizer, content, raw=False, system=None) for content in contents]


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
