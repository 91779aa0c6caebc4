"""Hugging Face `config.json` to `ModelConfig`, and the table of tensor names.

What a family's transformers class computes is either implemented here or refused: a key that would change the
mathematics is never ignored. Keys that the classes do not read are left alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig, RopeScaling
from mars_jax.models.parameters import is_spec, parameter_specs

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)

SIZE_KEYS = (*(key for key in REQUIRED_KEYS if key != "rms_norm_eps"), "num_key_value_heads", "head_dim")

# Switches of these families' derivatives, with the values under which they change nothing. An absent key is fine.
NEUTRAL_VALUES: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "partial_rotary_factor": (None, 1),
    "rotary_pct": (None, 1),
    "rope_interleaved": (None, False),
    "use_rope": (None, True),
    "no_rope_layer_interval": (None, 0),
    "layer_norm_type": (None, "rms", "rms_norm"),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "parallel_attn": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "scale_emb": (None, 1),
    "scale_depth": (None, 1),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "quantization_config": (None,),
}


def _refuse(key: str, value, expected: str) -> UserError:
    return UserError(f"config.json: {key}={value!r} changes what the model computes and is not implemented; {expected}")


def _check_neutral(hf: Mapping[str, Any]) -> None:
    for key, neutral in NEUTRAL_VALUES.items():
        if key in hf and hf[key] not in neutral:
            raise _refuse(key, hf[key], f"only {' or '.join(repr(v) for v in neutral)} is")
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        raise _refuse("layer_types", hf["layer_types"], "only 'full_attention' layers are")
    if any(rotates != 1 for rotates in hf.get("no_rope_layers") or ()):  # 1 means "rotates", despite the name
        raise _refuse("no_rope_layers", hf["no_rope_layers"], "every layer must use rotary positions")


def _check_window(hf: Mapping[str, Any], family: str) -> None:
    """Sliding windows are accepted only where they can hide nothing."""
    if family in ("qwen2", "qwen3"):  # these read sliding_window only behind the switch
        if hf.get("use_sliding_window"):
            raise _refuse("use_sliding_window", True, "only False is")
        return
    # transformers' MistralConfig takes an absent key for 4096; LlamaConfig knows no such key.
    window = hf.get("sliding_window", 4096 if family == "mistral" else None)
    if window is not None and window < hf["max_position_embeddings"]:
        raise _refuse("sliding_window", window, f"only null, or at least {hf['max_position_embeddings']} positions, is")


def _check_biases(hf: Mapping[str, Any], family: str) -> None:
    """`attention_bias` is a switch of llama and qwen3 (query, key, value and output), `mlp_bias` of llama only."""
    if family in ("mistral", "qwen2") and hf.get("attention_bias"):
        raise _refuse("attention_bias", hf["attention_bias"], f"a {family} model has no such switch")
    if family != "llama" and hf.get("mlp_bias"):
        raise _refuse("mlp_bias", hf["mlp_bias"], f"a {family} model has no such switch")


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters`."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(hf.get(key), Mapping | None):
            raise UserError(f"config.json: {key}={hf[key]!r}: expected an object with rope_type and its numbers")
    spellings = {key: dict(hf[key]) for key in ("rope_parameters", "rope_scaling") if hf.get(key)}
    if len(spellings) == 2 and spellings["rope_parameters"] != spellings["rope_scaling"]:
        raise UserError(
            "config.json: rope_parameters and rope_scaling differ; keep the one that the model was trained with"
        )
    name, rope = next(iter(spellings.items()), ("rope_scaling", {}))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise _refuse(name, rope, "one set of rotary parameters for all layers is")
    kinds = {str(rope.pop(key)) for key in ("rope_type", "type") if key in rope} or {"default"}
    where = f"{name}.rope_theta" if "rope_theta" in rope else "rope_theta"
    theta = _positive(where, rope.pop("rope_theta", hf.get("rope_theta", 10000.0)))
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise _refuse(f"{name}.partial_rotary_factor", hf[name]["partial_rotary_factor"], "only 1 is")
    if kinds == {"default"}:
        if rope:
            raise _refuse(name, hf[name], "rope_type 'default' takes rope_theta alone")
        return theta, None
    if kinds != {"llama3"}:
        raise _refuse(f"{name}.rope_type", sorted(kinds)[0], "'default' and 'llama3' are")
    wanted = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if set(rope) != wanted:
        raise UserError(f"config.json: {name} of rope_type 'llama3' needs {sorted(wanted)}, got {sorted(rope)}")
    numbers = {key: _positive(f"{name}.{key}", rope[key]) for key in wanted}
    return theta, RopeScaling(
        factor=numbers["factor"],
        low_freq_factor=numbers["low_freq_factor"],
        high_freq_factor=numbers["high_freq_factor"],
        original_max_position=int(numbers["original_max_position_embeddings"]),
    )


def _positive(key: str, value) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"config.json: {key}={value!r}: expected a positive number")
    return float(value)


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The architecture of a Hugging Face `config.json`, given as a dict.

    Raises `UserError` naming the key and its value where the config asks for mathematics that is not implemented.
    """
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"config.json: model_type={family!r} is not supported; supported are {', '.join(FAMILIES)}")
    # Only Llama's class takes an absent num_key_value_heads for "as many as query heads".
    required = REQUIRED_KEYS if family == "llama" else (*REQUIRED_KEYS, "num_key_value_heads")
    missing = [key for key in required if hf.get(key) is None]
    if missing:
        raise UserError(f"config.json: missing {', '.join(missing)}")
    for key in SIZE_KEYS:
        if key in hf and hf[key] is not None and (type(hf[key]) is not int or hf[key] < 1):
            raise UserError(f"config.json: {key}={hf[key]!r}: expected an integer of at least 1")
    _check_neutral(hf)
    _check_window(hf, family)
    _check_biases(hf, family)
    rope_theta, rope_scaling = _rope(hf)
    heads = hf["num_attention_heads"]
    default_head_dim = 128 if family == "qwen3" else hf["hidden_size"] // heads  # as in the transformers classes
    attention_bias = bool(hf.get("attention_bias"))
    return ModelConfig(
        family=family,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or default_head_dim,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=_positive("rms_norm_eps", hf["rms_norm_eps"]),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias")),
        qk_norm=family == "qwen3",
        max_positions=hf["max_position_embeddings"],
    )


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """The `config.json` of an architecture without a source; `model_config` of it is `cfg` again."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": cfg.rope_scaling.factor,
            "low_freq_factor": cfg.rope_scaling.low_freq_factor,
            "high_freq_factor": cfg.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": cfg.rope_scaling.original_max_position,
        }
    switches = {
        "llama": {"attention_bias": cfg.output_bias, "mlp_bias": cfg.mlp_bias},
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False, "sliding_window": None},
        "qwen3": {"use_sliding_window": False, "sliding_window": None, "attention_bias": cfg.output_bias},
    }
    return {
        "architectures": [_ARCHITECTURES[cfg.family]],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "max_position_embeddings": cfg.max_positions,
        **switches[cfg.family],
    }


@dataclass(frozen=True)
class TensorName:
    """Where one parameter of ours lies in a Hugging Face checkpoint.

    `names` holds one tensor per layer for a stacked parameter, else a single one. Their matrices are `[out, in]`, ours
    `[in, out]`: `transpose` says which need turning.
    """

    names: tuple[str, ...]
    stacked: bool
    transpose: bool


_MODULES = {
    ("embedding",): "model.embed_tokens",
    ("final_norm",): "model.norm",
    ("head",): "lm_head",
    ("attention", "query"): "self_attn.q_proj",
    ("attention", "key"): "self_attn.k_proj",
    ("attention", "value"): "self_attn.v_proj",
    ("attention", "output"): "self_attn.o_proj",
    ("attention", "query_norm"): "self_attn.q_norm",
    ("attention", "key_norm"): "self_attn.k_norm",
    ("attention_norm",): "input_layernorm",
    ("mlp_norm",): "post_attention_layernorm",
    ("mlp", "gate"): "mlp.gate_proj",
    ("mlp", "up"): "mlp.up_proj",
    ("mlp", "down"): "mlp.down_proj",
}

# Those of low-rank updates are PEFT's.
_LEAVES = {
    "table": "weight",
    "scale": "weight",
    "kernel": "weight",
    "bias": "bias",
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
}

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _tensor_name(path: tuple[str, ...], num_layers: int) -> TensorName:
    *module, leaf = path
    stacked = module[0] == "layers"
    module = _MODULES[tuple(module[1:] if stacked else module)]
    name = f"{module}.{_LEAVES[leaf]}"
    names = tuple(f"model.layers.{i}.{name}" for i in range(num_layers)) if stacked else (name,)
    return TensorName(names, stacked, transpose=leaf in ("kernel", "lora_a", "lora_b"))


def tensor_names(cfg: ModelConfig) -> dict[str, Any]:
    """A `TensorName` for every parameter, in the tree of `parameter_specs`."""

    def name(path, _spec):
        return _tensor_name(tuple(entry.key for entry in path), cfg.num_layers)

    return jax.tree_util.tree_map_with_path(name, parameter_specs(cfg), is_leaf=is_spec)
