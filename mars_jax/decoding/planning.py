"""Which requests can share a batch, and the step shape that serves them all."""

from collections.abc import Sequence
from dataclasses import replace

from mars_jax.decoding import plan as plans
from mars_jax.decoding.plan import Plan
from mars_jax.decoding.requests import DecodeOptions
from mars_jax.decoding.settings import SOURCES

CURSOR_MODES = ("ar", "window", "verify", "lookup", "jacobi")


def shares_steps_with(options: DecodeOptions):
    """Requests with equal keys share a batch: all modes that keep a cursor a row do."""
    if options.mode in CURSOR_MODES:
        return "cursors"
    return options.mode, options.width, options.cache_block if options.mode == "block" else None


def plan_of(options: Sequence[DecodeOptions], capacity: int) -> Plan:
    """The step shape for requests of one batch."""
    one = options[0]
    match one.mode:
        case "block":
            plan = plans.block(one.cache_block, one.window)
        case "diffusion":
            plan = plans.diffusion(one.window)
        case "recompute":
            plan = plans.recompute(capacity, one.window)
        case _:
            plan = _cursor_plan(options)
    asked = [o.logprobs for o in options if o.logprobs is not None]
    plan = replace(plan, logprobs=max(asked, default=None))
    return replace(plan, sampled=any(o.sampled for o in options), adjusted=any(o.adjusted for o in options))


def same_text_without_drafts(options: Sequence[DecodeOptions]) -> bool:
    """Whether any drafts of these requests' batch can be left out without changing what it returns."""
    return all(o.exact or o.mode == "ar" for o in options) and any(o.exact for o in options)


def without_drafts(plan: Plan) -> Plan:
    """The autoregressive step shape that rows of an exact plan can go on with."""
    return replace(plans.autoregressive(), sampled=plan.sampled, adjusted=plan.adjusted, logprobs=plan.logprobs)


def _cursor_plan(options: Sequence[DecodeOptions]) -> Plan:
    """Wide enough for every row: a row uses what its own width says."""
    with_masks = [o for o in options if o.mode in ("window", "verify")]
    sources = {o.source for o in options if o.mode != "ar"}
    return Plan(
        real=max(o.width for o in options) + 1,
        drafts=max((o.draft for o in options if o.exact), default=0),
        masks=max((o.width for o in with_masks), default=0),
        branched=any(o.mode == "verify" and o.layout == "tree" for o in with_masks),
        sources=tuple(name for name in SOURCES if name in sources) or ("masks",),
        found=any(o.lookup for o in options),
    )
