"""GGUF files: dequantised tensors under Hugging Face names, `config.json`, and the tokenizer (`gguf_tokenizer`)."""

import atexit
import shutil
import tempfile
from pathlib import Path

import numpy as np

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig, RopeScaling
from mars_jax.models.families import EMBEDDING, HEAD, hf_config
from mars_jax.models.gguf_tokenizer import build_tokenizer
from mars_jax.models.hf_folder import save_tokenizer, write_json
from mars_jax.models.rope import scale_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}  # of token ids: Hugging Face's name, GGUF's name

# Stored type -> the type that holds its values exactly, in safetensors' spelling.
STORED_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "Q4_0": "F32", "Q4_1": "F32", "Q8_0": "F32"}

_GLOBAL_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
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

    def __init__(self, reader, cfg: ModelConfig):
        self._tensors = {_hf_name(t.name): t for t in reader.tensors if t.name != ROPE_FACTORS}
        # llama.cpp stores the llama architecture's rotary pairs interleaved, by heads of these numbers.
        interleaved = {"q_proj": cfg.num_heads, "k_proj": cfg.num_kv_heads}
        self._interleaved = interleaved if cfg.family == "llama" else {}

    def shapes(self):
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def dtypes(self):
        return {name: STORED_TYPES[t.tensor_type.name] for name, t in self._tensors.items()}

    def read(self, name, index):
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type)  # float32; the whole tensor, as rows may have to move
        heads = self._interleaved.get(name.split(".")[-2])
        return (values if heads is None else _half_split(values, heads))[index]


def _half_split(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved rotary pairs to first halves, then second halves."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


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


def _rope_scaling(reader, theta: float, head_dim: int) -> RopeScaling | None:
    """llama.cpp stores Llama-3 scaling as a tensor of per-frequency divisors."""
    divisors = next((t.data for t in reader.tensors if t.name == ROPE_FACTORS), None)
    if divisors is None:
        return None
    # The tensor does not name its parameters, but all published Llama 3.x models share these three.
    scaling = RopeScaling(float(divisors.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if not np.allclose(frequencies / scale_frequencies(frequencies, scaling), divisors, rtol=1e-4):
        raise UserError(
            f"GGUF tensor {ROPE_FACTORS} is not the frequency scaling of Llama 3.x; "
            "use the Hugging Face folder that the file was made from"
        )
    return scaling


def model_config(reader, meta: dict) -> ModelConfig:
    """The architecture that the file's metadata and tensors describe."""
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
    theta = float(meta.get(f"{arch}.rope.freq_base", 10000.0))
    return ModelConfig(
        family=arch,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=int(meta[f"{arch}.feed_forward_length"]),
        num_layers=int(meta[f"{arch}.block_count"]),
        num_heads=heads,
        num_kv_heads=int(meta.get(f"{arch}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=_rope_scaling(reader, theta, head_dim),
        norm_eps=_shortest(meta[f"{arch}.attention.layer_norm_rms_epsilon"]),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=arch == "qwen3",
        max_positions=int(meta[f"{arch}.context_length"]),
    )


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def unpack(path: Path) -> tuple[Path, GgufTensors]:
    """A folder with the file's `config.json` and tokenizer, removed at exit, and its tensors."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{path}: reading GGUF files needs the gguf package: pip install gguf") from None

    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise UserError(f"{path}: not a readable GGUF file ({error})") from error
    meta = {key: field.contents() for key, field in reader.fields.items()}
    cfg = model_config(reader, meta)
    unread = sorted({t.tensor_type.name for t in reader.tensors} - STORED_TYPES.keys())
    if unread:
        raise UserError(f"{path}: holds {', '.join(unread)} tensors; supported types are {', '.join(STORED_TYPES)}")
    tensors = GgufTensors(reader, cfg)
    folder = Path(tempfile.mkdtemp(prefix="mars_jax_gguf_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[tensors.dtypes()[EMBEDDING]]
    ids = {f"{role}_token_id": meta.get(f"tokenizer.ggml.{name}_token_id") for role, name in ROLES.items()}
    write_json(folder / "config.json", {**hf_config(cfg), "dtype": dtype, **ids})
    save_tokenizer(build_tokenizer(meta), folder)
    return folder, tensors
