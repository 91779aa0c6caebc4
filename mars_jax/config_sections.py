"""The sections of a run's configuration. Values are checked once, here, and trusted everywhere else."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from mars_jax.errors import UserError
from mars_jax.models.config import Lora, ModelConfig
from mars_jax.objective.streams import StreamConfig, noisy_capacity


def _check_least(section, least: float, *names: str) -> None:
    """Refuse a number of a section below `least`, infinite or NaN; None passes."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name}={value} must be at least {least}")


@dataclass(frozen=True)
class ScratchSection:
    """A new model of this architecture, with a tokenizer of `vocab_size` ids trained on the run's own chats."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    rope_theta: float = 10000.0
    tie_embeddings: bool = True
    max_positions: int = 2048

    def __post_init__(self):
        _check_least(self, 1, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "max_positions")
        _check_least(self, 1, "num_heads", "num_kv_heads", "rope_theta")

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The architecture; `vocab_size` is the trained tokenizer's, which may be smaller than asked for."""
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"model.scratch.hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}"
            )
        numbers = dataclasses.asdict(self) | {"vocab_size": vocab_size}
        return ModelConfig(
            head_dim=self.hidden_size // self.num_heads,
            qkv_bias=self.family == "qwen2",
            qk_norm=self.family == "qwen3",
            **numbers,
        )


@dataclass(frozen=True)
class ModelSection:
    """Where the model comes from.

    path:       a Hugging Face folder, a hub id, a `.gguf` file or a run's output_dir. scratch: a new model instead.
    mask_token: the token that serves as `[MASK]`; by default the checkpoint's own choice.
    remat:      recompute layers in the backward pass: about a third more time, much less memory.
    """

    path: str | None = None
    scratch: ScratchSection | None = None
    mask_token: str | None = None
    remat: bool = False

    def __post_init__(self):
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give exactly one of model.path and model.scratch")


LORA_TARGETS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "output",
    "gate": "gate",
    "up": "up",
    "down": "down",
}


@dataclass(frozen=True)
class LoraSection:
    """Low-rank updates trained in place of the weights, which stay as they are: `W + alpha / rank · A B`.

    rank:       of the updates; 0: no updates, all weights are trained.
    targets:    matrices of each layer that get one.
    mask_gated: updates act on placeholders only: as an autoregressive model, the model stays what it was, bit for bit.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = tuple(LORA_TARGETS)
    mask_gated: bool = False

    def __post_init__(self):
        _check_least(self, 0, "rank")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha} must be positive")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={list(self.targets)} must name some matrices, each once")
        if self.mask_gated and not self.rank:
            raise ValueError("mask_gated=true says where low-rank updates act; give their rank, such as rank=16")

    def lora(self, mask_id: int) -> Lora | None:
        if not self.rank:
            return None
        # In one order, so that two spellings of the same choice are the same model.
        targets = tuple(name for key, name in LORA_TARGETS.items() if key in self.targets)
        return Lora(self.rank, self.alpha, targets, mask_id if self.mask_gated else None)


@dataclass(frozen=True)
class ObjectiveSection:
    """What is learned. Most fields are those of `objective.streams.StreamConfig`, here with their defaults.

    masks_per_block: block_size - 1 (`within`, default) or block_size (`shifted`).
    noisy_length:    placeholders a row has room for; by default what `block_fraction` of a full row needs.
    ar_weight:       λ of L_mask + λ L_AR.
    attention:       `dense` (reference), `blockwise` (skips empty tiles), `splash` (TPU kernel), or `auto`.
    logits_chunk:    loss entries per row projected to the vocabulary at a time.
    offset_weights:  factors of the mask loss behind 1, 2, … placeholders; the last holds beyond. Empty: all 1.
    distill:         share of the placeholders' loss that is the divergence from the clean stream's prediction of the
                     same token, in place of the cross-entropy.
    """

    recipe: Literal["ar_sft", "mars", "mars_mask_only", "block_diffusion"] = "mars"
    block_size: int = 4
    masks_per_block: int | None = None
    anchor: Literal["response", "sequence"] = "response"
    ar_weight: float = 1.0
    block_fraction: float = 1.0
    random_offset: bool = False
    row_length: int = 512
    noisy_length: int | None = None
    attention: Literal["auto", "dense", "blockwise", "splash"] = "auto"
    logits_chunk: int = 256
    offset_weights: tuple[float, ...] = ()
    distill: float = 0.0

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size}: a block needs at least 2 tokens")
        _check_least(self, 2, "row_length")
        _check_least(self, 1, "logits_chunk")
        _check_least(self, 0 if self.recipe == "ar_sft" else 1, "noisy_length")
        _check_least(self, 0, "ar_weight")
        if self.masks_per_block not in (None, self.block_size - 1, self.block_size):
            raise ValueError(
                f"masks_per_block={self.masks_per_block} must be block_size-1={self.block_size - 1} (within) "
                f"or block_size={self.block_size} (shifted)"
            )
        if not 0 < self.block_fraction <= 1:
            raise ValueError(f"block_fraction={self.block_fraction} must lie in (0, 1]")
        if not all(0 <= weight < math.inf for weight in self.offset_weights):
            raise ValueError(f"offset_weights={self.offset_weights} must be finite and not negative")
        if not 0 <= self.distill <= 1:
            raise ValueError(f"distill={self.distill} must lie in [0, 1]")
        if self.distill and self.recipe == "block_diffusion":
            raise ValueError(f"distill={self.distill} needs placeholders that predict as the clean stream does: mars")

    def stream_config(self, mask_id: int) -> StreamConfig:
        masks = self.block_size - 1 if self.masks_per_block is None else self.masks_per_block
        noisy = self.noisy_length
        if noisy is None and self.block_fraction < 1.0 and self.recipe != "ar_sft":
            blocks = -(-int(self.row_length * self.block_fraction) // self.block_size)
            noisy = blocks * self.block_size
        elif noisy is None:
            noisy = noisy_capacity(self.recipe, self.row_length, self.block_size, masks, self.anchor)
        return StreamConfig(
            recipe=self.recipe,
            block_size=self.block_size,
            masks_per_block=masks,
            anchor=self.anchor,
            row_length=self.row_length,
            noisy_length=noisy,
            mask_id=mask_id,
            block_fraction=self.block_fraction,
            random_offset=self.random_offset,
        )


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW. `clip_norm` bounds the global gradient norm; weight decay reaches matrices only."""

    learning_rate: float = 5e-6
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self):
        _check_least(self, 0, "learning_rate", "eps", "weight_decay")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be positive")


