"""Text from prompts: `mars_jax.generate(model, prompts)` and `python -m mars_jax.generate`."""

import argparse
import json
import logging
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mars_jax import cli
from mars_jax.errors import UserError

if TYPE_CHECKING:
    from mars_jax.decoding.prompts import Prompt
    from mars_jax.decoding.requests import Generation, Request

logger = logging.getLogger("mars_jax.generate")

EXAMPLE = 'python -m mars_jax.generate --model runs/quickstart/export --prompt "Count from 2 to 6." --show-steps'
COLOURS = ("\033[30;46m", "\033[30;43m", "\033[30;42m", "\033[30;45m")
PLAIN = "\033[0m"


def generate(
    model,
    prompts,
    *,
    batch_size: int = 8,
    adapt: bool = False,
    raw: bool = False,
    system: str | None = None,
    **options,
) -> "list[Generation]":
    """Decode prompts with a `LoadedModel`; results in order.

    prompts: each a text, a list of chat messages or a list of token ids; or one text.
    batch_size: rows decoded together.
    adapt: in the exact modes, leave drafts out while they do not pay here, see `decoding.engine.DecodeEngine`.
    raw: texts are continued as they stand, without the chat template.
    system: a system message put before each chat.
    options: fields of `decoding.requests.DecodeOptions`: `mode`, `tau`, `max_new_tokens`, …

    Raises `UserError` for an option out of range or a prompt that does not fit the model's context.
    """
    from mars_jax.decoding.engine import DecodeEngine
    from mars_jax.decoding.prompts import encode
    from mars_jax.decoding.requests import Request

    prompts = [prompts] if isinstance(prompts, str) else prompts
    options = decode_options(options)
    requests = [Request(encode(model.tokenizer, p, raw=raw, system=system), options) for p in prompts]
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: expected at least 1")
    return DecodeEngine(model, slots=min(batch_size, max(1, len(requests))), adapt=adapt).generate(requests)


class _CallableModule(types.ModuleType):
    """`mars_jax.generate(…)` also where this module, and not the function, is what the package's attribute holds."""

    def __call__(self, *args, **kwargs):
        return generate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule


def decode_options(values: dict):
    from mars_jax.decoding.requests import OPTION_NAMES, DecodeOptions

    unknown = set(values) - set(OPTION_NAMES)
    if unknown:
        raise UserError(f"{min(unknown)!r} is no decode option: expected one of {', '.join(OPTION_NAMES)}")
    return DecodeOptions(**values)


def build() -> argparse.ArgumentParser:
    from mars_jax.decoding.weights import STORAGE

    parser = cli.parser("generate", "Text from prompts, several tokens a forward.", EXAMPLE)
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="folder, hub id, .gguf file or a run's output_dir"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", nargs="+", metavar="TEXT", help="prompts")
    source.add_argument("--prompts", metavar="FILE.jsonl", help="a prompt a line: prompt, messages or token_ids")
    source.add_argument("stdin", nargs="?", metavar="-", help="the lines of --prompts from standard input")
    parser.add_argument("--output", metavar="FILE.jsonl", help="write results here, in input order")
    parser.add_argument("--json", action="store_true", help="print results as JSON lines")
    parser.add_argument("--show-steps", action="store_true", help="colour the tokens of each forward")
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text as it stands")
    parser.add_argument("--system", metavar="TEXT", help="system message of each chat")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows decoded together (8)")
    parser.add_argument("--weights", choices=list(STORAGE), default="float32", help="how weights are stored (float32)")
    parser.add_argument(
        "--adapt",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="in the exact modes, leave drafts out while they do not pay here: the same greedy text, but run lengths, "
        "and the draws of sampling, come to depend on timing (no)",
    )

    parser.add_argument(
        "--tune",
        action="store_true",
        help="first measure step costs here and what some of the prompts accept, and choose window, or draft and "
        "layout, or plain ar, by them",
    )
    add_decode_arguments(parser)
    return parser


