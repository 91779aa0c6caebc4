import json

import numpy as np
import pytest
from helpers import chat_templates
from helpers.chat_templates import tokenizer_for
from helpers.paths import GOLDEN, TINY_QWEN2, shared_data
from transformers import AutoTokenizer

from mars_jax.data.chat import RefusedChatError, encode_chat, encode_chats
from mars_jax.errors import UserError


def chat(*texts, system=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def trained_texts(encoded, tokenizer):
    return [tokenizer.decode(encoded.tokens[a:b]) for a, b in encoded.spans.tolist()]


def refusal(messages, tokenizer):
    with pytest.raises(RefusedChatError) as caught:
        encode_chat(messages, tokenizer)
    return caught.value.reason


TWO_TURNS = chat("hello world", "I am fine.", "how are you?", "The answer is 12.\n\n- hello")
STOCK = {
    "chatml": (chat_templates.CHATML, "<|im_end|>", "", "<|im_end|>"),
    "default_system": (chat_templates.DEFAULT_SYSTEM, "<|im_end|>", "", "<|im_end|>"),
    "headers": (chat_templates.HEADERS, "<|eot|>", "", "<|eot|>"),
    "thinking": (chat_templates.THINKING, "<|im_end|>", "", "<|im_end|>"),
    "marked": (chat_templates.MARKED, "<|im_end|>", "", "<|im_end|>"),
    # The model has to write these spaces, so they are learned with the answer.
    "brackets": (chat_templates.BRACKETS, "<|im_end|>", " ", " <|im_end|>"),
}


@pytest.mark.parametrize("name", STOCK)
def test_exactly_the_answers_and_their_end_tokens_are_trained(name):
    template, eos, before, after = STOCK[name]
    tokenizer = tokenizer_for(template, eos)
    encoded = encode_chat(TWO_TURNS, tokenizer)
    assert trained_texts(encoded, tokenizer) == [
        f"{before}I am fine.{after}",
        f"{before}The answer is 12.\n\n- hello{after}",
    ]
    assert encoded.tokens.tolist() == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]
    assert encoded.tokens.dtype == encoded.spans.dtype == np.int32


def test_golden_spans():
    tokenizer = AutoTokenizer.from_pretrained(TINY_QWEN2)
    for case in json.loads((GOLDEN / "loss.json").read_text()):
        encoded = encode_chat(case["messages"], tokenizer)
        assert encoded.tokens.tolist() == case["ids"]
        assert encoded.spans.tolist() == case["spans"]


def test_agrees_with_the_mask_of_a_marked_template():
    plain = tokenizer_for(chat_templates.HEADERS, "<|eot|>")
    marked = tokenizer_for(
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header|>' + m.role + '<|end_header|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot|>' }}{% endgeneration %}"
        "{% else %}{{ m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}",
        "<|eot|>",
    )
    expected = marked.apply_chat_template(TWO_TURNS, return_dict=True, return_assistant_tokens_mask=True)
    encoded = encode_chat(TWO_TURNS, plain)
    mask = np.zeros(len(encoded.tokens), int)
    for start, stop in encoded.spans:
        mask[start:stop] = 1
    assert encoded.tokens.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["assistant_masks"]


def test_one_bos_although_the_tokenizer_would_add_another():
    tokenizer = tokenizer_for(chat_templates.HEADERS, "<|eot|>")
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    assert (encode_chat(TWO_TURNS, tokenizer).tokens == tokenizer.bos_token_id).sum() == 1


def test_default_system_message_is_the_templates_own():
    tokenizer = tokenizer_for(chat_templates.DEFAULT_SYSTEM)
    assert "You are a default assistant." in tokenizer.decode(encode_chat(TWO_TURNS, tokenizer).tokens)
    own = encode_chat(chat("hello", "world", system="be brief"), tokenizer)
    assert "default" not in tokenizer.decode(own.tokens)
    assert trained_texts(own, tokenizer) == ["world<|im_end|>"]


def test_end_token_is_trained_where_it_is_also_the_padding():
    tokenizer = tokenizer_for(chat_templates.CHATML)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    encoded = encode_chat(TWO_TURNS, tokenizer)
    assert (encoded.tokens[encoded.spans[:, 1] - 1] == tokenizer.eos_token_id).all()
    assert encoded.spans[-1, 1] == len(encoded.tokens) - 1  # the newline after the end token is not trained


def test_thought_of_the_last_answer_is_trained_when_the_chat_has_one():
    tokenizer = tokenizer_for(chat_templates.THINKING)
    answer = "<think>\nhow?\n</think>\n\nhello"
    encoded = encode_chat(chat("hello", answer), tokenizer)
    assert trained_texts(encoded, tokenizer) == [f"{answer}<|im_end|>"]


def test_rewritten_history_is_refused():
    tokenizer = tokenizer_for(chat_templates.THINKING)
    messages = chat("hello", "<think>\nhow?\n</think>\n\nworld", "how", "fine")
    assert refusal(messages, tokenizer) == "the chat template rewrites an assistant message"
    # A later question quoting the very text must not be taken for the answer.
    messages = chat("hello", "<think>\nx\n</think>\n\nworld", "<think>\nx\n</think>\n\nworld", "fine")
    assert refusal(messages, tokenizer) == "the chat template rewrites an assistant message"
    # Thoughts of an earlier answer vanish once a question follows, so no generation prompt is a prefix any more.
    unmarked = chat_templates.MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert refusal(TWO_TURNS, tokenizer_for(unmarked)) == "the chat template rewrites history"


