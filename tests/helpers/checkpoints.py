"""Tiny Hugging Face checkpoints made by `transformers`, with every tensor random: biases and norms too."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from helpers.paths import TINY_QWEN2

SIZES = {
    "vocab_size": 384,  # that of the golden tokenizer, which goes into every folder
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# One entry per twist of the mathematics that a family or a switch brings.
VARIANTS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "smollm2": {  # 9 heads on 3 kv heads, tied
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "llama_head_dim": {"model_type": "llama", "head_dim": 12},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1000000.0}},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen3_bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}


def build(variant: str, seed: int = 0, **changes) -> transformers.PreTrainedModel:
    """A model of `VARIANTS`, in float32 and evaluation mode. Weights are large enough for every part to matter."""
    options = {**SIZES, **VARIANTS[variant], **changes}
    config = transformers.AutoConfig.for_model(**options)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:  # norm scales near one, biases near zero, none of them exactly
                parameter.copy_(parameter.round() + 0.3 * noise)
    return model


def add_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY_QWEN2 / name, folder / name)


def save(model: transformers.PreTrainedModel, folder: Path, **options) -> Path:
    """A complete folder. `options` go to `save_pretrained`."""
    model.save_pretrained(folder, **options)
    add_tokenizer(folder)
    return folder


def edit_json(path: Path, **changes) -> None:
    """Set top-level keys of a JSON file; `...` as a value removes the key."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))