def add_decode_arguments(parser: argparse.ArgumentParser):
    """An argument for every field of `DecodeOptions`, absent unless given; shared by all commands that decode."""
    from mars_jax.decoding.requests import LAYOUTS, MODES
    from mars_jax.decoding.settings import SCORES

    options = parser.add_argument_group("decoding")
    options.add_argument(
        "--mode",
        choices=MODES,
        help="window trusts scores; verify, lookup and jacobi give what ar gives; diffusion is for recipe "
        "block_diffusion (window)",
    )
    options.add_argument("--tau", type=float, metavar="F", help="threshold of the score (0.9)")
    options.add_argument("--score", choices=SCORES, help="what is compared with tau (probability)")
    options.add_argument(
        "--gate-first", action=argparse.BooleanOptionalAction, help="end a run at an unsure first token (no)"
    )
    options.add_argument("--window", type=int, metavar="W", help="placeholders a forward (3)")
    options.add_argument("--cache-block", type=int, metavar="N", help="block of mode block (16)")
    options.add_argument("--draft", type=int, metavar="K", help="drafts a forward in the exact modes (3)")
    options.add_argument("--layout", choices=LAYOUTS, help="where verify puts placeholders (tree)")
    options.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        help="verify checks drafts from the text so far too, and takes the longer run (no)",
    )
    options.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (256)")
    options.add_argument("--min-new-tokens", type=int, metavar="N", help="no end before so many tokens (0)")
    options.add_argument("--stop", nargs="+", metavar="STR", help="texts that end an answer")

    options.add_argument(
        "--logprobs", type=int, metavar="N", help="also log-probabilities, of each token and of the N likeliest (none)"
    )

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, metavar="F", help="0 takes the likeliest token (0)")
    sampling.add_argument("--top-k", type=int, metavar="N", help="draw among the N likeliest tokens (all)")
    sampling.add_argument("--top-p", type=float, metavar="F", help="draw among those that reach this mass (1)")
    sampling.add_argument("--min-p", type=float, metavar="F", help="and are this fraction of the likeliest (0)")
    sampling.add_argument("--seed", type=int, metavar="N", help="of the draws, the same for each prompt (a new one)")
    sampling.add_argument("--repetition-penalty", type=float, metavar="F", help="for tokens of prompt and answer (1)")
    sampling.add_argument("--presence-penalty", type=float, metavar="F", help="for tokens of the answer (0)")
    sampling.add_argument("--frequency-penalty", type=float, metavar="F", help="for each of their occurrences (0)")
    sampling.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=VALUE", help="added to a token id's logit; repeatable"
    )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected ID=VALUE, such as 42=-100") from None


