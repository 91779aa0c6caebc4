"""`python -m mars_jax.benchmark`: speed and cost, side by side in one run."""

import argparse
import hashlib
import logging
import sys
from pathlib import Path

from mars_jax import cli
from mars_jax.errors import UserError

log = logging.getLogger("mars_jax.benchmark")

TRAIN_EXAMPLE = "python -m mars_jax.benchmark train --config configs/quickstart_mars.yaml --output runs/benchmark"
DECODE_EXAMPLE = "python -m mars_jax.benchmark decode --model runs/quickstart/export --output runs/benchmark"


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "benchmark",
        "Speed and cost, side by side in one run.",
        f"{TRAIN_EXAMPLE}\n  {DECODE_EXAMPLE}",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="train|decode|weights")
    train = kinds.add_parser(
        "train",
        help="FLOPs, memory and time of a training step: SFT, MARS, sampled blocks, the paper's way",
        epilog=f"example:\n  {TRAIN_EXAMPLE}",
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
    _add_weights(kinds)
    return parser


def _add_model_and_prompts(parser: argparse.ArgumentParser, written: str) -> None:
    parser.add_argument("--model", required=True, metavar="PATH", help="as for mars_jax.generate")
    parser.add_argument("--output", required=True, metavar="DIR", help=written)
    parser.add_argument(
        "--prompts", metavar="FILE.jsonl", help="as for mars_jax.generate; default: chats made by the package"
    )
    parser.add_argument("--count", type=int, default=32, metavar="N", help="prompts used; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")


def _add_decode(kinds) -> None:
    decode = kinds.add_parser(
        "decode",
        help="tokens a second of every decode mode at several batch sizes",
        epilog=f"example:\n  {DECODE_EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_and_prompts(decode, "for decode.json, decode.png and passes.jsonl")
    decode.add_argument(
        "--batches", default="1,4,8,16,32", metavar="B,…", help="slots of the engine; default: %(default)s"
    )
    decode.add_argument(
        "--variants",
        default="window,block,verify,lookup,jacobi",
        metavar="V,…",
        help="measured besides ar: names as in the table, or how they begin (verify tree, window tau=0.9); verify "
        "variants named adapt leave drafts out while they do not pay; default: %(default)s",
    )
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


def _add_weights(kinds) -> None:
    weights = kinds.add_parser(
        "weights",
        help="what bfloat16 and int8 change: greedy tokens, likelihood, bytes, and whether verify stays exact",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_and_prompts(weights, "for weights.json")
    weights.add_argument("--batch-size", type=int, default=8, metavar="N", help="slots; default: %(default)s")
    weights.add_argument("--draft", type=int, default=3, metavar="K", help="drafts of verify; default: %(default)s")
    weights.set_defaults(command=weights_command)


def weights_command(args: argparse.Namespace) -> None:
    from mars_jax.benchmarks import weights
    from mars_jax.decoding.requests import DecodeOptions
    from mars_jax.models.loading import load

    if args.count < 1 or args.batch_size < 1:
        raise UserError(f"--count {args.count} --batch-size {args.batch_size}: expected at least 1")
    base = DecodeOptions(max_new_tokens=args.max_new_tokens, draft=args.draft)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    model = load(args.model)
    prompts = _benchmark_prompts(args, model)
    qualities = weights.measure(model, prompts, base, args.batch_size)
    about = {"model": args.model, "max_new_tokens": args.max_new_tokens, "draft": args.draft}
    weights.write(qualities, folder / "weights.json", about)
    print(weights.table(qualities))


def decode_command(args: argparse.Namespace) -> None:
    from mars_jax.benchmarks import decode, decode_report, decode_steps
    from mars_jax.benchmarks.records import Records
    from mars_jax.decoding.requests import DecodeOptions
    from mars_jax.models.loading import load

    if args.count < 1 or args.repeats < 1:
        raise UserError(f"--count {args.count} --repeats {args.repeats}: expected at least 1")
    base = DecodeOptions(max_new_tokens=args.max_new_tokens, window=args.window)
    chosen = decode.select(decode.variants(base), args.variants.split(","))
    batches = _batch_sizes(args.batches)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    model = load(args.model)
    prompts = _benchmark_prompts(args, model)
    if max(batches) > len(prompts):
        log.warning("batch %d with %d prompts: some slots stay empty", max(batches), len(prompts))
    setup = {
        "model": args.model,
        "prompts": len(prompts),
        "prompt_ids": hashlib.sha256(repr(prompts).encode()).hexdigest()[:16],
        "max_new_tokens": args.max_new_tokens,
        "window": args.window,
        "context": args.context,
    }
    records = Records(folder / "passes.jsonl", setup)
    log.info("every pass is kept in %s: the same command goes on where it was", records.path)
    transformers_folder = Path(args.transformers) if args.transformers else None
    for batch in batches:
        decode.measure(model, prompts, chosen, [batch], args.repeats, records, transformers_folder)
        decode_steps.measure_steps(model, chosen, [batch], args.context, args.repeats, records)
        machine = decode_steps.best_machine(records)
        speeds, steps = decode.speeds(records), decode_steps.costs(records, machine)
        as_json = decode_report.as_json(speeds, setup | decode_steps.as_record(steps, machine))
        (folder / "decode.json").write_text(as_json, encoding="utf-8")
        decode_report.draw(speeds, folder / "decode.png")
        log.info("batch %d done: %s", batch, folder / "decode.json")
    if args.json:
        print(as_json)
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
