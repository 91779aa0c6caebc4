"""From requests to results: batches of rows through the decoding loop."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.decoding import plan as plans
from mars_jax.decoding.loop import decode, prefill, start
from mars_jax.decoding.network import DecoderNetwork
from mars_jax.decoding.plan import Plan
from mars_jax.decoding.requests import DecodeOptions, Generation, Request, run_lengths
from mars_jax.decoding.settings import SCORES, Settings, Vocabulary
from mars_jax.decoding.state import FINISH_REASONS, DecodeState, empty_state
from mars_jax.errors import UserError
from mars_jax.models import decoder
from mars_jax.models.loading import LoadedModel

SMALLEST_BUCKET = 32


def bucket(length: int, most: int) -> int:
    """The compiled length for `length` tokens: a power of two, at least 32, at most `most`."""
    return min(most, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def plan_of(options: DecodeOptions, capacity: int) -> Plan:
    match options.mode:
        case "ar":
            return plans.autoregressive()
        case "window":
            return plans.window(options.window)
        case "verify":
            return plans.verify(options.draft, branched=options.layout == "tree")
        case "block":
            return plans.block(options.cache_block, options.window)
        case "recompute":
            return plans.recompute(capacity, options.window)
    raise AssertionError(options.mode)


class DecodeEngine:
    """Decodes requests in batches of up to `slots` rows. A batch shares a step's shape; all else is a row's own."""

    def __init__(self, model: LoadedModel, slots: int = 8, dtype=jnp.float32):
        self.model = model
        self.slots = slots
        self.network = DecoderNetwork(model.cfg, dtype)
        self.params = decoder.unstack_layers(model.params)
        self.vocabulary = Vocabulary(jnp.asarray(model.emit_mask), jnp.int32(model.mask_id))

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Results in the order of the requests."""
        return [generation for _, generation in sorted(self.completed(requests), key=lambda pair: pair[0])]

    def completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation]]:
        """`(index, result)` of every request, as they finish."""
        most = self.model.cfg.max_positions
        batches = defaultdict(list)
        for index, request in enumerate(requests):
            self.check(request)
            capacity = bucket(len(request.token_ids) + request.options.max_new_tokens, most)
            batches[capacity, plan_of(request.options, capacity)].append(index)
        for (capacity, plan), indices in batches.items():
            for first in range(0, len(indices), self.slots):
                batch = indices[first : first + self.slots]
                yield from zip(batch, self._decode([requests[i] for i in batch], plan, capacity), strict=True)

    def check(self, request: Request):
        """Raise UserError if this model cannot serve the request."""
        most, vocab_size = self.model.cfg.max_positions, self.model.cfg.vocab_size
        if len(request.token_ids) >= most:
            raise UserError(
                f"the prompt has {len(request.token_ids)} tokens, but the model's context of {most} must hold "
                "prompt and answer: shorten the prompt"
            )
        wrong = [t for t in request.token_ids if not 0 <= t < vocab_size]
        if wrong:
            raise UserError(f"the prompt has token id {wrong[0]}, but the model's ids go from 0 to {vocab_size - 1}")

    def _decode(self, requests: list[Request], plan: Plan, capacity: int) -> list[Generation]:
        state = self._prefilled(requests, plan, capacity)
        settings = batch_settings(requests, self.slots, capacity, self.model.stop_ids)
        steps = jnp.int32(np.iinfo(np.int32).max)
        state = decode(self.network, plan, self.params, self.vocabulary, settings, state, steps)
        host = jax.device_get(state._replace(cache=None))
        return [self._result(request, host, row) for row, request in enumerate(requests)]

    def _prefilled(self, requests: list[Request], plan: Plan, capacity: int) -> DecodeState:
        """A state whose first rows hold the prompts; their keys and values, but the last token's, are in the cache."""
        tokens = np.zeros((self.slots, capacity), np.int32)
        length = np.zeros(self.slots, np.int32)
        for row, request in enumerate(requests):
            length[row] = len(request.token_ids)
            tokens[row, : length[row]] = request.token_ids
        cursor = np.zeros_like(length)
        cache = None
        if plan.cache != "recompute":
            cache = self.network.init_cache(self.slots, capacity)
            count = np.maximum(length - 1, 0)
            chunk = bucket(int(count.max()), capacity)
            cache = prefill(self.network, self.params, cache, tokens[:, :chunk], cursor, count)
            cursor = count
        state = empty_state(cache, self.slots, capacity, plan.drafts)
        running = np.arange(self.slots) < len(requests)
        return start(state, jnp.array(tokens), jnp.array(length), jnp.array(cursor), jnp.array(running))

    def _result(self, request: Request, state: DecodeState, row: int) -> Generation:
        new = slice(len(request.token_ids), int(state.length[row]))
        token_ids = state.tokens[row, new].tolist()
        return Generation(
            token_ids=token_ids,
            text=self.model.tokenizer.decode(token_ids, skip_special_tokens=True),
            accepted=run_lengths(state.forward[row, new]),
            finish_reason=FINISH_REASONS[state.finish[row]],
            prompt_tokens=len(request.token_ids),
            options=request.options,
        )


def batch_settings(requests: list[Request], slots: int, capacity: int, stop_ids: Sequence[int]) -> Settings:
    """The requests' options as arrays, padded to `slots` rows by repeating the first."""
    rows = [*requests, *[requests[0]] * (slots - len(requests))]
    options = [request.options for request in rows]

    def array(values, dtype):
        return jnp.array(list(values), dtype)

    width = {"ar": lambda o: 0, "verify": lambda o: o.draft}
    return Settings(
        width=array((width.get(o.mode, lambda o: o.window)(o) for o in options), jnp.int32),
        exact=array((o.mode == "verify" for o in options), jnp.bool_),
        tau=array((o.tau for o in options), jnp.float32),
        score=array((SCORES.index(o.score) for o in options), jnp.int32),
        gate_first=array((o.gate_first for o in options), jnp.bool_),
        limit=array((min(len(r.token_ids) + r.options.max_new_tokens, capacity) for r in rows), jnp.int32),
        stop=jnp.broadcast_to(array(stop_ids or [-1], jnp.int32), (slots, max(1, len(stop_ids)))),
    )
