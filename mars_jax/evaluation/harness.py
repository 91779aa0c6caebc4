"""The harness's view of our model: `TemplateLM` over token ids. Import it only where lm-eval is installed."""

import dataclasses
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mars_jax.errors import UserError
from mars_jax.evaluation.cache import AnswerCache, digest
from mars_jax.evaluation.loglikelihood import score_continuations
from mars_jax.evaluation.tally import Tally
from mars_jax.models.loading import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One answer to generate. `repeat` counts equal jobs, so that each gets randomness of its own."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repeat: int = 0


@dataclass(frozen=True)
class Answer:
    """token_ids: the answer, its end token included.  accepted: the run length of each forward."""

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    finish_reason: str


# Yields `(index of the job, answer)` as answers are done.
Generate = Callable[[Sequence[Job]], Iterable[tuple[int, Answer]]]


class MarsLM(TemplateLM):
    """Answers the harness's requests with a `LoadedModel`.

    generate: how answers come about, in whatever decode mode; log-likelihoods are always those of the AR model.
    settings: everything about `generate` that changes an answer; a part of the cache keys.
    """

    def __init__(
        self,
        model: LoadedModel,
        generate: Generate,
        *,
        fingerprint: str,
        settings: dict[str, Any],
        cache: AnswerCache,
        batch_size: int,
        extra_stops: Sequence[str] = (),
        dtype=jnp.float32,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self._generate = generate
        self._identity = [fingerprint, settings]
        self._fingerprint = fingerprint
        self._cache = cache
        self._batch_size = batch_size
        self._extra_stops = list(extra_stops)
        self._dtype = dtype

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

    def get_model_info(self) -> dict:
        return {"model_fingerprint": self._fingerprint}

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
        prepared = [self._job(*request.args) for request in requests]
        seen: Counter[Job] = Counter()
        jobs = []
        for job, _ in prepared:
            jobs.append(dataclasses.replace(job, repeat=seen[job]))
            seen[job] += 1
        keys = [digest("generate", *self._identity, dataclasses.asdict(job)) for job in jobs]
        by_task = defaultdict(list)
        for i, request in enumerate(requests):
            by_task[request.task_name].append(i)
        for task, indices in by_task.items():
            self._answer(task, [i for i in indices if keys[i] not in self._cache], jobs, keys)
            for i in indices:
                record = self._cache[keys[i]]
                self.tallies[task].add(
                    record["accepted"],
                    prompt_tokens=len(jobs[i].token_ids),
                    seconds=record["seconds"],
                    truncated=prepared[i][1],
                )
        return [self._text(self._cache[key]["token_ids"], job.stop) for key, job in zip(keys, jobs, strict=True)]

    def _job(self, prompt: str, options: dict) -> tuple[Job, bool]:
        """The job of a request, and whether its prompt lost its left end to make room."""
        options = normalize_gen_kwargs(options, self.max_gen_toks)
        limit = options["max_gen_toks"]
        room = self.max_length - limit
        if room < 1:
            raise UserError(
                f"{limit} new tokens leave no room for a prompt: the model ends at {self.max_length} tokens"
            )
        ids = self.tok_encode(prompt)
        until = [stop for stop in [*options["until"], *self._extra_stops] if stop]
        sampling = {"temperature": options["temperature"]} if options["do_sample"] else {}
        for name in ("top_k", "top_p") if sampling else ():
            if name in options:
                sampling[name] = options[name]
        return Job(tuple(ids[-room:]), limit, tuple(until), **sampling), len(ids) > room

    def _answer(self, task: str, todo: list[int], jobs: list[Job], keys: list[str]) -> None:
        """Generate what is not cached yet, longest prompts first so that memory runs out at once or never."""
        todo = sorted(todo, key=lambda i: -len(jobs[i].token_ids))
        logger.info("%s: %d answers to generate", task, len(todo))
        started = time.perf_counter()
        for done, (i, answer) in enumerate(self._generate([jobs[i] for i in todo]), 1):
            now = time.perf_counter()
            record = dataclasses.asdict(answer) | {"seconds": now - started}
            started = now
            self._cache[keys[todo[i]]] = record
            if done % 50 == 0:
                logger.info("%s: %d of %d", task, done, len(todo))

    def _text(self, token_ids: Sequence[int], stops: Sequence[str]) -> str:
        """The answer as the harness's own models hand it on: special tokens left out, cut before the first stop."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text