def given_options(args: argparse.Namespace) -> dict:
    """The decode options that were given, by field."""
    from mars_jax.decoding.requests import OPTION_NAMES

    given = {name: value for name in OPTION_NAMES if (value := getattr(args, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def command(args: argparse.Namespace):
    from mars_jax.decoding.engine import DecodeEngine
    from mars_jax.decoding.prompts import encode
    from mars_jax.decoding.requests import Request
    from mars_jax.models.loading import load

    given = given_options(args)
    decode_options(given)
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: expected at least 1")
    if args.raw and args.system is not None:
        raise UserError("--system is part of a chat, and --raw means no chat: leave one out")
    _check_source(args)
    prompts = list(_prompts(args))
    if not prompts:
        raise UserError("no prompts: the input is empty")

    cli.keep_compiled_programs()
    model = load(args.model)
    engine = DecodeEngine(model, slots=min(args.batch_size, len(prompts)), weights=args.weights)
    requests = []
    for prompt in prompts:
        try:
            options = decode_options(given | prompt.overrides)
            if args.show_steps and options.mode == "diffusion":
                raise UserError("--show-steps colours runs, but mode diffusion fills places in any order")
            requests.append(Request(encode(model.tokenizer, prompt.content, raw=args.raw, system=args.system), options))
            engine.check(requests[-1])
        except UserError as error:
            raise UserError(f"{prompt.where}: {error}") from error

    if args.tune:
        requests = _tuned(engine, requests, decode_options(given))
    engine.adapt = args.adapt
    with _outputs(args) as outputs:
        started = time.perf_counter()
        results = [None] * len(requests)
        written = 0
        for index, result in engine.completed(requests):
            results[index] = result
            while written < len(results) and results[written] is not None:
                _write(prompts[written], results[written], args, outputs, model.tokenizer)
                written += 1
        _log_summary(results, time.perf_counter() - started)


def _tuned(engine, requests: "list[Request]", base) -> "list[Request]":
    """The requests, those in `base`'s mode in the step shape that is fastest for them here."""
    from mars_jax.decoding.tuning import choose, table, tune

    own = [request for request in requests if request.options.mode == base.mode]
    if not own:
        raise UserError(f"--tune: no prompt is in mode {base.mode!r}")
    candidates = tune(engine, [request.token_ids for request in own], base)
    logger.info("step costs here, and what these prompts yield:\n%s", table(candidates, engine.slots))
    best = choose(candidates).options
    shape = {name: getattr(best, name) for name in ("mode", "window", "draft", "layout", "lookup")}
    return [
        replace(request, options=replace(request.options, **shape)) if request.options.mode == base.mode else request
        for request in requests
    ]


def _check_source(args: argparse.Namespace):
    if args.stdin not in (None, "-"):
        raise UserError(f"{args.stdin!r} belongs to no option: texts follow --prompt, and - is standard input")
    if args.prompt is None and args.prompts is None and args.stdin is None:
        raise UserError("nothing to answer: give --prompt TEXT, --prompts FILE.jsonl, or - for standard input")
    if args.output and args.prompts and Path(args.output).resolve() == Path(args.prompts).resolve():
        raise UserError(f"--output {args.output} is the file of --prompts, which it would overwrite: name another one")


def _prompts(args: argparse.Namespace) -> "Iterator[Prompt]":
    from mars_jax.decoding.prompts import Prompt, read_prompts

    if args.prompt:
        return (Prompt(str(i), f"prompt {i}", text, {}) for i, text in enumerate(args.prompt))
    if args.stdin or args.prompts == "-":
        return read_prompts(sys.stdin.buffer.read(), "standard input")
    try:
        content = Path(args.prompts).read_bytes()
    except OSError as error:
        raise UserError(f"--prompts {args.prompts}: cannot be read: {error}") from error
    return read_prompts(content, args.prompts)


@contextmanager
def _outputs(args: argparse.Namespace):
    """The files that get JSON lines."""
    files = [sys.stdout] if args.json else []
    if not args.output:
        yield files
        return
    try:
        file = open(args.output, "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {args.output}: cannot be written: {error}") from error
    with file:
        yield [*files, file]


def _write(prompt: "Prompt", result: "Generation", args, outputs, tokenizer):
    line = json.dumps(as_record(prompt.id, result), ensure_ascii=False)
    for file in outputs:
        print(line, file=file, flush=True)
    if args.show_steps:
        print(coloured(result, tokenizer), file=sys.stderr if args.json else sys.stdout, flush=True)
    elif not outputs:
        print(result.text, flush=True)


def as_record(id: str, result: "Generation") -> dict:
    """A line of the output; with `logprobs` if they were asked for."""
    logprobs = {} if result.logprobs is None else {"logprobs": [asdict(token) for token in result.logprobs]}
    return {
        "id": id,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "forwards": result.forwards,
        "accepted": result.accepted,
        "mode": result.options.mode,
        "tau": None if result.options.mode == "ar" or result.options.exact else result.options.tau,
        **logprobs,
    }


def coloured(result: "Generation", tokenizer) -> str:
    """The text with the tokens of each forward in one colour."""
    texts = texts_of_forwards(result, tokenizer)
    return "".join(f"{COLOURS[i % len(COLOURS)]}{text}{PLAIN}" if text else "" for i, text in enumerate(texts))


def texts_of_forwards(result: "Generation", tokenizer) -> list[str]:
    """What each forward added to the text; a character split over forwards goes to its last one."""
    texts, shown, end = [], "", 0
    for length in result.accepted:
        end += length
        text = tokenizer.decode(result.token_ids[:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(result.token_ids):
            texts.append("")
        else:
            texts.append(text[len(shown) :])
            shown = text
    return texts


def _log_summary(results: "list[Generation]", seconds: float):
    tokens, forwards = sum(len(r.token_ids) for r in results), sum(r.forwards for r in results)
    logger.info(
        "%d prompt%s, %d tokens in %d forwards: %.2f tokens a forward; %.1f s with compilation",
        len(results), "" if len(results) == 1 else "s", tokens, forwards, tokens / forwards, seconds,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(build, command, argv)


if __name__ == "__main__":
    sys.exit(main())
