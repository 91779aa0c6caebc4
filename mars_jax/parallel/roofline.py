"""How fast a compiled step could be on a chip: its work over the chip's peak rates.

An estimate, not a measurement: it assumes that computing, memory traffic and communication overlap perfectly, so it is
the least time a step can take, and the utilisation it gives is the most that can be hoped for.
"""

from dataclasses import dataclass

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.parallel.hlo import Counts


@dataclass(frozen=True)
class Chip:
    """Published peak numbers of one TPU chip (cloud.google.com/tpu/docs).

    flops: bfloat16 a second. hbm_bytes, hbm_bandwidth: memory, and its bytes a second. link_bandwidth: bytes a second
    of one link in one direction; a ring along one axis of the torus uses both directions.
    """

    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float


GIB = 2**30
CHIPS = {
    "v5e": Chip(197e12, 16 * GIB, 819e9, 50e9),
    "v5p": Chip(459e12, 95 * GIB, 2765e9, 100e9),
    "v6e": Chip(918e12, 32 * GIB, 1638e9, 100e9),
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology name such as `v5e:4x4`. Raises UserError for one that is not in the table."""
    name = topology.split(":")[0]
    if name not in CHIPS:
        raise UserError(f"--topology {topology}: no peak numbers for {name!r}; known: {', '.join(CHIPS)}")
    return CHIPS[name]


@dataclass(frozen=True)
class Estimate:
    """Seconds that each resource needs for a step, and what follows. mfu: useful FLOPs over peak, at best."""

    compute_seconds: float
    memory_seconds: float
    network_seconds: float
    step_seconds: float
    bound: str
    mfu: float


# Times the larger side of a collective crosses a link in a ring, for many devices.
RING_FACTORS = {"all-reduce": 2.0}


def estimate(counts: Counts, kernel_flops: float, useful_flops: float, chip: Chip) -> Estimate:
    """Of one device, as are the arguments; `kernel_flops`: of custom kernels, into which `counts` does not see."""
    crossing = sum(bytes_ * RING_FACTORS.get(kind, 1.0) for kind, bytes_ in counts.collectives.items())
    seconds = {
        "compute": (counts.flops + kernel_flops) / chip.flops,
        "memory": counts.bytes / chip.hbm_bandwidth,
        "network": crossing / (2 * chip.link_bandwidth),
    }
    bound = max(seconds, key=seconds.get)
    step = seconds[bound]
    return Estimate(
        compute_seconds=seconds["compute"],
        memory_seconds=seconds["memory"],
        network_seconds=seconds["network"],
        step_seconds=step,
        bound=bound,
        mfu=useful_flops / chip.flops / step,
    )


def matrix_parameters(cfg: ModelConfig) -> int:
    """Weights of the layers' matrices; the vocabulary projection is counted by its own entries."""
    attention = cfg.hidden_size * cfg.head_dim * (2 * cfg.num_heads + 2 * cfg.num_kv_heads)
    return cfg.num_layers * (attention + 3 * cfg.hidden_size * cfg.intermediate_size)


def useful_train_flops(cfg: ModelConfig, tokens: int, entries: int, visible_pairs: int) -> float:
    """FLOPs of a forward and backward pass without any recomputation or masked work.

    Frozen weights have no gradient; what low-rank updates themselves cost is left out.

    tokens: of both streams. entries: of the loss. visible_pairs: (query, key) pairs, summed over rows.
    """
    layers = 2.0 * matrix_parameters(cfg) * tokens
    head = 2.0 * cfg.vocab_size * cfg.hidden_size * entries
    passes = 3.0 if cfg.lora is None else 2.0
    return passes * (layers + head) + 3.0 * attention_flops(cfg, visible_pairs)


def attention_flops(cfg: ModelConfig, pairs: int) -> float:
    """Scores and mixing of values over so many (query, key) pairs, forward, in all layers."""
    return 4.0 * cfg.num_layers * cfg.num_heads * cfg.head_dim * pairs
