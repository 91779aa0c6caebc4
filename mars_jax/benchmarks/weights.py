"""What narrower weights and activations change: greedy tokens, likelihood, bytes, and whether `verify` stays exact."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.decoding.batch import bucket
from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.decoding.state import NEVER
from mars_jax.models.loading import LoadedModel
from mars_jax.objective.visibility import public

SHORTEST = 128  # tokens of a compiled forward, least


@dataclass(frozen=True)
class Precision:
    """weights: how they are stored. activations: of activations and cache."""

    weights: str
    activations: str = "float32"


PRECISIONS = (
    Precision("float32"),
    Precision("bfloat16"),
    Precision("int8"),
    Precision("float32", activations="bfloat16"),
    Precision("bfloat16", activations="bfloat16"),
)


@dataclass(frozen=True)
class Flip:
    """Where an answer first differs from another. position: in the answer, from 0.

    margin: the best logit less the next one there, by the float32 model after the tokens that both share.
    """

    prompt: int
    position: int
    margin: float


@dataclass(frozen=True)
class Quality:
    """A precision over all prompts.

    bytes:        of the weights.
    flips:        of greedy `ar` against float32. verify_flips: of `verify` against `ar`, both of this precision.
    nll:          nats a token of float32's answers.
    """

    precision: Precision
    prompts: int
    bytes: int
    flips: list[Flip]
    verify_flips: list[Flip]
    nll: float

    @property
    def same(self) -> float:
        """Share of prompts with exactly float32's token ids."""
        return 1 - len(self.flips) / self.prompts

    @property
    def verify_same(self) -> float:
        return 1 - len(self.verify_flips) / self.prompts


def measure(
    model: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    base: DecodeOptions,
    slots: int,
    precisions: Sequence[Precision] = PRECISIONS,
) -> list[Quality]:
    """Qualities of the precisions; `base` gives limits, draft and layout."""
    reference = DecodeEngine(model, slots=slots)
    expected = _answers(reference, prompts, base, "ar")
    found = []
    for precision in precisions:
        engine = DecodeEngine(model, slots=slots, dtype=jnp.dtype(precision.activations), weights=precision.weights)
        answers = _answers(engine, prompts, base, "ar")
        verified = _answers(engine, prompts, base, "verify")
        nlls = [_nlls(engine, prompt, answer) for prompt, answer in zip(prompts, expected, strict=True)]
        found.append(
            Quality(
                precision=precision,
                prompts=len(prompts),
                bytes=sum(a.nbytes for a in jax.tree.leaves(engine.weights)),
                flips=_flips(reference, prompts, expected, answers),
                verify_flips=_flips(reference, prompts, answers, verified),
                nll=float(np.concatenate(nlls).mean()),
            )
        )
    return found


def _answers(engine: DecodeEngine, prompts, base: DecodeOptions, mode: str) -> list[list[int]]:
    options = dataclasses.replace(base, mode=mode)
    return [result.token_ids for result in engine.generate([Request(prompt, options) for prompt in prompts])]


def _flips(reference: DecodeEngine, prompts, answers, others) -> list[Flip]:
    flips = []
    for number, (prompt, answer, other) in enumerate(zip(prompts, answers, others, strict=True)):
        if answer != other:
            # One that is the other's beginning would have ended with an end token or at the limit, as the other.
            place = next(i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b)
            best = np.sort(_logits(reference, (*prompt, *answer[:place]), 1)[0])
            flips.append(Flip(number, place, float(best[-1] - best[-2])))
    return flips


def _nlls(engine: DecodeEngine, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Nats of each token of an answer."""
    logits_XV = _logits(engine, (*prompt, *answer[:-1]), len(answer))
    logprobs = jax.nn.log_softmax(logits_XV, axis=-1)
    return -np.asarray(logprobs)[np.arange(len(answer)), answer]


def _logits(engine: DecodeEngine, token_ids: Sequence[int], count: int) -> np.ndarray:
    """Float32 logits `[count, V]` after each of the last `count` tokens, in one forward."""
    length = len(token_ids)
    padded = np.zeros((1, bucket(length, SHORTEST)), np.int32)
    padded[0, :length] = token_ids
    hidden_1TD = _hidden(engine.network, engine.weights, padded, np.int32(length))
    places = np.zeros(bucket(count, SHORTEST), np.int32)
    places[:count] = np.arange(length - count, length)
    return np.asarray(_head(engine.network, engine.weights, engine.vocabulary.emit, hidden_1TD, places))[:count]


@partial(jax.jit, static_argnums=0)
def _hidden(network, weights, tokens_1T, length):
    position_1T = jnp.arange(tokens_1T.shape[1])[None]
    visibility = public((position_1T < length).astype(jnp.int32), position_1T)
    return network.forward(weights, tokens_1T, visibility, None, None)[0]


@partial(jax.jit, static_argnums=0)
def _head(network, weights, emit_V, hidden_1TD, places_X):
    return jnp.where(emit_V[None], network.logits(weights, hidden_1TD[:, places_X])[0], NEVER)


def table(qualities: Sequence[Quality]) -> str:
    """Plain text, a line a precision."""
    full = qualities[0]
    heads = ("MB", "same", "first flip", "margin", "Δ nats", "verify=ar", "margin")
    lines = [f"{'weights':10}{'activations':12}" + "".join(f"{head:>13}" for head in heads)]
    for q in qualities:
        cells = (
            f"{q.bytes / 1e6:.1f}",
            f"{q.same:.1%}",
            f"{np.median([flip.position for flip in q.flips]):.0f}" if q.flips else "–",
            _span(q.flips),
            f"{q.nll - full.nll:+.5f}",
            f"{q.verify_same:.1%}",
            _span(q.verify_flips),
        )
        row = f"{q.precision.weights:10}{q.precision.activations:12}"
        lines.append(row + "".join(f"{cell:>13}" for cell in cells))
    lines += [
        f"{full.prompts} prompts, greedy. same: answers with exactly float32's token ids",
        "first flip: median place of the first other token; margin: median, largest gap of float32's two best logits",
        f"Δ nats: of a token of float32's answers, over {full.nll:.5f}; verify=ar: at the same precision",
    ]
    return "\n".join(lines)


def _span(flips: Sequence[Flip]) -> str:
    margins = [flip.margin for flip in flips]
    return f"{np.median(margins):.3f}/{max(margins):.3f}" if margins else "–"


def write(qualities: Sequence[Quality], path: Path, about: dict) -> None:
    records = [
        dataclasses.asdict(q)
        | {"same": q.same, "verify_same": q.verify_same, "nll_over_float32": q.nll - qualities[0].nll}
        for q in qualities
    ]
    path.write_text(json.dumps(about | {"precisions": records}, indent=2), encoding="utf-8")
