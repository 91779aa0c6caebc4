"""Which token serves as `[MASK]`, and which ids may be emitted."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from mars_jax.errors import UserError

NEW_MASK_TOKEN = "<|mask|>"

# Special tokens that no chat ever contains, of tokenizers that may have no free row left.
UNUSED_TOKENS = (
    NEW_MASK_TOKEN,  # of an earlier export whose format keeps no mask token
    "<empty_output>",  # SmolLM2
    "<|reserved_special_token_247|>",  # Llama 3
    "[control_768]",  # Mistral from v0.3 on
)


def choose_mask(tokenizer: PreTrainedTokenizerBase, vocab_size: int, mask_token: str | None = None) -> int:
    """The id of `[MASK]`; makes it the tokenizer's mask token, adding it where a row is free.

    Tried in order: `mask_token`, the tokenizer's own mask token, a new `<|mask|>` on a padded row of the embedding,
    an unused special token of a known tokenizer. Raises `UserError` if all fail.
    """
    vocab = tokenizer.get_vocab()
    room = max(vocab.values()) + 1 < vocab_size
    if mask_token is None:
        mask_token = tokenizer.mask_token
    if mask_token is None:
        mask_token = NEW_MASK_TOKEN if room else next((t for t in UNUSED_TOKENS if t in vocab), None)
    if mask_token is None:
        raise UserError(
            "no token can serve as [MASK]: the tokenizer has no mask token, all "
            f"{vocab_size} rows of the embedding are taken, and no unused special token is known; "
            "pass mask_token, the text of a token that never occurs in your data"
        )
    if mask_token not in vocab and not room:
        raise UserError(
            f"mask_token={mask_token!r} is not a token of the tokenizer and the embedding has no free row for it "
            f"({vocab_size} rows, all taken); pass an existing token that never occurs in your data"
        )
    if tokenizer.mask_token != mask_token:
        tokenizer.add_special_tokens({"mask_token": mask_token})
    mask_id = tokenizer.convert_tokens_to_ids(mask_token)
    if mask_id >= vocab_size:
        raise UserError(
            f"mask_token={mask_token!r} has id {mask_id}, beyond the embedding's {vocab_size} rows; "
            "pass an existing token that never occurs in your data"
        )
    return mask_id


def emit_mask(tokenizer: PreTrainedTokenizerBase, vocab_size: int, mask_id: int) -> np.ndarray:
    """Boolean `[V]`: the ids that may be emitted, so not `[MASK]`, padded rows and ids unknown to the tokenizer."""
    allowed = np.zeros(vocab_size, bool)
    known = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    allowed[known[known < vocab_size]] = True
    allowed[mask_id] = False
    return allowed