@dataclass(frozen=True)
class ScheduleSection:
    """Linear warm-up over `warmup_ratio` of all steps, then `kind` down to `final_ratio` of the peak learning rate."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = 0.03
    final_ratio: float = 0.0

    def __post_init__(self):
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"warmup_ratio={self.warmup_ratio} must lie in [0, 1)")
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final_ratio={self.final_ratio} must lie in [0, 1]")


@dataclass(frozen=True)
class TrainSection:
    """How long, how much at a time, and what is kept.

    global_batch:  rows of a step, over all devices. accumulation: micro-batches it is cut into.
    steps/epochs:  give one. An epoch sees every row of the packed data once.
    dtype:         of the computation.
    parameter_dtype: of parameters and optimizer state; bfloat16 loses small updates.
    save_every:    steps between checkpoints; the last step is always saved. keep: latest checkpoints kept.
    keep_best:     held-out loss whose lowest checkpoint is kept as well.
    eval_every:    steps between evaluations on held-out chats; 0: never. eval_batches: most batches of one evaluation.
    resume:        continue from the checkpoints in output_dir; false: refuse an output_dir that has some.
    nonfinite:     a NaN or Inf loss or gradient never changes the weights; `stop` the run, or `skip` and count.
    """

    global_batch: int = 8
    accumulation: int = 1
    steps: int | None = None
    epochs: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    save_every: int = 500
    keep: int = 2
    keep_best: Literal["loss", "loss_ar", "loss_mask"] | None = None
    eval_every: int = 0
    eval_batches: int = 16
    resume: bool = True
    nonfinite: Literal["stop", "skip"] = "stop"

    def __post_init__(self):
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs")
        _check_least(self, 1, "steps", "epochs", "global_batch", "accumulation", "save_every", "keep", "eval_batches")
        _check_least(self, 0, "eval_every", "seed")
        if self.keep_best is not None and (not self.eval_every or self.save_every % self.eval_every):
            raise ValueError(
                f"keep_best={self.keep_best} needs an evaluation at every checkpoint: "
                f"eval_every={self.eval_every} does not divide save_every={self.save_every}"
            )
        if self.global_batch % self.accumulation:
            raise ValueError(
                f"global_batch={self.global_batch} is not a multiple of accumulation={self.accumulation} micro-batches"
            )


@dataclass(frozen=True)
class MeshSection:
    """Devices along each axis; at most one may be -1: as many as are left.

    distributed: join the other processes of the run first (`parallel.processes` says from where); null: if the
    environment names them.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    distributed: bool | None = None


@dataclass(frozen=True)
class LoggingSection:
    """metrics.jsonl is always written; `every` thins it. profile_steps: first and last step to trace."""

    every: int = 1
    tensorboard: bool = True
    wandb_project: str | None = None
    profile_steps: tuple[int, int] | None = None

    def __post_init__(self):
        _check_least(self, 1, "every")
        first, last = self.profile_steps or (1, 1)
        if not 1 <= first <= last:
            raise ValueError(f"profile_steps={self.profile_steps} must be a first and a last step, counted from 1")
