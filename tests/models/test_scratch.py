"""The folder of a new model: everything that load and export need once a run has trained its weights."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import checkpoints
from helpers.forward import causal_logits, random_tokens
from helpers.paths import TINY_QWEN2
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mars_jax import load
from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.models.export import export
from mars_jax.models.parameters import init_parameters
from mars_jax.models.scratch import create_folder


def architecture(family="llama", **changes):
    numbers = {"vocab_size": 380, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
    return ModelConfig(family=family, num_kv_heads=2, head_dim=8, **{**numbers, **changes})


@pytest.fixture
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(TINY_QWEN2)


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_a_trained_scratch_model_loads_and_exports(tmp_path, tokenizer, tied, dtype):
    cfg = architecture(tie_embeddings=tied)
    create_folder(tmp_path / "run" / "hf", cfg, tokenizer, dtype)
    params = init_parameters(jax.random.key(0), cfg, std=0.3)
    with ocp.CheckpointManager(tmp_path / "run" / "checkpoints", item_names=("params",)) as manager:
        manager.save(7, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
    model = load(tmp_path / "run")
    assert model.cfg == cfg
    assert (model.mask_id, model.stop_ids, int(model.emit_mask.sum())) == (3, (2,), 379)
    jax.tree.map(np.testing.assert_array_equal, model.params, params)

    out = export(model, tmp_path / "out")
    assert set(load(out).tensor_dtypes.values()) == {"F32" if dtype == "float32" else "BF16"}
    tokens = random_tokens(380, 40)
    ours = causal_logits(load(out).params, cfg, tokens)
    np.testing.assert_allclose(ours, checkpoints.reference(out)(tokens)[1], atol=1e-3)
    text = "List: 12 red, blue."
    assert AutoTokenizer.from_pretrained(out).encode(text) == tokenizer.encode(text)


def test_the_tokenizer_is_written_under_names_that_older_readers_know(tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY_QWEN2)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    create_folder(tmp_path, architecture(), tokenizer)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<|im_start|>"]
    assert "extra_special_tokens" not in config
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded.all_special_ids == tokenizer.all_special_ids
    assert (reloaded.mask_token_id, reloaded.chat_template) == (3, tokenizer.chat_template)


def test_a_tokenizer_that_transformers_would_change_is_refused(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"family='qwen2'.* use family 'llama'"):
        create_folder(tmp_path, architecture("qwen2", qkv_bias=True), tokenizer)
