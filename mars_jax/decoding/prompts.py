"""Prompts as users write them, and their token ids."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from mars_jax.data.chat import HALF_CHARACTER, RefusedChatError, render
from mars_jax.errors import UserError

KINDS = ("prompt", "messages", "token_ids")
LINE_OPTIONS = ("tau", "mode", "max_new_tokens", "temperature", "seed", "stop", "lookup")


def encode(tokenizer, prompt, *, raw: bool, system: str | None) -> tuple[int, ...]:
    """Token ids of a text, of a list of messages, or of ids themselves."""
    if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
        return tuple(prompt)
    if raw:
        if not isinstance(prompt, str):
            raise UserError("messages need the chat template: leave out raw, or give the prompt as text")
        if HALF_CHARACTER.search(prompt):
            raise UserError("the prompt holds half a character, which is not valid Unicode")
        return tuple(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    try:
        text = render(messages, tokenizer, generation_prompt=True)
    except RefusedChatError as error:
        raise UserError(f"{error} ({error.__cause__})" if error.__cause__ else str(error)) from error
    # The template writes its own BOS: special tokens must not be added a second time.
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Prompt:
    """One prompt of the command. where: how errors name it. overrides: decode options of its own."""

    id: str
    where: str
    content: str | list
    overrides: dict


def read_prompts(content: bytes, name: str) -> Iterator[Prompt]:
    """Prompts of a JSONL file; blank lines are skipped, errors name file and line."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 ({error})") from error
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: texts may hold U+2028 and the like
        if line.strip():
            where = f"{name}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON; an endless number; nested without end
                raise UserError(f"{where}: not JSON ({error}): expected one object a line") from error
            yield _prompt(record, where, str(number - 1))


def _prompt(record, where: str, default_id: str) -> Prompt:
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with one of {', '.join(KINDS)}")
    given = [kind for kind in KINDS if kind in record]
    if len(given) != 1:
        raise UserError(f"{where}: expected exactly one of {', '.join(KINDS)}, found {', '.join(given) or 'none'}")
    unknown = set(record) - {*KINDS, "id", *LINE_OPTIONS}
    if unknown:
        raise UserError(f"{where}: unknown key {min(unknown)!r}: a line may have id, {', '.join(LINE_OPTIONS)}")
    (kind,) = given
    content = record[kind]
    well_formed = {
        "prompt": lambda: isinstance(content, str),
        "messages": lambda: isinstance(content, list) and content and all(map(_is_message, content)),
        "token_ids": lambda: isinstance(content, list) and all(type(token) is int for token in content),
    }[kind]
    if not well_formed():
        wanted = {
            "prompt": "a text",
            "messages": "a list of {role, content} objects",
            "token_ids": "a list of integers",
        }
        raise UserError(f"{where}: {kind} must be {wanted[kind]}")
    overrides = {name: record[name] for name in LINE_OPTIONS if name in record}
    given_id = record.get("id")
    return Prompt(default_id if given_id is None else str(given_id), where, content, overrides)


def _is_message(message) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()
