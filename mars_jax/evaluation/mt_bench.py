"""Answers to MT-bench's two-turn questions, in the layout that its judges read. Judging is left to them."""

import math
from collections.abc import Sequence
from pathlib import Path

from lm_eval.api.instance import Instance

from mars_jax.evaluation.harness import MarsLM
from mars_jax.evaluation.local_data import read_lines

NAME = "mt_bench"


def questions(data_dir: Path, limit: float | None) -> list[dict]:
    """The first `limit` questions, or that share of them below 1."""
    found = read_lines(data_dir / "mt_bench" / "question.jsonl")
    if limit is None:
        return found
    return found[: math.ceil(limit * len(found)) if limit < 1 else int(limit)]


def answer(lm: MarsLM, asked: Sequence[dict], *, model_id: str, system: str | None, max_new_tokens: int) -> list[dict]:
    """One line per question: `{"question_id", "answer_id", "model_id", "choices": [{"index", "turns"}]}`.

    All questions take their first turn together, then their second, each seeing its own first answer.
    """
    opening = [{"role": "system", "content": system}] if system else []
    chats = [list(opening) for _ in asked]
    replies: list[list[str]] = [[] for _ in asked]
    for turn in range(max(len(question["turns"]) for question in asked)):
        active = [i for i, question in enumerate(asked) if turn < len(question["turns"])]
        for i in active:
            chats[i].append({"role": "user", "content": asked[i]["turns"][turn]})
        for i, text in zip(active, _reply(lm, [chats[i] for i in active], max_new_tokens), strict=True):
            chats[i].append({"role": "assistant", "content": text})
            replies[i].append(text)
    return [
        {
            "question_id": question["question_id"],
            "answer_id": f"{model_id}-{question['question_id']}",
            "model_id": model_id,
            "choices": [{"index": 0, "turns": turns}],
        }
        for question, turns in zip(asked, replies, strict=True)
    ]


def _reply(lm: MarsLM, chats: Sequence[list[dict]], max_new_tokens: int) -> list[str]:
    options = {"until": [], "max_gen_toks": max_new_tokens, "do_sample": False}
    return lm.generate_until(
        [
            Instance("generate_until", {}, (lm.apply_chat_template(chat), dict(options)), 0, metadata=(NAME, i, 1))
            for i, chat in enumerate(chats)
        ]
    )
