"""`python -m mars_jax.quickstart`: the whole road on chats made here, small enough for a laptop's processor."""

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mars_jax import cli
from mars_jax.errors import UserError

logger = logging.getLogger("mars_jax.quickstart")

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MODES = {
    "AR": {"mode": "ar"},
    "window τ=0.9": {"mode": "window", "tau": 0.9},
    "exact": {"mode": "verify"},
}
MAX_NEW_TOKENS = 96


@dataclass(frozen=True)
class Row:
    """One line of the table. Rates are shares of the prompts; seconds exclude compilation."""

    mode: str
    tokens_per_forward: float
    same_as_ar: float
    right_answers: float
    tokens_per_second: float


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "quickstart",
        "Train a small chat model, make it a MARS model, decode held-out prompts three ways and export it.",
        "python -m mars_jax.quickstart --out runs/quickstart",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/quickstart"), metavar="DIR", help="results; finished stages are kept"
    )
    parser.add_argument("--prompts", type=int, default=64, metavar="N", help="held-out prompts to decode (%(default)s)")
    return parser


def command(args: argparse.Namespace) -> None:
    from mars_jax.models.export import export
    from mars_jax.models.loading import load

    if args.prompts < 1:
        raise UserError(f"--prompts {args.prompts}: expected at least 1")
    started = time.perf_counter()
    ar_sft, mars, exported = (args.out / name for name in ("ar_sft", "mars", "export"))
    train_stage("ar_sft", [f"output_dir={ar_sft}"])
    train_stage("mars", [f"output_dir={mars}", f"model.path={ar_sft}"])
    export(load(mars), exported)
    chats = held_out_chats(args.prompts)
    model = load(exported)  # what is decoded is what a user would take away
    results, rows = compare(model, chats)
    (args.out / "results.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    picture = draw(args.out / "quickstart.png", results, rows, model.tokenizer)
    show(args.out, results, rows, chats, model.tokenizer, picture, time.perf_counter() - started)


def train_stage(name: str, overrides: list[str]) -> None:
    from mars_jax.config import load_config
    from mars_jax.training.loop import train

    path = CONFIGS / f"quickstart_{name}.yaml"
    if not path.is_file():
        raise UserError(f"{path}: no such file; the quickstart runs from a checkout of the repository")
    logger.info("training: python -m mars_jax.train --config configs/%s %s", path.name, " ".join(overrides))
    train(load_config(path, overrides))


def held_out_chats(count: int) -> list[list[dict]]:
    """Chats whose questions the training never saw; each ends with the right answer."""
    from mars_jax.data.synthetic import make_chats

    return make_chats("held_out", count, seed=1)


def compare(model, chats: list[list[dict]]):
    """Decode the chats in every mode. Returns the `Generation`s of each mode and the table's rows."""
    results, rows = {}, []
    for name, options in MODES.items():
        generations, seconds = decode(model, chats, options)
        results[name] = generations
        tokens = sum(len(g.token_ids) for g in generations)
        same = [g.token_ids == ar.token_ids for g, ar in zip(generations, results["AR"], strict=True)]
        right = [g.text == chat[-1]["content"] for g, chat in zip(generations, chats, strict=True)]
        rows.append(
            Row(
                mode=name,
                tokens_per_forward=tokens / sum(g.forwards for g in generations),
                same_as_ar=sum(same) / len(same),
                right_answers=sum(right) / len(right),
                tokens_per_second=tokens / seconds,
            )
        )
    return results, rows


def decode(model, chats: list[list[dict]], options: dict):
    """Results and seconds of a second pass over the prompts: the first one compiles."""
    from mars_jax.decoding.engine import DecodeEngine
    from mars_jax.decoding.prompts import encode
    from mars_jax.decoding.requests import DecodeOptions, Request

    options = DecodeOptions(max_new_tokens=MAX_NEW_TOKENS, **options)
    requests = [Request(encode(model.tokenizer, chat[:-1], raw=False, system=None), options) for chat in chats]
    engine = DecodeEngine(model, slots=8)
    logger.info("decoding %d prompts, mode %s", len(requests), options.mode)
    engine.generate(requests)
    began = time.perf_counter()
    return engine.generate(requests), time.perf_counter() - began


def draw(path: Path, results: dict, rows: list[Row], tokenizer) -> Path | None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        logger.info("matplotlib is not installed: no picture")
        return None
    from mars_jax.generate import texts_of_forwards
    from mars_jax.pictures import decoding_picture

    samples = {name: texts_of_forwards(sample(generations), tokenizer) for name, generations in results.items()}
    speeds = {row.mode: row.tokens_per_forward for row in rows}
    runs = {name: [n for g in generations for n in g.accepted] for name, generations in results.items()}
    decoding_picture(path, speeds, runs, samples)
    return path


def sample(generations: list):
    """The first answer of at least 30 tokens, the same prompt in every mode unless answers differ."""
    return next((g for g in generations if len(g.token_ids) >= 30), generations[0])


def show(out: Path, results, rows: list[Row], chats, tokenizer, picture: Path | None, seconds: float) -> None:
    from mars_jax.generate import coloured

    print(f"\n{'mode':14}{'tokens/forward':>16}{'same as AR':>12}{'right answers':>15}{'tokens/s':>10}")
    for row in rows:
        print(
            f"{row.mode:14}{row.tokens_per_forward:16.2f}{row.same_as_ar:12.0%}{row.right_answers:15.0%}"
            f"{row.tokens_per_second:10.0f}"
        )
    print(f"\n{len(chats)} held-out prompts, 8 at a time; each colour below is one forward:")
    for name, generations in results.items():
        answer = sample(generations)
        question = chats[generations.index(answer)][-2]["content"]
        print(f"\n{name}: {question}\n{coloured(answer, tokenizer)}")
    print(f"\ncheckpoint  {out / 'mars'}\nexported    {out / 'export'}  (loads in transformers)")
    print(f"numbers     {out / 'results.json'}\ncurves      {out / 'mars' / 'report.png'}")
    if picture:
        print(f"picture     {picture}")
    print(f'\nnext: python -m mars_jax.generate --model {out / "export"} --prompt "What is 48 + 25?" --show-steps')
    logger.info("quickstart took %.0f s", seconds)


if __name__ == "__main__":
    sys.exit(cli.main(build_parser, command))
