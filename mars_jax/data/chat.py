"""A chat as token ids, and which of them are trained: every assistant text with its end-of-turn token, nothing else.

The tokenizer's own template is the only authority. It is rendered once as a whole, once up to each assistant turn with
the generation prompt; what the model would have to emit after that prompt is the trained text. Both of its ends must be
token boundaries (the text before, tokenised alone, gives the very same ids), so training sees what decoding will see.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from jinja2.exceptions import TemplateError

from mars_jax.errors import UserError

HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON's escapes can write it, UTF-8 and tokenizers cannot
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Chat:
    """tokens: int32 `[n]` ids. spans: int32 `[k, 2]` half-open indices of trained tokens, a pair an assistant turn."""

    tokens: np.ndarray
    spans: np.ndarray

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())


class RefusedChatError(Exception):
    """The trained span of a chat cannot be told for certain. `reason` is short and fixed, for counting."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def encode_chat(messages: Sequence[Mapping], tokenizer) -> Chat:
    """Ids of the rendered chat, equal to `apply_chat_template`'s, and its trained spans.

    Raises RefusedChatError when an assistant turn cannot be located exactly, UserError when there is no template.
    """
    (result,) = encode_chats([messages], tokenizer)
    if isinstance(result, RefusedChatError):
        raise result
    return result


def encode_chats(chats: Sequence[Sequence[Mapping]], tokenizer) -> list[Chat | RefusedChatError]:
    """`encode_chat` of each, refusals returned in place; one call of the tokenizer, several times as fast."""
    located = [_located(messages, tokenizer) for messages in chats]
    texts = [text for found in located if isinstance(found, list) for text in found]
    # The template writes its own BOS: special tokens must not be added a second time.
    ids = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
    return [_chat(list(islice(ids, len(found)))) if isinstance(found, list) else found for found in located]


def _located(messages: Sequence[Mapping], tokenizer) -> list[str] | RefusedChatError:
    """The rendered chat, then all of it before each border of a trained span."""
    try:
        text = render(messages, tokenizer)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        borders = [border for i in turns for border in _trained_text(text, messages, i, tokenizer)]
    except RefusedChatError as error:
        return error
    return [text, *(text[:border] for border in borders)]


def _chat(ids: Sequence[Sequence[int]]) -> Chat | RefusedChatError:
    """`ids` of the whole chat and of the text before each border."""
    whole, *prefixes = ids
    if any(whole[: len(prefix)] != prefix for prefix in prefixes):
        return RefusedChatError("a token straddles the border of an assistant turn")
    spans = np.array([len(prefix) for prefix in prefixes], np.int32).reshape(-1, 2)
    if (spans[:, 0] == 0).any():
        return RefusedChatError("the answer is the first token of the chat")
    return Chat(np.array(whole, np.int32), spans)


def render(messages: Sequence[Mapping], tokenizer, generation_prompt: bool = False) -> str:
    """The chat as the tokenizer's template writes it."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use that of an instruct model, "
            "or put a chat_template.jinja beside it"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except (TemplateError, TypeError) as error:  # TypeError: it joins texts, and a role or content is none
        raise RefusedChatError("the chat template rejects the messages") from error
    if HALF_CHARACTER.search(text):
        raise RefusedChatError("a text holds half a character, which is not valid Unicode")
    return text


@functools.lru_cache(maxsize=8)
def _special_token(tokenizer) -> re.Pattern:
    """Matches the text of any special token, the longest first."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    texts = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _trained_text(text: str, messages: Sequence[Mapping], turn: int, tokenizer) -> tuple[int, int]:
    """Where in `text` the assistant message `messages[turn]` starts and where its end-of-turn token ends."""
    content = messages[turn]["content"]
    if not isinstance(content, str):
        raise RefusedChatError("an assistant message is not text")
    special = _special_token(tokenizer)
    start = _turn_start(text, messages, turn, tokenizer)
    body = content.strip()  # many templates trim
    first_visible = start + _blanks(text, start)
    if text.startswith(content, start):
        stop = start + len(content)
    elif text.startswith(body, first_visible):
        stop = first_visible + len(body)
    else:  # the template put something before the answer, as Qwen3 does with an empty thought: that part is prompt
        end = special.search(text, start)
        stop = end.start() - _blanks(text[start : end.start()][::-1], 0) if end else start
        if not body or not text.endswith(body, start, stop):
            raise RefusedChatError("the chat template rewrites an assistant message")
        start = stop - len(body)
    end = special.match(text, stop + _blanks(text, stop))
    if end is None:
        raise RefusedChatError("no end-of-turn token follows an assistant message")
    return start, end.end()


def _turn_start(text: str, messages: Sequence[Mapping], turn: int, tokenizer) -> int:
    """Where the model starts to write: the end of the generation prompt, else the template's own `{% generation %}`."""
    if turn == 0:
        raise RefusedChatError("the assistant speaks first")
    prompt = render(messages[:turn], tokenizer, generation_prompt=True)
    if text.startswith(prompt):
        return len(prompt)
    if not _MARKER.search(tokenizer.chat_template):
        raise RefusedChatError("the chat template rewrites history")
    starts = _marked_starts(messages, tokenizer)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(starts) != len(turns):
        raise RefusedChatError("the chat template does not mark every assistant message")
    return starts[turns.index(turn)]


def _marked_starts(messages: Sequence[Mapping], tokenizer) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        messages,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    mask = [0, *encoded["assistant_masks"]]
    firsts = [i for i in range(len(mask) - 1) if mask[i + 1] and not mask[i]]
    return [encoded["offset_mapping"][i][0] for i in firsts]


def _blanks(text: str, start: int) -> int:
    return len(text) - start - len(text[start:].lstrip())
