"""Where the tokens of one step stand and what they see.

A row's step is its pending tokens, then its drafts, then groups of placeholders, each group after one possible stop:

    window          pending … root                [MASK] × W
    verify, chain   root  d_1 … d_K               [MASK] × K
    verify, tree    root  d_1 … d_K               [MASK] × K after root, after d_1, …, after d_K
    … with lookup   as before, then one more group after root: l_1 … l_K  [MASK] × K

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
    """tokens: int32 `[B, T]` ids. visibility: its fields are `[B, T]`. T = `plan.tokens`."""

    tokens: jax.Array
    visibility: Tokens


def joined(*parts: Layout) -> Layout:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *parts)


def real_tokens(plan: Plan, state: DecodeState) -> Layout:
    """Pending tokens and drafts."""
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


def _found(plan: Plan, vocabulary: Vocabulary, settings: Settings, state: DecodeState) -> Layout:
    """What lookup found after the root, hidden from all other drafts, and placeholders after its last token."""
    found = state.drafts.found
    shape = (state.length.shape[0], plan.drafts + plan.masks)
    index = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    count = found.count[:, None]
    is_draft, order = index < plan.drafts, jnp.where(index < plan.drafts, index, index - plan.drafts + count)
    exists = jnp.where(is_draft, index < count, (count > 0) & (index - plan.drafts < settings.width[:, None]))
    limit = jnp.broadcast_to(state.length[:, None], shape)
    visibility = Tokens(exists.astype(jnp.int32), limit + order, jnp.full(shape, plan.stops + 1), limit, order)
    return Layout(jnp.pad(found.tokens, ((0, 0), (0, plan.masks)), constant_values=vocabulary.mask_id), visibility)


def step_layout(plan: Plan, vocabulary: Vocabulary, settings: Settings, state: DecodeState) -> Layout:
    """The tokens every row forwards in this step."""
    parts = [real_tokens(plan, state), _placeholders(plan, vocabulary, settings, state)]
    if plan.found:
        parts.append(_found(plan, vocabulary, settings, state))
    return joined(*parts)
