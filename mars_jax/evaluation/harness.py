"""The harness's view of our model: `TemplateLM` over token ids. Import it only where lm-eval is installed."""

import dataclasses
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mars_jax.decoding.requests import DecodeOptions, Generation, Request
from mars_jax.errors import UserError
from mars_jax.evaluation.cache import AnswerCache, digest, fingerprint
from mars_jax.evaluation.loglikelihood import score_continuations
from mars_jax.evaluation.tally import Tally
from mars_jax.models.loading import LoadedModel

logger = logging.getLogger(__name__)


# Yields `(index of the request, result)` as answers are done: `DecodeEngine.completed`.
Decode = Callable[[Sequence[Request]], Iterable[tuple[int, Generation]]]


class MarsLM(TemplateLM):
    """Answers the harness's requests with a `LoadedModel`.

    decode:  how answers come about.
    options: what of it the tasks do not say themselves, the mode above all; log-likelihoods are always the AR model's.
    warm_up: called with the requests before their seconds are counted, to compile.
    """

    def __init__(
        self,
        model: LoadedModel,
        decode: Decode,
        options: DecodeOptions,
        *,
        cache: AnswerCache,
        batch_size: int = 8,
        warm_up: Callable[[Sequence[Request]], None] | None = None,
        dtype=jnp.float32,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.options = options
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self._decode = decode
        self._warm_up = warm_up
        self._cache = cache
        self._batch_size = batch_size
        self._dtype = dtype
        self._fingerprint = fingerprint(model.params)

    # What the harness asks about the model.

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self.model.cfg.max_positions

    @property
    def max_gen_toks(self) -> int:
        return 256  # the harness's default

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def description(self) -> dict:
        """What a results file should say of the model."""
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.model.params))
        return {"parameters": parameters, "fingerprint": self._fingerprint, "batch_size": self._batch_size}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Token ids; a BOS that the text (a rendered chat, say) already begins with is not added again."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # Log-likelihoods.

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
        keys = [digest("loglikelihood", self._fingerprint, context, target) for _, context, target in requests]
        todo = list({key: i for i, key in enumerate(keys) if key not in self._cache}.values())
        pairs = [(requests[i][1], requests[i][2]) for i in todo]
        options = {"batch_size": self._batch_size, "max_length": self.max_length, "dtype": self._dtype}
        for i, score in score_continuations(self.model.params, self.model.cfg, pairs, **options):
            self._cache[keys[todo[i]]] = list(score)
        return [tuple(self._cache[key]) for key in keys]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for owner, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (loglikelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += loglikelihood
        return totals

    # Generation.

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        wanted, truncated, keys = [], [], []
        times: Counter[str] = Counter()
        by_task = defaultdict(list)
        for i, instance in enumerate(requests):
            request, cut = self._request(*instance.args)
            key = self._key(request)
            times[key] += 1
            if request.options.sampled and times[key] > 1:  # asked again: with randomness of its own
                request = _reseeded(request, times[key] - 1)
                key = self._key(request)
            wanted.append(request)
            truncated.append(cut)
            keys.append(key)
            by_task[instance.task_name].append(i)
        for task, indices in by_task.items():
            self._answer(task, {keys[i]: wanted[i] for i in indices if keys[i] not in self._cache})
            for i in indices:
                record = self._cache[keys[i]]
                self.tallies[task].add(
                    record["accepted"],
                    prompt_tokens=len(wanted[i].token_ids),
                    seconds=record["seconds"],
                    truncated=truncated[i],
                )
        return [self._text(self._cache[k]["token_ids"], r.options.stop) for k, r in zip(keys, wanted, strict=True)]

    def _key(self, request: Request) -> str:
        return digest("generate", self._fingerprint, dataclasses.asdict(request))

    def _request(self, prompt: str, options: dict) -> tuple[Request, bool]:
        """The harness's request as ours, and whether its prompt lost its left end to make room."""
        options = normalize_gen_kwargs(options, self.max_gen_toks)
        limit = options["max_gen_toks"]
        room = self.max_length - limit
        if room < 1:
            raise UserError(
                f"{limit} new tokens leave no room for a prompt, as the model ends at {self.max_length}: lower "
                "--max-new-tokens"
            )
        changes: dict[str, Any] = {"max_new_tokens": limit}
        changes["stop"] = tuple(stop for stop in [*options["until"], *self.options.stop] if stop)
        if options["do_sample"]:
            changes |= {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in options}
        if self.options.seed is None:
            changes["seed"] = 0  # an evaluation can be repeated
        ids = self.tok_encode(prompt)
        return Request(tuple(ids[-room:]), dataclasses.replace(self.options, **changes)), len(ids) > room

    def _answer(self, task: str, todo: dict[str, Request]) -> None:
        """Generate what is not cached yet, longest prompts first so that memory runs out at once or never."""
        keys = sorted(todo, key=lambda key: -len(todo[key].token_ids))
        logger.info("%s: %d answers to generate", task, len(keys))
        if self._warm_up is not None:
            self._warm_up([todo[key] for key in keys])
        started = time.perf_counter()
        for done, (i, result) in enumerate(self._decode([todo[key] for key in keys]), 1):
            now = time.perf_counter()
            self._cache[keys[i]] = {
                "token_ids": list(result.token_ids),
                "accepted": list(result.accepted),
                "finish_reason": result.finish_reason,
                "seconds": now - started,  # since the answer before: those of a batch share its time in sum
            }
            started = now
            if done % 50 == 0:
                logger.info("%s: %d of %d", task, done, len(keys))

    def _text(self, token_ids: Sequence[int], stops: Sequence[str]) -> str:
        """The answer as the harness's own models hand it on: without special tokens, cut before the first stop."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text


def _reseeded(request: Request, by: int) -> Request:
    options = dataclasses.replace(request.options, seed=request.options.seed + by)
    return dataclasses.replace(request, options=options)
