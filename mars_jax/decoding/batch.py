"""A batch on the device: its state, its rows' settings, and a cache that grows with its longest row."""

import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.decoding import loop
from mars_jax.decoding.planning import plan_of, without_drafts
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.decoding.settings import SCORES, SOURCES, Adjustment, Sampling, Settings
from mars_jax.decoding.state import empty_state

log = logging.getLogger(__name__)

SMALLEST_CAPACITY = 128
SMALLEST_CHUNK, LARGEST_CHUNK = 32, 256  # tokens of a prompt prefilled at once
FIRST_SLOTS = 512  # a larger cache is made only when rows come to need it


def bucket(length: int, least: int) -> int:
    """The compiled length for `length` tokens: a power of two, at least `least`."""
    return max(least, 1 << (length - 1).bit_length())


class Batch:
    """Slots for rows with one step shape, wide and long enough for all `requests`; made by the engine."""

    def __init__(self, engine, requests: Sequence[Request]):
        self.engine = engine
        self.limits = np.zeros(engine.slots, np.int32)
        self.lengths = np.zeros(engine.slots, np.int32)  # as last seen
        longest = max(self._limit(request) for request in requests)
        self.capacity = bucket(longest, SMALLEST_CAPACITY)
        self.plan = self.wide = plan_of([request.options for request in requests], self.capacity)
        self.cold = np.ones(engine.slots, bool)  # rows that will start the next call without drafts
        self.num_biases = bucket(max(len(request.options.logit_bias) for request in requests), least=8)
        self.num_slots = 0 if self.plan.cache == "recompute" else min(self.capacity, FIRST_SLOTS)
        cache = engine.network.init_cache(engine.slots, self.num_slots) if self.num_slots else None
        self.state = empty_state(self.plan, cache, engine.slots, self.capacity, engine.cfg.vocab_size)
        row = self._settings(requests[0], seed=0)
        self.settings = jax.tree.map(lambda a: jnp.broadcast_to(a, (engine.slots, *a.shape)).copy(), row)

    def _limit(self, request: Request) -> int:
        return min(len(request.token_ids) + request.options.max_new_tokens, self.engine.cfg.max_positions)

    def insert(self, row: int, request: Request, seed: int):
        """Prefill the prompt without its last token and let the row start."""
        prompt = np.zeros(self.capacity, np.int32)
        length = len(request.token_ids)
        prompt[:length] = request.token_ids
        self.limits[row], self.lengths[row], self.cold[row] = self._limit(request), length, True
        cursor = 0 if self.plan.cache == "recompute" else length - 1
        self._grow(length)
        for start in range(0, cursor, LARGEST_CHUNK):
            self._prefill(row, prompt[start : min(start + LARGEST_CHUNK, cursor)], start)
        self.state, self.settings = loop.insert(
            self.plan, self.state, self.settings, row, prompt, length, cursor, self._settings(request, seed)
        )

    def _prefill(self, row: int, tokens: np.ndarray, start: int):
        padded = np.zeros((1, bucket(len(tokens), SMALLEST_CHUNK)), np.int32)
        padded[0, : len(tokens)] = tokens
        arguments = (np.array([x], np.int32) for x in (row, start, len(tokens)))
        row, cursor, count = arguments
        self._announce(f"prefill of {padded.shape[1]} tokens, cache {self.engine.slots} × {self.num_slots}")
        weights = self.engine.public_weights
        cache = loop.prefill(self.engine.network, weights, self.state.cache, row, padded, cursor, count)
        self.state = self.state._replace(cache=cache)

    def use_drafts(self, wanted: bool) -> np.ndarray:
        """Go on with the wide plan or with its autoregressive twin; the cache stays as it is.

        Returns the rows that start the next call without drafts, bool `[B]`.
        """
        plan = self.wide if wanted else without_drafts(self.wide)
        if plan != self.plan:
            self.plan = plan
            self.state = loop.start_over(plan, self.engine.cfg.vocab_size, self.state)
        cold, self.cold = self.cold, np.full_like(self.cold, not wanted)
        return cold

    def make_room(self, steps: int):
        """For as many more forwards."""
        reach = np.minimum(self.lengths + steps * self.wide.run, self.limits)
        self._grow(int(reach.max()))
        self.lengths = np.maximum(self.lengths, reach)  # until seen

    @property
    def weights(self):
        """What steps of this plan read: an update for placeholders stays out where there are none."""
        return self.engine.weights if self.plan.masks else self.engine.public_weights

    def step(self, steps: int, until_one_finishes: bool) -> loop.Report:
        """Up to `steps` forwards, for which there must be room; the report is of the device and may be read later."""
        rows = self.engine.slots
        self._announce(
            f"decoding step of {rows} × {self.plan.tokens} tokens, cache {rows} × {self.num_slots}, "
            f"texts up to {self.capacity}",
            self.plan,
            self.num_biases,
        )
        self.state, report = loop.decode(
            self.engine.network,
            self.plan,
            self.weights,
            self.engine.vocabulary,
            self.settings,
            self.state,
            np.int32(steps),
            np.bool_(until_one_finishes),
        )
        return report

    def _announce(self, program: str, *shape):
        """Say that a program is about to be compiled, the first time that this engine runs it."""
        if (program, *shape) not in self.engine.announced:
            self.engine.announced.add((program, *shape))
            log.info("compiling the %s", program)

    def saw(self, row: int, length: int):
        """A report of the last call but one said so; the last may have added as much again."""
        self.lengths[row] = min(length + self.engine.steps * self.wide.run, self.limits[row])

    def evict(self, row: int):
        self.state = loop.evict(self.state, row)
        self.limits[row] = self.lengths[row] = 0

    def _grow(self, length: int):
        """Make room for rows of `length` tokens."""
        if self.plan.cache == "recompute" or length <= self.num_slots:
            return
        self.num_slots = bucket(length, FIRST_SLOTS)
        self.state = self.state._replace(cache=self.engine.network.grow(self.state.cache, self.num_slots))

    def _settings(self, request: Request, seed: int) -> Settings:
        """A request's options as arrays without axis B."""
        o = request.options
        return Settings(
            width=np.int32(o.width),
            exact=np.bool_(o.exact),
            source=np.int32(SOURCES.index(o.source)),
            beside=np.bool_(o.lookup),
            tau=np.float32(o.tau),
            score=np.int32(SCORES.index(o.score)),
            gate_first=np.bool_(o.gate_first),
            limit=np.int32(self._limit(request)),
            stop=np.array(self.engine.stop_ids or [-1], np.int32),
            sampling=Sampling(
                temperature=np.float32(o.temperature),
                top_k=np.int32(o.top_k),
                top_p=np.float32(o.top_p),
                min_p=np.float32(o.min_p),
                seed=np.uint32(seed),
            ),
            adjustment=self._adjustment(o, len(request.token_ids)),
        )

    def _adjustment(self, o: DecodeOptions, prompt_length: int) -> Adjustment:
        ids, bias = np.full(self.num_biases, -1, np.int32), np.zeros(self.num_biases, np.float32)
        ids[: len(o.logit_bias)], bias[: len(o.logit_bias)] = list(o.logit_bias), list(o.logit_bias.values())
        return Adjustment(
            repetition=np.float32(o.repetition_penalty),
            presence=np.float32(o.presence_penalty),
            frequency=np.float32(o.frequency_penalty),
            bias_ids=ids,
            bias=bias,
            min_length=np.int32(prompt_length + o.min_new_tokens),
        )
