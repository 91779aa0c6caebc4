"""A seeded generator of short, varied chats, and a tokenizer trained on them: the embedded default data set.

Every answer follows from its question, so that a model of a million parameters can learn them in minutes: copying,
spelling, counting, ordering, worked arithmetic, filling forms. A hash of its question decides a chat's split.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

Rng = np.random.Generator

WORDS = (
    "apple river stone cloud garden window table paper orange silver forest tiger dragon rocket music bottle light "
    "green blue red yellow bread castle desert engine feather guitar hammer island jacket kettle lemon mirror needle "
    "ocean pencil queen ribbon spoon tower umbrella valley wagon zebra candle button ladder marble pocket saddle"
).split()
NAMES = "Ann Bob Clara David Emma Felix Grace Henry Iris Jack Karen Leo".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Spain": "Madrid",
    "Greece": "Athens",
    "Cuba": "Havana",
}


def _pick(rng: Rng, options: Sequence[str], count: int) -> list[str]:
    return [options[i] for i in rng.choice(len(options), count, replace=False)]


def _one(rng: Rng, *options: str) -> str:
    return options[rng.integers(len(options))]


def list_words(rng: Rng):
    words = _pick(rng, WORDS, rng.integers(2, 7))
    ask = _one(rng, "List", "Make a numbered list of", "Number these words")
    return f"{ask}: {' '.join(words)}.", "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def bullet_words(rng: Rng):
    words = _pick(rng, WORDS, rng.integers(2, 7))
    ask = _one(rng, "Make bullet points of", "Write as bullets")
    return f"{ask}: {', '.join(words)}.", "\n".join(f"- {word}" for word in words)


def spell(rng: Rng):
    word = _one(rng, *WORDS, *NAMES, *MONTHS)
    name = _one(rng, *NAMES)
    ask = _one(rng, f"Spell {word}.", f"Spell {word} for {name}.", f"{name} asks: how do you spell {word}?")
    return ask, f"{'-'.join(word)} spells {word}."


def repeat(rng: Rng):
    word, times = _one(rng, *WORDS), int(rng.integers(2, 9))
    ask = _one(rng, f"Say {word} {times} times.", f"Repeat the word {word} {times} times.")
    return ask, " ".join([word] * times) + "."


def copy_words(rng: Rng):
    words = _pick(rng, WORDS, rng.integers(3, 9))
    ask = _one(rng, "Repeat after me", "Copy this")
    return f"{ask}: {' '.join(words)}.", f"You said: {' '.join(words)}."


def capitals_of_words(rng: Rng):
    words = " ".join(_pick(rng, WORDS, rng.integers(2, 6)))
    if rng.integers(2):
        return f"Write in capitals: {words}.", f"In capitals: {words.upper()}."
    return f"Write in small letters: {words.upper()}.", f"In small letters: {words}."


def reverse_words(rng: Rng):
    words = _pick(rng, WORDS, rng.integers(3, 6))
    ask = _one(rng, "Reverse the order", "Say it backwards")
    return f"{ask}: {' '.join(words)}.", f"Backwards it is: {' '.join(words[::-1])}."


def count_from(rng: Rng):
    start, step, length = int(rng.integers(1, 60)), int(_one(rng, "1", "2", "5", "10")), int(rng.integers(4, 9))
    numbers = [start + step * i for i in range(length)]
    ask = _one(
        rng, f"Count from {start} by {step}, {length} numbers.", f"Give {length} numbers from {start}, step {step}."
    )
    return ask, f"{', '.join(map(str, numbers))}."


def add(rng: Rng):
    a, b = (int(n) for n in rng.integers(11, 90, 2))
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    ask = _one(
        rng, f"What is {a} + {b}?", f"Add {a} and {b}.", f"{_one(rng, *NAMES)} has {a} and gets {b} more. How many?"
    )
    steps = f"{a // 10 * 10} + {b // 10 * 10} = {tens}\n{a % 10} + {b % 10} = {ones}\n{tens} + {ones} = {a + b}"
    return ask, f"{steps}\nThe answer is {a + b}."


def times_table(rng: Rng):
    n, length = int(rng.integers(2, 13)), int(rng.integers(3, 8))
    ask = _one(rng, f"Table of {n} up to {length}.", f"Multiply {n} by 1 to {length}.")
    return ask, "\n".join(f"{n} x {i} = {n * i}" for i in range(1, length + 1))


def compare(rng: Rng):
    a, b = (int(n) for n in rng.choice(np.arange(10, 100), 2, replace=False))
    ask = _one(rng, f"Which is larger, {a} or {b}?", f"Compare {a} and {b}.")
    return ask, f"The larger number is {max(a, b)} and the smaller number is {min(a, b)}."


def next_in_calendar(rng: Rng):
    kind, cycle = ("days", DAYS) if rng.integers(2) else ("months", MONTHS)
    start, length = int(rng.integers(len(cycle))), int(rng.integers(2, 7))
    names = [cycle[(start + i) % len(cycle)] for i in range(1, length + 1)]
    ask = _one(rng, f"Name the {length} {kind} after {cycle[start]}.", f"Which {length} {kind} follow {cycle[start]}?")
    return ask, f"After {cycle[start]}: {', '.join(names)}."


def capital_cities(rng: Rng):
    countries = _pick(rng, tuple(CAPITALS), rng.integers(2, 4))
    answer = "\n".join(f"The capital of {country} is {CAPITALS[country]}." for country in countries)
    return f"What are the capitals of {' and '.join(countries)}?", answer


def first_and_last(rng: Rng):
    words = _pick(rng, WORDS, rng.integers(3, 7))
    return (
        f"Name the first and the last of: {', '.join(words)}.",
        f"The first word is {words[0]} and the last word is {words[-1]}.",
    )


def how_many(rng: Rng):
    words = _pick(rng, WORDS, rng.integers(2, 7))
    counted = "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return f"How many words: {' '.join(words)}?", f"{counted}\nThere are {len(words)} words."


def make_json(rng: Rng):
    name, age, word = _one(rng, *NAMES), int(rng.integers(5, 90)), _one(rng, *WORDS)
    return (
        f"Write as JSON: name {name}, age {age}, likes {word}.",
        f'{{"name": "{name}", "age": {age}, "likes": "{word}"}}',
    )


def letter(rng: Rng):
    (sender, reader), word = _pick(rng, NAMES, 2), _one(rng, *WORDS)
    return (
        f"Write a note to {reader} from {sender} about the {word}.",
        f"Dear {reader},\nthank you for the {word}. I like the {word} very much.\nYours, {sender}",
    )


TASKS: tuple[Callable[[Rng], tuple[str, str]], ...] = (
    list_words,
    bullet_words,
    spell,
    repeat,
    copy_words,
    capitals_of_words,
    reverse_words,
    count_from,
    add,
    times_table,
    compare,
    next_in_calendar,
    capital_cities,
    first_and_last,
    how_many,
    make_json,
    letter,
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer exactly and briefly.")
HELD_OUT_SHARE = 16  # one question in so many is held out


def split_of(question: str) -> str:
    """`train` or `held_out`."""
    return "train" if hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_SHARE else "held_out"


def make_chats(split: str, count: int, seed: int = 0) -> list[list[dict]]:
    """`count` chats of the split, each a list of messages; a fifth have two questions, a tenth a system prompt."""
    rng = np.random.default_rng([seed, ("train", "held_out").index(split)])

    def turn() -> list[dict]:
        while True:
            question, answer = TASKS[rng.integers(len(TASKS))](rng)
            if split_of(question) == split:
                return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def chat() -> list[dict]:
        system = [{"role": "system", "content": _one(rng, *SYSTEM_PROMPTS)}] if rng.random() < 0.1 else []
        return [*system, *turn(), *(turn() if rng.random() < 0.2 else [])]

    return [chat() for _ in range(count)]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(chats: Sequence[Sequence[dict]], vocab_size: int):
    """A byte-level BPE tokenizer with a ChatML template, for a model trained from scratch.

    Digits are single tokens. End is `<|im_end|>`, padding `<|endoftext|>`, `[MASK]` is `<|mask|>`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{m['role']}\n{m['content']}" for chat in chats for m in chat), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
