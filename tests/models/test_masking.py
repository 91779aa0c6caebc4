"""Which token becomes [MASK], and which ids may be emitted."""

import numpy as np
import pytest
from helpers.paths import TINY_QWEN2
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mars_jax.errors import UserError
from mars_jax.models.masking import choose_mask, emit_mask

WORDS = ("<end>", "one", "two", "three")


def tokenizer(*tokens, special=(), **roles):
    vocab = {token: i for i, token in enumerate((*WORDS, *tokens))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", **roles)


def test_the_tokenizers_own_mask_token_is_kept():
    golden = AutoTokenizer.from_pretrained(TINY_QWEN2)
    assert choose_mask(golden, 384) == 3
    assert golden.mask_token == "<|mask|>"


def test_a_free_row_gets_a_new_token():
    tok = tokenizer()
    assert choose_mask(tok, 6) == 4
    assert tok.mask_token == "<|mask|>"
    assert tok.encode("one <|mask|> two") == [1, 4, 2]
    assert 4 in tok.all_special_ids
    assert choose_mask(tok, 6) == 4, "choosing again changes nothing"


def test_the_free_row_comes_after_the_highest_id_not_after_the_count():
    tok = tokenizer()
    tok.add_tokens(["four"])
    backend = tok.backend_tokenizer
    sparse = Tokenizer(models.WordLevel({"<end>": 0, "one": 1, "high": 9}, unk_token="<end>"))
    sparse.pre_tokenizer = backend.pre_tokenizer
    tok = PreTrainedTokenizerFast(tokenizer_object=sparse, eos_token="<end>")
    assert len(tok) == 3
    with pytest.raises(UserError, match="no token can serve"):
        choose_mask(tok, 10)
    mask_id = choose_mask(tok, 12)
    assert mask_id not in (0, 1, 9)
    assert mask_id < 12


def test_without_a_free_row_an_unused_special_token_serves():
    tok = tokenizer("<empty_output>", special=["<empty_output>"])
    assert choose_mask(tok, 5) == 4
    assert tok.mask_token == "<empty_output>"


def test_without_any_candidate_the_message_says_what_to_pass():
    with pytest.raises(UserError, match=r"all 4 rows .* pass mask_token"):
        choose_mask(tokenizer(), 4)


def test_an_explicit_token_wins():
    tok = tokenizer("<spare>", mask_token="<spare>")
    assert choose_mask(tok, 8, "three") == 3
    assert tok.mask_token == "three"


def test_an_explicit_new_token_needs_a_free_row():
    tok = tokenizer()
    assert choose_mask(tok, 5, "<hole>") == 4
    with pytest.raises(UserError, match=r"'<hole>' is not a token .*4 rows, all taken"):
        choose_mask(tokenizer(), 4, "<hole>")


def test_a_mask_token_beyond_the_embedding_is_refused():
    with pytest.raises(UserError, match="id 5, beyond the embedding's 5 rows"):
        choose_mask(tokenizer("four", "<spare>", mask_token="<spare>"), 5)


def test_what_may_be_emitted():
    tok = tokenizer()
    mask_id = choose_mask(tok, 8)
    assert emit_mask(tok, 8, mask_id).tolist() == [True] * 4 + [False] * 4
    golden = AutoTokenizer.from_pretrained(TINY_QWEN2)
    allowed = emit_mask(golden, 384, 3)
    assert np.flatnonzero(~allowed).tolist() == [3, 380, 381, 382, 383]
