"""The decoding engine: requests in, results out, through a fixed number of slots over one device cache.

A finished row frees its slot for the next request; nobody waits for the slowest row of a batch. The host reads results
one call late, while the device is at the next one.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.decoding.adaptation import Adaptation
from mars_jax.decoding.batch import Batch
from mars_jax.decoding.loop import Report
from mars_jax.decoding.network import DecoderNetwork
from mars_jax.decoding.planning import same_text_without_drafts, shares_steps_with
from mars_jax.decoding.requests import DecodeOptions, Generation, Request, TokenLogprob
from mars_jax.decoding.settings import Vocabulary
from mars_jax.decoding.state import FINISH_REASONS
from mars_jax.decoding.stops import find_stop
from mars_jax.decoding.weights import stored_weights, without_updates
from mars_jax.errors import UserError
from mars_jax.models.loading import LoadedModel

log = logging.getLogger(__name__)


class DecodeEngine:
    """Decodes any number of requests with one model, `slots` at a time.

    Requests may differ in everything; those whose modes one step can serve share a batch, without recompiling.
    steps: device steps between two looks of the host, most.
    dtype: of activations and cache.
    weights: how they are stored: "float32", "bfloat16" or "int8".
    adapt: leave drafts out while they do not pay here (`decoding.adaptation`). The exact modes' token ids stay as they
        are; run lengths then depend on timing, as do the draws of sampling rows, whatever their seed.
    """

    def __init__(
        self,
        model: LoadedModel,
        slots: int = 8,
        *,
        steps: int = 16,
        dtype=jnp.float32,
        weights: str = "float32",
        adapt: bool = False,
    ):
        if slots < 1 or steps < 1:
            raise UserError(f"slots={slots}, steps={steps}: expected at least 1 of both")
        self.cfg, self.tokenizer, self.stop_ids = model.cfg, model.tokenizer, model.stop_ids
        self.slots, self.steps = slots, steps
        self.network = DecoderNetwork(model.cfg, dtype)
        self.weights = stored_weights(model.params, model.cfg, weights)
        self.public_weights = without_updates(self.weights)
        self.vocabulary = Vocabulary(jnp.asarray(model.emit_mask), jnp.int32(model.mask_id))
        self.adapt = adapt
        self._adaptations = defaultdict(Adaptation)  # by plan
        self.announced = set()  # programs that were said to be compiled
        self._seeds = np.random.default_rng()

    def check(self, request: Request):
        """Raise UserError if this model cannot serve the request."""
        most, vocab_size = self.cfg.max_positions, self.cfg.vocab_size
        if len(request.token_ids) >= most:
            raise UserError(
                f"the prompt has {len(request.token_ids)} tokens, but the model's context of {most} must hold "
                "prompt and answer: shorten the prompt"
            )
        wrong = [t for t in (*request.token_ids, *request.options.logit_bias) if not 0 <= t < vocab_size]
        if wrong:
            raise UserError(f"the request names token id {wrong[0]}, but the model's go from 0 to {vocab_size - 1}")

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Results in the order of the requests."""
        return [generation for _, generation in sorted(self.completed(requests), key=lambda pair: pair[0])]

    def completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation]]:
        """`(index, result)` of every request, as they finish."""
        if any(request.options.mode == "diffusion" for request in requests):
            self._warn_of_diffusion()
        groups = defaultdict(list)
        for index, request in enumerate(requests):
            self.check(request)
            groups[shares_steps_with(request.options)].append(_Job(index, request))
        for jobs in groups.values():
            yield from self._serve(jobs)

    def _warn_of_diffusion(self):
        """Once: a folder does not say how its model was trained."""
        if "diffusion" not in self.announced:
            self.announced.add("diffusion")
            log.warning("mode diffusion: the answers of models not trained with recipe block_diffusion mean nothing")

    def _serve(self, jobs: "list[_Job]") -> Iterator[tuple[int, Generation]]:
        batch = Batch(self, [job.request for job in jobs])
        adaptation = None
        if self.adapt and same_text_without_drafts([job.request.options for job in jobs]):
            adaptation = self._adaptations[batch.wide]
        waiting, rows, unread = deque(jobs), [None] * self.slots, None
        while waiting or any(rows) or unread:
            for row in range(self.slots):
                if waiting and rows[row] is None:
                    rows[row] = waiting.popleft()
                    batch.insert(row, rows[row].request, self._seed(rows[row].request))
            called = None
            if any(rows):
                report, seen_by = self._step(batch, adaptation, until_one_finishes=bool(waiting))
                called = (report, list(rows), seen_by)
            if unread:
                yield from self._read(batch, rows, *unread)
            unread = called

    def _step(self, batch: Batch, adaptation: Adaptation | None, until_one_finishes: bool):
        """The next call's report, and what to tell of it to the adaptation once it is read."""
        batch.make_room(self.steps)
        if adaptation is None:
            return batch.step(self.steps, until_one_finishes), lambda report: None

        turn = adaptation.turn((batch.capacity, batch.num_slots, batch.num_biases))
        cold_B = batch.use_drafts(turn.wide)
        jax.block_until_ready(batch.state if turn.timed else ())  # so that nothing else is timed
        began = time.perf_counter()
        report = batch.step(turn.steps or self.steps, until_one_finishes)
        if turn.timed:
            steps = int(np.asarray(report.forwards_done).max())  # waits for the call
            adaptation.took(turn.wide, steps, time.perf_counter() - began)
        return report, lambda report: adaptation.saw(turn.wide, report.gained, report.forwards_done, cold_B)

    def _read(self, batch: Batch, rows: list, report: Report, jobs: list, seen_by) -> Iterator[tuple[int, Generation]]:
        """Results among what some steps did to the rows that held `jobs` then; frees their slots."""
        report = jax.device_get(report)
        seen_by(report)
        for row, job in enumerate(jobs):
            if job is None or rows[row] is not job:
                continue  # free then, or found finished in an earlier report
            batch.saw(row, int(report.length[row]))
            generation = self._result(job.request, report, row)
            if generation is not None:
                if report.finish[row] == 0:
                    batch.evict(row)
                rows[row] = None
                yield job.index, generation

    def _result(self, request: Request, report: Report, row: int) -> Generation | None:
        """The row's result if it has one: it has finished, or a stop string is complete."""
        options, start = request.options, len(request.token_ids)
        token_ids = report.tokens[row, start : report.length[row]].tolist()
        stopped = find_stop(self._text, token_ids, options.stop, options.min_new_tokens)
        if stopped:
            token_ids, text, reason = token_ids[: stopped.tokens], stopped.text, "stop"
        elif report.finish[row]:
            text, reason = self._text(token_ids), FINISH_REASONS[report.finish[row]]
        else:
            return None
        forward = report.forward[row, start : start + len(token_ids)]
        logprobs = None if options.logprobs is None else _logprobs(options, report, row, start, forward)
        return Generation(token_ids, text, np.bincount(forward).tolist(), reason, start, options, logprobs)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _seed(self, request: Request) -> int:
        seed = request.options.seed
        return int(self._seeds.integers(2**32)) if seed is None else seed


def _logprobs(options: DecodeOptions, report: Report, row: int, start: int, forward: np.ndarray) -> list[TokenLogprob]:
    entries = []
    for i, place in enumerate(range(start, start + len(forward))):
        ids, top = (a[row, place, : options.logprobs].tolist() for a in report.logprobs[1:])
        follows = i > 0 and bool(forward[i] == forward[i - 1])
        chosen = float(report.logprobs.chosen[row, place])
        entries.append(TokenLogprob(chosen, dict(zip(ids, top, strict=True)), follows and not options.exact))
    return entries


@dataclass(frozen=True, eq=False)
class _Job:
    index: int
    request: Request
