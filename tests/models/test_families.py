"""Config switches are implemented or refused by name, never ignored; the tensor table covers every parameter."""

import json

import jax
import pytest
from helpers import checkpoints
from helpers.paths import TINY_QWEN2

from mars_jax.errors import UserError
from mars_jax.models import families
from mars_jax.models.config import RopeScaling

GOLDEN_CONFIG = json.loads((TINY_QWEN2 / "config.json").read_text())


def config(variant="llama", **changes):
    return checkpoints.config_of(variant, **changes)


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_what_transformers_writes_is_accepted(variant):
    cfg = families.model_config(config(variant))
    assert cfg.family == checkpoints.VARIANTS[variant]["model_type"]
    assert cfg.num_layers == 3
    assert cfg.max_positions == 512


REFUSED = [
    ("llama", "model_type", "smollm3"),
    ("llama", "model_type", "gemma2"),
    ("llama", "hidden_act", "gelu"),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "no_rope_layers", [1, 1, 0]),
    ("llama", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("llama", "sliding_window", 128),
    ("llama", "final_logit_softcapping", 30.0),
    ("llama", "logits_scaling", 8.0),
    ("llama", "num_local_experts", 8),
    ("llama", "quantization_config", {"quant_method": "gptq"}),
    ("mistral", "sliding_window", 128),
    ("mistral", "attention_bias", True),
    ("qwen2", "use_sliding_window", True),
    ("qwen2", "mlp_bias", True),
    ("qwen3", "use_sliding_window", True),
    ("llama", "rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    ("llama", "rope_parameters", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
    ("llama", "rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ("llama", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    ("llama", "rope_parameters", {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}),
    ("llama", "hidden_size", None),
    ("llama", "rope_scaling", "yarn"),
    ("llama", "rope_parameters", [1.0]),
    ("llama", "rope_parameters", {"rope_type": ["yarn"], "rope_theta": 1e4}),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": "big"}),
    ("llama", "rms_norm_eps", "tiny"),
    ("llama", "num_attention_heads", 0),
    ("llama", "vocab_size", "511"),
    ("llama", "num_key_value_heads", 2.0),
    ("llama", "head_dim", 15),
    ("qwen2", "num_key_value_heads", None),
]


@pytest.mark.parametrize(("variant", "key", "value"), REFUSED, ids=lambda v: str(v)[:40])
def test_one_key_that_changes_the_mathematics_is_refused_by_name(variant, key, value):
    families.model_config(config(variant))
    with pytest.raises(UserError, match=key):
        families.model_config(config(variant, **{key: value}))


def test_a_refusal_names_the_value():
    with pytest.raises(UserError, match="rope_type='yarn'"):
        families.model_config(config(rope_parameters=..., rope_scaling={"type": "yarn", "factor": 2.0}))
    with pytest.raises(UserError, match="rope_scaling='yarn': expected an object with rope_type"):
        families.model_config(config(rope_parameters=..., rope_scaling="yarn"))
    with pytest.raises(UserError, match="hidden_act='gelu'"):
        families.model_config(config(hidden_act="gelu"))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"] * 3},
        {"no_rope_layers": [1, 1, 1]},
        {"sliding_window": 512},
        {"sliding_window": None},
        {"partial_rotary_factor": 1.0},
        {"unsloth_version": "2026.1", "transformers.js_config": {}, "pretraining_tp": 1},
    ],
    ids=str,
)
def test_switches_at_their_neutral_value_change_nothing(changes):
    assert families.model_config(config(**changes)) == families.model_config(config())


def test_an_absent_sliding_window_is_4096_for_mistral():
    """As in `transformers.MistralConfig`, so a longer model without the key does slide."""
    assert families.model_config(config("mistral", sliding_window=...)).max_positions == 512
    with pytest.raises(UserError, match="sliding_window=4096"):
        families.model_config(config("mistral", sliding_window=..., max_position_embeddings=32768))


def test_switches_reach_the_config():
    biased = families.model_config(config("llama_biases"))
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    qwen2 = families.model_config(GOLDEN_CONFIG)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = families.model_config(config("qwen3"))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)


def test_both_rope_spellings_agree():
    scaling = checkpoints.LLAMA3_ROPE
    new = families.model_config(config("llama3"))
    old = families.model_config(config("llama3", rope_parameters=..., rope_scaling=scaling, rope_theta=500000.0))
    assert new == old
    assert new.rope_theta == 500000.0
    assert new.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    with pytest.raises(UserError, match="differ"):
        families.model_config(config("llama3", rope_scaling={**scaling, "factor": 32.0}))


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_the_table_names_exactly_the_tensors_of_a_checkpoint(variant):
    cfg = families.model_config(config(variant))
    ours = {name for entry in jax.tree.leaves(families.tensor_names(cfg)) for name in entry.names}
    assert ours == checkpoints.tensor_shapes(config(variant)).keys()


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_a_written_config_reads_back(variant):
    cfg = families.model_config(config(variant))
    assert families.model_config(families.hf_config(cfg)) == cfg
