"""GGUF files: dequantised tensors under Hugging Face names, `config.json`, and the tokenizer (`gguf_tokenizer`)."""

import atexit
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from mars_jax.errors import UserError
from mars_jax.models.gguf_tokenizer import build_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Stored type -> the type that holds its values exactly, in safetensors' spelling.
STORED_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "Q4_0": "F32", "Q4_1": "F32", "Q8_0": "F32"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name  # not one of ours: reported as unused under its own name


class GgufTensors:
    """A `TensorSource` over a GGUF file."""

    def __init__(self, reader, hf: dict):
        self._tensors = {_hf_name(t.name): t for t in reader.tensors if t.name != ROPE_FACTORS}
        self._hf = hf

    def shapes(self):
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def dtypes(self):
        return {name: STORED_TYPES.get(t.tensor_type.name, t.tensor_type.name) for name, t in self._tensors.items()}

    def read(self, name, index):
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type)  # float32; the whole tensor, as rows may have to move
        return self._unpermuted(name, values)[index]

    def _unpermuted(self, name: str, values: np.ndarray) -> np.ndarray:
        """llama.cpp stores the llama architecture's rotary pairs interleaved; bring them back to half-split."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or self._hf["model_type"] != "llama":
            return values
        pairs = values.reshape(self._hf[heads], -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def _metadata(reader) -> dict:
    return {key: field.contents() for key, field in reader.fields.items()}


def _refuse_unknown(meta: dict, arch: str) -> None:
    """Metadata that would change the mathematics."""
    neutral = {
        "rope.scaling.type": (None, "none"),
        "attention.sliding_window": (None, 0),
        "expert_count": (None, 0),
        "attention.logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "logit_scale": (None, 1.0),
        "residual_scale": (None, 1.0),
        "embedding_scale": (None, 1.0),
        "attention.scale": (None,),
    }
    for key, values in neutral.items():
        value = meta.get(f"{arch}.{key}")
        if value not in values:
            raise UserError(
                f"GGUF metadata {arch}.{key}={value!r} changes what the model computes and is not implemented"
            )


def _rope_parameters(reader, meta: dict, arch: str, head_dim: int) -> dict:
    """Rotary settings; llama.cpp stores Llama-3 scaling as a tensor of per-frequency divisors."""
    theta = float(meta.get(f"{arch}.rope.freq_base", 10000.0))
    divisors = next((t.data for t in reader.tensors if t.name == ROPE_FACTORS), None)
    if divisors is None:
        return {"rope_type": "default", "rope_theta": theta}
    # The tensor does not name its parameters: all published Llama 3.x models share these three.
    low, high, original = 1.0, 4.0, 8192
    factor = float(divisors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1 / ((1 - blend) / factor + blend), divisors, rtol=1e-4):
        raise UserError(
            f"GGUF tensor {ROPE_FACTORS} is not the frequency scaling of Llama 3.x; convert from the original"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def hf_config(reader) -> dict:
    """The Hugging Face `config.json` that the file's metadata describe."""
    meta = _metadata(reader)
    arch = meta["general.architecture"]
    if arch not in ARCHITECTURES:
        raise UserError(f"GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    _refuse_unknown(meta, arch)
    tensors = {t.name: t for t in reader.tensors}
    heads = int(meta[f"{arch}.attention.head_count"])
    hidden = int(meta[f"{arch}.embedding_length"])
    head_dim = int(meta.get(f"{arch}.attention.key_length", hidden // heads))
    if meta.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise UserError(
            f"GGUF metadata {arch}.rope.dimension_count differs from head_dim={head_dim}; "
            "partial rotary embedding is not implemented"
        )
    embedding = tensors["token_embd.weight"]
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "dtype": names[STORED_TYPES.get(embedding.tensor_type.name, "F32")],
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(meta[f"{arch}.feed_forward_length"]),
        "num_hidden_layers": int(meta[f"{arch}.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get(f"{arch}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta[f"{arch}.context_length"]),
        "rms_norm_eps": _shortest(meta[f"{arch}.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rope_parameters(reader, meta, arch, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    if arch != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return config


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def unpack(path: Path) -> tuple[Path, GgufTensors]:
    """A folder with the file's `config.json` and tokenizer, removed at exit, and its tensors."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise UserError(f"{path}: not a readable GGUF file ({error})") from error
    config = hf_config(reader)
    folder = Path(tempfile.mkdtemp(prefix="mars_jax_gguf_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    build_tokenizer(_metadata(reader), config["vocab_size"]).save_pretrained(folder)
    return folder, GgufTensors(reader, config)
