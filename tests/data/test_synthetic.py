import itertools

import numpy as np

from mars_jax.data.chat import encode_chat
from mars_jax.data.synthetic import TASKS, make_chats, split_of, train_tokenizer


def questions(chats):
    return {m["content"] for chat in chats for m in chat if m["role"] == "user"}


def test_chats_depend_on_split_count_and_seed_alone():
    assert make_chats("train", 50) == make_chats("train", 80)[:50]
    assert make_chats("train", 50, seed=1) != make_chats("train", 50)


def test_no_question_is_in_both_splits():
    train, held_out = questions(make_chats("train", 4000)), questions(make_chats("held_out", 500, seed=3))
    assert not train & held_out
    assert len(held_out) > 400


def test_chats_are_varied():
    chats = make_chats("train", 1000)
    assert len(questions(chats)) > 900
    shapes = {tuple(m["role"] for m in chat) for chat in chats}
    turns = ("user", "assistant")
    assert shapes == {turns, turns * 2, ("system", *turns), ("system", *turns * 2)}


def test_every_task_writes_the_same_answer_to_the_same_question():
    rng = np.random.default_rng(0)
    for task in TASKS:
        answers = {}
        for _ in range(300):
            question, answer = task(rng)
            assert answers.setdefault(question, answer) == answer
        assert len(answers) > 30, task.__name__
        assert {split_of(question) for question in answers} == {"train", "held_out"}


def test_some_answers_are_right():
    answers = {}
    for chat in make_chats("train", 6000):
        for question, answer in itertools.pairwise(chat):
            answers[question["content"]] = answer["content"]
    sums = [q for q in answers if q.startswith("What is ")]
    assert len(sums) > 50
    for question in sums:
        a, b = question.removeprefix("What is ").removesuffix("?").split(" + ")
        assert answers[question].endswith(f"The answer is {int(a) + int(b)}.")
    backwards = [q for q in answers if q.startswith("Say it backwards: ")]
    for question in backwards:
        words = question.removeprefix("Say it backwards: ").removesuffix(".").split()
        assert answers[question] == f"Backwards it is: {' '.join(reversed(words))}."


def test_tokenizer_is_deterministic_and_complete(tmp_path):
    chats = make_chats("train", 500)
    tokenizer = train_tokenizer(chats, 512)
    assert len(tokenizer) == 512
    assert tokenizer.get_vocab() == train_tokenizer(chats, 512).get_vocab()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 2, 3)
    text = "Größe 12345 안녕 \u2028 👩‍👧\n  x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("123", add_special_tokens=False)["input_ids"] == [
        tokenizer.convert_tokens_to_ids(digit) for digit in "123"
    ]

    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for chat in chats[:20]:
        encoded = encode_chat(chat, loaded)
        assert encoded.tokens.tolist() == encode_chat(chat, tokenizer).tokens.tolist()
        assert [loaded.decode(encoded.tokens[a:b]) for a, b in encoded.spans] == [
            m["content"] + "<|im_end|>" for m in chat if m["role"] == "assistant"
        ]
