"""A tokenizer rebuilt from the `tokenizer.ggml.*` metadata of a GGUF file."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mars_jax.errors import UserError

LLAMA3_KINDS = ("llama-bpe", "llama3", "llama-v3")  # names of one `tokenizer.ggml.pre`
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # `tokenizer.ggml.token_type`

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str):
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


def _pre_tokenizer(kind: str):
    """How text is cut before byte-level merges, by llama.cpp's name for it."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if kind in LLAMA3_KINDS:
        return _split(_LLAMA3_SPLIT)
    if kind == "qwen2":
        return _split(_QWEN2_SPLIT)
    if kind in ("default", "gpt-2"):
        return gpt2
    raise UserError(
        f"GGUF tokenizer.ggml.pre={kind!r} is not supported; use the Hugging Face folder that the file was made from"
    )


def build_tokenizer(meta: dict) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the file's vocabulary, merges, special tokens and chat template.

    Raises `UserError` for other tokenizer models.
    """
    if meta.get("tokenizer.ggml.model") != "gpt2":
        raise UserError(
            f"GGUF tokenizer.ggml.model={meta.get('tokenizer.ggml.model')!r} is not supported, "
            "only byte-level BPE ('gpt2') is; use the Hugging Face folder that the file was made from"
        )
    kind = meta.get("tokenizer.ggml.pre", "default")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    # Rows that pad the embedding have no text of their own, and must stay unknown to the tokenizer.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    # llama-bpe tokenizers look whole words up before merging.
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=kind in LLAMA3_KINDS)
    tokenizer = Tokenizer(model)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    for kind_id, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(t, special=special, normalized=False) for t, n in zip(tokens, types, strict=True) if n == kind_id
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    def named(role):
        index = meta.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    if meta.get("tokenizer.ggml.add_bos_token", kind in LLAMA3_KINDS):
        bos = meta["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        mask_token=named("mask"),
        chat_template=meta.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
