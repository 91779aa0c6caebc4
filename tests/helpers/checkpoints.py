"""Tiny Hugging Face checkpoints with every tensor random, biases and norms too; their reference is `transformers`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers
from helpers.paths import TINY_QWEN2
from safetensors.numpy import save_file

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


def config_of(variant: str, **changes) -> dict:
    """The `config.json` that `transformers` writes for a variant, edited; `...` removes a key."""
    options = {**SIZES, **VARIANTS[variant]}
    config = transformers.AutoConfig.for_model(**options)
    written = {**config.to_dict(), "dtype": "float32", **changes}
    return json.loads(json.dumps({key: value for key, value in written.items() if value is not ...}))


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, written out by hand."""
    d, f = config["hidden_size"], config["intermediate_size"]
    e = config.get("head_dim") or d // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * e, config["num_key_value_heads"] * e
    bias = config.get("attention_bias", False)
    qkv_bias = bias or config["model_type"] == "qwen2"
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    linears = {
        "self_attn.q_proj": (q, d, qkv_bias),
        "self_attn.k_proj": (kv, d, qkv_bias),
        "self_attn.v_proj": (kv, d, qkv_bias),
        "self_attn.o_proj": (d, q, bias),
        "mlp.gate_proj": (f, d, config.get("mlp_bias", False)),
        "mlp.up_proj": (f, d, config.get("mlp_bias", False)),
        "mlp.down_proj": (d, f, config.get("mlp_bias", False)),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm.weight": (e,), "self_attn.k_norm.weight": (e,)}
        for name, (out, inputs, has_bias) in linears.items():
            layer[f"{name}.weight"] = (out, inputs)
            if has_bias:
                layer[f"{name}.bias"] = (out,)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_tensors(config: dict, seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    """Values large enough for every part to matter: matrices, norms around one, biases around zero."""
    rng = np.random.default_rng(seed)

    def values(name, shape):
        noise = rng.standard_normal(shape)
        if len(shape) == 2:
            return noise * 1.5 / shape[1] ** 0.5
        return 0.3 * noise + (0 if name.endswith("bias") else 1)

    return {name: values(name, shape).astype(dtype) for name, shape in tensor_shapes(config).items()}


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A complete folder with the golden tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY_QWEN2 / name, folder / name)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def random_checkpoint(folder: Path, variant: str, **changes) -> Path:
    config = config_of(variant, **changes)
    return write(folder, config, random_tensors(config))


def edit_json(path: Path, **changes) -> None:
    """Set top-level keys of a JSON file; `...` as a value removes the key."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


def reference(folder: Path):
    """`transformers` in float32 as a function `tokens_BT -> (hidden states, logits)` of numpy arrays.

    The folder must hold exactly the tensors that its model needs.
    """
    torch = pytest.importorskip("torch", reason="TORCH ABSENT: nothing was compared with transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: found for kind, found in info.items() if found}
    assert not problems, problems

    def compute(tokens_BT: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        with torch.no_grad():
            out = model(torch.tensor(tokens_BT), output_hidden_states=True)
        return [state.numpy() for state in out.hidden_states], out.logits.numpy()

    return compute
