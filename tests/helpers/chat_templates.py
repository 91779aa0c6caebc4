"""Small chat templates that behave as well-known ones do, and byte-level tokenizers to go with them."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_SYSTEM = "{{ '<|im_start|>system\nYou are a default assistant.<|im_end|>\n' }}"

CHATML = "{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT

# Inserts a system message where the chat has none (Qwen2.5, SmolLM2).
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}" + _SYSTEM + "{% endif %}" + CHATML

# Writes BOS itself and trims every message; two newlines end a header (Llama 3).
HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header|>' + m.role + '<|end_header|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}"
)

# Spaces around the answer, no generation prompt (Llama 2).
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[Q] ' + m.content + ' [/Q]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# Drops the thoughts of answers that a later question follows; gives the last answer an empty one (Qwen3).
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ answer + '<|im_end|>\n' }}"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _PROMPT
)

# No end-of-turn token at all.
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"

# As CHATML, with markers; the generation prompt holds an empty thought that history does not, so no prompt is a prefix.
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}" + _TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think></think>' }}{% endif %}"
)

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|bos|>", "<|start_header|>", "<|end_header|>", "<|eot|>"]
CORPUS = [
    "user assistant system hello world, how are you? I am fine.\n\nThe answer is 12.\n\n\n",
    "  hello hello world world answer answer\n\nyou are a default assistant.",
]


# Line ends are words of their own, so that text after them cannot change how they are cut (Llama 3, Qwen).
WORD = r" ?\w+| ?[^\s\w]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def tokenizer_for(
    template: str | None, eos: str = "<|im_end|>", merges: list[tuple[str, str]] | None = None, word: str = WORD
):
    """A byte-level BPE tokenizer that adds a BOS by default, as Llama's does.

    `merges` replaces the learned ones (and the splitting into words), for merges at chosen places.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if merges is None:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(word), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(CORPUS * 4, trainer)
    else:
        pieces = [*alphabet, *(a + b for a, b in merges)]
        backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token=eos, pad_token=eos, chat_template=template
    )
