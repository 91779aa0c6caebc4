"""Who may attend to whom: the one attention rule of training and decoding.

Every token carries five integers; every mask of the project (two streams, packing, window, chain and tree verification,
bidirectional block diffusion) is `visible` applied to them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """Integers that decide visibility, each `[..., T]` int32.

    segment:  packed chat number; 0 is padding, which sees nothing and is seen by nothing.
    position: RoPE position; a placeholder has that of the token it stands for.
    group:    0 for public tokens (clean, committed, drafted); g > 0 for the placeholders of block (or tree branch) g.
    limit:    public keys are visible where `key.position < limit`.
    order:    keys of the query's own group are visible where `key.order <= order`.
    """

    segment: jax.Array
    position: jax.Array
    group: jax.Array
    limit: jax.Array
    order: jax.Array


def public(segment: jax.Array, position: jax.Array) -> Tokens:
    """Ordinary causal tokens: each sees the public tokens up to and including itself."""
    return Tokens(segment, position, jnp.zeros_like(position), position + 1, position)


def visible(query: Tokens, key: Tokens) -> jax.Array:
    """Boolean mask `[..., T, S]`: True where the query (axis T) may attend to the key (axis S)."""
    q = jax.tree.map(lambda a: a[..., :, None], query)
    k = jax.tree.map(lambda a: a[..., None, :], key)
    same_group = (k.group == q.group) & (k.order <= q.order)
    allowed = jnp.where(k.group == 0, k.position < q.limit, same_group)
    return allowed & (q.segment == k.segment) & (k.segment > 0)
