"""AdamW with clipping, decay on matrices only, and the learning-rate schedule."""

import jax
import optax

from mars_jax.config_sections import OptimizerSection, ScheduleSection
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params, is_spec, parameter_specs, split


def decay_mask(cfg: ModelConfig) -> Params:
    """True for trained matrices, by the dimensions of one layer: a stacked norm scale `[L, D]` is still a vector."""
    specs = split(parameter_specs(cfg))[1]
    return jax.tree.map(lambda spec: len([a for a in spec.axes if a != "layer"]) == 2, specs, is_leaf=is_spec)


def decayed_names(cfg: ModelConfig) -> list[str]:
    """Dotted names of the parameters that weight decay reaches, for the log."""
    leaves = jax.tree.leaves_with_path(decay_mask(cfg))
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, decayed in leaves if decayed]


def make_optimizer(options: OptimizerSection, cfg: ModelConfig) -> optax.GradientTransformation:
    """Gradient -> AdamW direction, before the learning rate: the step applies `-learning_rate * direction`.

    Kept outside, the learning rate follows the step counter of the run, not a second count in the optimizer's state.
    """
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.eps),
        optax.add_decayed_weights(options.weight_decay, mask=decay_mask(cfg)),
    )


def make_schedule(options: ScheduleSection, peak: float, steps: int) -> optax.Schedule:
    """Learning rate of update `step` (from 0) of a run of `steps` updates.

    Warm-up is linear and ends at the peak: update 0 of `w` warm-up updates has `peak / w`, none is wasted on zero.
    """
    warmup = round(options.warmup_ratio * steps)
    rest = max(steps - warmup, 1)
    final = peak * options.final_ratio
    if options.kind == "cosine":
        decay = optax.cosine_decay_schedule(peak, rest, alpha=options.final_ratio)
    elif options.kind == "linear":
        decay = optax.linear_schedule(peak, final, rest)
    else:
        decay = optax.constant_schedule(peak)
    if not warmup:
        return decay
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), decay], [warmup])
