"""The golden checkpoint `tests/golden/tiny-qwen2` and its expected decodes."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from mars_jax.models.config import ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "tiny-qwen2"
MASK_ID = 3
STOP_IDS = (2,)
NUM_TOKENS = 380  # ids from here on are padding rows of the embedding

CONFIG = ModelConfig(
    family="qwen2",
    vocab_size=384,
    hidden_size=96,
    intermediate_size=256,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=True,
    max_positions=1024,
)


@functools.cache
def params() -> dict:
    """The checkpoint's parameters, layers stacked."""
    tensors = load_file(FOLDER / "model.safetensors")

    def stacked(name, transpose=False):
        arrays = [tensors[f"model.layers.{i}.{name}"] for i in range(CONFIG.num_layers)]
        return jnp.asarray(np.stack([a.T if transpose else a for a in arrays]))

    def projection(name, bias):
        kernel = {"kernel": stacked(f"{name}_proj.weight", transpose=True)}
        return {**kernel, "bias": stacked(f"{name}_proj.bias")} if bias else kernel

    return {
        "embedding": {"table": jnp.asarray(tensors["model.embed_tokens.weight"])},
        "final_norm": {"scale": jnp.asarray(tensors["model.norm.weight"])},
        "layers": {
            "attention": {
                "query": projection("self_attn.q", True),
                "key": projection("self_attn.k", True),
                "value": projection("self_attn.v", True),
                "output": projection("self_attn.o", False),
            },
            "attention_norm": {"scale": stacked("input_layernorm.weight")},
            "mlp": {name: projection(f"mlp.{name}", False) for name in ("gate", "up", "down")},
            "mlp_norm": {"scale": stacked("post_attention_layernorm.weight")},
        },
    }


def emit_mask() -> np.ndarray:
    """`[V]` bool: ids the model may emit."""
    mask = np.arange(CONFIG.vocab_size) < NUM_TOKENS
    mask[MASK_ID] = False
    return mask


@functools.cache
def decode_cases() -> list[dict]:
    """40 prompts, each with `prompt_ids` and 28 `runs`."""
    return json.loads((GOLDEN / "decode.json").read_text())


@functools.cache
def block_cache_cases() -> list[dict]:
    return json.loads((GOLDEN / "block_cache.json").read_text())


@functools.cache
def model():
    """The checkpoint as the package loads it."""
    from mars_jax.models.loading import load

    return load(FOLDER)
