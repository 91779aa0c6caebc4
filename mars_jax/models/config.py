"""The numbers that define a decoder architecture."""

from dataclasses import dataclass

from mars_jax.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class Lora:
    """Low-rank updates of a layer's matrices: `x @ kernel + alpha / rank * (x @ lora_a) @ lora_b` (arXiv 2106.09685).

    targets: names of the matrices in `parameter_specs`.
    gate:    the id of `[MASK]` if the updates are for placeholders only, None if they are for all tokens.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    gate: int | None = None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def gated(self) -> bool:
        return self.gate is not None


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-like decoder. Frozen and hashable, so it can be a static argument of `jax.jit`.

    `vocab_size` counts rows of the embedding, padding rows included; which ids may be emitted is the tokenizer's
    business (see `decoding`), not the model's.
    """

    family: str  # "llama", "mistral", "qwen2" or "qwen3": the Hugging Face `model_type`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048
    lora: Lora | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "every kv head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} must be even for rotary embeddings")

    @property
    def group_size(self) -> int:
        """Query heads per kv head (G)."""
        return self.num_heads // self.num_kv_heads
