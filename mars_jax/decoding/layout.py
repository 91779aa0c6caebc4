"""Where the tokens of one step stand and what they see.

A row's step is its pending tokens, then its drafts, then groups of placeholders, each group after one possible stop:

    window          pending … root                [MASK] × W
    verify, chain   root  d_1 … d_K               [MASK] × K
    verify, tree    root  d_1 … d_K               [MASK] × K after root, after d_1, …, after d_K

Pending tokens and drafts are public; a placeholder sees the public tokens before its stop and its own group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.decoding.plan import Plan
from mars_jax.decoding.settings import Settings, Vocabulary
from mars_jax.decoding.state import DecodeState
from mars_jax.objective.visibility import Tokens, public


class Layout(NamedTuple):
    """tokens: int32 `[B, T]` ids. visibility: its fields are `[B, T]`. T = real + stops * masks."""

    tokens: jax.Array
    visibility: Tokens


def _concatenate(left: Tokens, right: Tokens) -> Tokens:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), left, right)


def _real(plan: Plan, state: DecodeState) -> Layout:
    index_BR = jnp.broadcast_to(jnp.arange(plan.real), (state.length.shape[0], plan.real))
    position_BR = state.cursor[:, None] + index_BR
    tokens_BR = jnp.take_along_axis(state.tokens, position_BR, axis=1, mode="clip")
    if plan.drafts:
        drafts_BR = jnp.take_along_axis(state.drafts.tokens, index_BR - state.pending[:, None], axis=1, mode="clip")
        tokens_BR = jnp.where(position_BR < state.length[:, None], tokens_BR, drafts_BR)
    exists_BR = position_BR < (state.length + state.drafts.count)[:, None]
    return Layout(tokens_BR, public(exists_BR.astype(jnp.int32), position_BR))


def _placeholders(plan: Plan, vocabulary: Vocabulary, settings: Settings, state: DecodeState) -> Layout:
    batch = state.length.shape[0]
    shape = (batch, plan.stops, plan.masks)
    if plan.branched:
        number_BS = jnp.broadcast_to(jnp.arange(plan.stops), (batch, plan.stops))
    else:
        number_BS = state.drafts.count[:, None]
    possible_BS = number_BS <= state.drafts.count[:, None]
    stop = jnp.broadcast_to((state.length[:, None] + number_BS)[:, :, None], shape)
    order = jnp.broadcast_to(jnp.arange(plan.masks), shape)
    exists = possible_BS[:, :, None] & (order < settings.width[:, None, None])
    group = jnp.broadcast_to(jnp.arange(1, plan.stops + 1)[:, None], shape)
    visibility = Tokens(exists.astype(jnp.int32), stop + order, group, stop, order)
    tokens = jnp.broadcast_to(vocabulary.mask_id, (batch, plan.stops * plan.masks))
    return Layout(tokens, jax.tree.map(lambda a: a.reshape(batch, -1), visibility))


def step_layout(plan: Plan, vocabulary: Vocabulary, settings: Settings, state: DecodeState) -> Layout:
    """The tokens every row forwards in this step."""
    real = _real(plan, state)
    masks = _placeholders(plan, vocabulary, settings, state)
    return Layout(jnp.concatenate([real.tokens, masks.tokens], axis=1), _concatenate(real.visibility, masks.visibility))
