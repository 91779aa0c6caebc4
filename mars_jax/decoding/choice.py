"""Which tokens the logits of one forward give: which drafts stand, the first new token, candidates after it.

Greedy rows take the likeliest token, and a draft stands iff it is that token. Sampling rows use the rejection rule of
speculative sampling: a draft drawn from q stands with probability min(1, p/q); the token in place of a refused one is
drawn from norm(max(0, p - q)). What is committed is distributed exactly as if each token had been drawn from p.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.decoding.acceptance import leading, likeliest
from mars_jax.decoding.penalties import Context, adjust
from mars_jax.decoding.plan import Plan
from mars_jax.decoding.sampling import Purpose, distribution, draw, uniforms
from mars_jax.decoding.settings import Settings
from mars_jax.decoding.state import DecodeState


def at(array_BX: jax.Array, index_B: jax.Array) -> jax.Array:
    """`array[b, index[b]]` for arrays `[B, X, ...]`."""
    return jnp.take_along_axis(array_BX, index_B.reshape(-1, *[1] * (array_BX.ndim - 1)), axis=1)[:, 0]


class Checked(NamedTuple):
    """confirmed: `[B]`, leading drafts that stand. first: `[B]`, the token after them. logits: `[B, X, V]`, adjusted.

    likeliest: `[B, X]`, the model's own choice after the root and after each draft.
    """

    confirmed: jax.Array
    first: jax.Array
    logits: jax.Array
    likeliest: jax.Array


def check(
    plan: Plan, settings: Settings, state: DecodeState, logits_BXV: jax.Array, context: Context | None
) -> Checked:
    """Check the drafts against the logits after the root and after each draft, and choose the first new token."""
    drafts = state.drafts
    if plan.adjusted:
        logits_BXV = _adjusted_after_drafts(settings, logits_BXV, drafts.tokens, context)
    likeliest_BX = likeliest(logits_BXV)
    exists_BK = jnp.arange(plan.drafts)[None] < drafts.count[:, None]
    if not plan.sampled:
        confirmed_B = leading(exists_BK & (drafts.tokens == likeliest_BX[:, : plan.drafts]))
        return Checked(confirmed_B, at(likeliest_BX, confirmed_B), logits_BXV, likeliest_BX)

    sampling = settings.sampling
    p_BXV = distribution(logits_BXV, sampling)
    q_BKV = drafts.distributions(p_BXV.shape[-1])
    p_BK = jnp.take_along_axis(p_BXV[:, : plan.drafts], drafts.tokens[..., None], axis=-1)[..., 0]
    q_BK = jnp.take_along_axis(q_BKV, drafts.tokens[..., None], axis=-1)[..., 0]
    u_BK = uniforms(sampling.seed, state.forwards, Purpose.CONFIRM, plan.drafts)
    confirmed_B = leading(exists_BK & (u_BK * q_BK < p_BK))

    p_BV = at(p_BXV, confirmed_B)
    # After the last draft there is nothing to subtract.
    q_BXV = jnp.concatenate([q_BKV, jnp.zeros_like(p_BXV[:, :1])], axis=1)
    refused_B = confirmed_B < drafts.count
    rest_BV = jnp.where(refused_B[:, None], jnp.maximum(p_BV - at(q_BXV, confirmed_B), 0.0), p_BV)
    # Rounding may leave nothing where p and q are equal but for it; then p itself is right to within that rounding.
    rest_BV = jnp.where(rest_BV.sum(-1, keepdims=True) > 0, rest_BV, p_BV)
    u_B1 = uniforms(sampling.seed, state.forwards, Purpose.NEXT, 1)
    return Checked(confirmed_B, draw(rest_BV[:, None], u_B1)[:, 0], logits_BXV, likeliest_BX)


class Ahead(NamedTuple):
    """Candidates after the first new token. tokens: `[B, W]`. logits: `[B, W, V]`, adjusted. q: as in `Drafts`."""

    tokens: jax.Array
    logits: jax.Array
    q: jax.Array | None


def look_ahead(
    plan: Plan, settings: Settings, state: DecodeState, logits_BWV: jax.Array, checked: Checked, context: Context | None
) -> Ahead:
    """Choose a candidate from each placeholder's logits."""
    u_BW = uniforms(settings.sampling.seed, state.forwards, Purpose.AHEAD, plan.masks) if plan.sampled else None
    if not plan.adjusted or not plan.masks:
        return _choose(plan, settings, logits_BWV, u_BW)
    # Each candidate's context holds the candidates before it: one after the other.
    for i in range(plan.drafts):
        follows = _where(i < checked.confirmed, context.then(state.drafts.tokens[:, i]), context)
        context = follows
    context = context.then(checked.first)
    chosen = []
    for i in range(plan.masks):
        logits_B1V = adjust(logits_BWV[:, i], context, settings)[:, None]
        chosen.append(_choose(plan, settings, logits_B1V, u_BW[:, i : i + 1] if plan.sampled else None))
        context = context.then(chosen[-1].tokens[:, 0])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *chosen)


def _choose(plan: Plan, settings: Settings, logits_BXV: jax.Array, u_BX: jax.Array | None) -> Ahead:
    if not plan.sampled:
        return Ahead(likeliest(logits_BXV), logits_BXV, None)
    q_BXV = distribution(logits_BXV, settings.sampling)
    return Ahead(draw(q_BXV, u_BX), logits_BXV, q_BXV)


def _adjusted_after_drafts(settings: Settings, logits_BXV, drafts_BK, context: Context) -> jax.Array:
    adjusted = [adjust(logits_BXV[:, 0], context, settings)]
    for i in range(drafts_BK.shape[1]):
        context = context.then(drafts_BK[:, i])
        adjusted.append(adjust(logits_BXV[:, i + 1], context, settings))
    return jnp.stack(adjusted, axis=1)


def _where(condition_B: jax.Array, left: Context, right: Context) -> Context:
    return jax.tree.map(lambda a, b: jnp.where(condition_B.reshape(-1, *[1] * (a.ndim - 1)), a, b), left, right)