def test_token_that_straddles_the_border_is_refused():
    joined = "{% for m in messages %}{{ m.content + ('<|im_end|>' if m.role == 'assistant' else '') }}{% endfor %}"
    tokenizer = tokenizer_for(joined, merges=[("l", "o"), ("lo", "w")])
    reason = "a token straddles the border of an assistant turn"
    assert refusal(chat("al", "ow"), tokenizer) == reason
    encoded = encode_chat(chat("al", "cow"), tokenizer)
    assert trained_texts(encoded, tokenizer) == ["cow<|im_end|>"]
    encoded = encode_chat(chat("a", "low"), tokenizer)
    assert encoded.spans.tolist() == [[1, 3]]


def test_prompt_that_is_cut_otherwise_before_an_answer_is_refused():
    # The prompt alone ends in one token for both newlines, but before a word they are two: decoding never sees those.
    gpt2 = r" ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+"
    tokenizer = tokenizer_for(chat_templates.HEADERS, "<|eot|>", word=gpt2)
    assert refusal(TWO_TURNS, tokenizer) == "a token straddles the border of an assistant turn"


@pytest.mark.parametrize("answer", [" hello", "  hello", "\nhello", "\n\nhello", "hello\n", "hello "])
def test_blanks_around_an_answer_are_trained_or_the_chat_is_refused(answer):
    tokenizer = tokenizer_for(chat_templates.CHATML)
    try:
        encoded = encode_chat(chat("hello", answer), tokenizer)
    except RefusedChatError as error:
        assert answer.startswith("\n") and "straddles" in error.reason
    else:
        assert trained_texts(encoded, tokenizer) == [f"{answer}<|im_end|>"]


def test_trimmed_answers_keep_their_end_token():
    tokenizer = tokenizer_for(chat_templates.HEADERS, "<|eot|>")
    encoded = encode_chat(chat("hello", " \nI am fine. \n"), tokenizer)
    assert trained_texts(encoded, tokenizer) == ["I am fine.<|eot|>"]


def test_special_token_text_inside_an_answer():
    tokenizer = tokenizer_for(chat_templates.CHATML)
    encoded = encode_chat(chat("hello", "say <|im_end|> twice", "x", "y"), tokenizer)
    assert trained_texts(encoded, tokenizer) == ["say <|im_end|> twice<|im_end|>", "y<|im_end|>"]


def test_multi_byte_characters_stay_whole():
    tokenizer = tokenizer_for(chat_templates.CHATML)
    encoded = encode_chat(chat("안녕", "안녕 👩‍👩‍👧 한"), tokenizer)
    assert trained_texts(encoded, tokenizer) == ["안녕 👩‍👩‍👧 한<|im_end|>"]


def test_other_refusals_say_why():
    first = [{"role": "assistant", "content": "hi"}]
    assert refusal(first, tokenizer_for(chat_templates.CHATML)) == "the assistant speaks first"
    parts = [{"type": "text", "text": "hi"}]
    assert refusal([*chat("hi"), {"role": "assistant", "content": parts}], tokenizer_for("{{ messages }}")) == (
        "an assistant message is not text"
    )
    assert refusal(chat("a", "b"), tokenizer_for(chat_templates.PLAIN)) == (
        "no end-of-turn token follows an assistant message"
    )
    picky = tokenizer_for("{{ raise_exception('roles must alternate') }}")
    assert refusal(chat("a", "b"), picky) == "the chat template rejects the messages"
    for odd in (7, [{"type": "text", "text": "hi"}]):
        mixed = [{"role": "user", "content": odd}, {"role": "assistant", "content": "b"}]
        joining = tokenizer_for("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
        assert refusal(mixed, joining) == "the chat template rejects the messages"
    assert "half a character" in refusal(chat("\ud800", "b"), tokenizer_for(chat_templates.CHATML))
    bare = tokenizer_for(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    assert refusal(chat("a", "b"), bare) == "the answer is the first token of the chat"


def test_a_chat_without_answers_has_no_spans():
    assert encode_chat(chat("hello"), tokenizer_for(chat_templates.CHATML)).spans.shape == (0, 2)


def test_a_tokenizer_without_a_template_is_a_user_error():
    with pytest.raises(UserError, match="no chat template"):
        encode_chat(TWO_TURNS, tokenizer_for(None))


def test_many_chats_at_once_are_the_same_chats():
    tokenizer = tokenizer_for(chat_templates.CHATML)
    chats = [chat("a", "b"), [{"role": "assistant", "content": "x"}], TWO_TURNS]
    first, refused, last = encode_chats(chats, tokenizer)
    assert isinstance(refused, RefusedChatError)
    for encoded, messages in ((first, chats[0]), (last, TWO_TURNS)):
        alone = encode_chat(messages, tokenizer)
        assert encoded.tokens.tolist() == alone.tokens.tolist() and encoded.spans.tolist() == alone.spans.tolist()


def test_real_chats():
    tokenizer = AutoTokenizer.from_pretrained(TINY_QWEN2)
    rows = [json.loads(line) for line in (shared_data() / "sft" / "tiny.jsonl").read_bytes().splitlines()]
    assert len(rows) == 64
    for row in rows:
        answers = [m["content"] + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant"]
        assert trained_texts(encode_chat(row["messages"], tokenizer), tokenizer) == answers
