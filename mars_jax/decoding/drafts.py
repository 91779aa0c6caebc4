"""Where drafts come from: the one thing in which the exact modes differ. All are checked in the same way.

    verify   the placeholders after the last confirmed token
    lookup   what followed the last occurrence of the row's latest tokens in its own prompt and output
    jacobi   the model's own choices after the wrong guesses of the last forward, at first random tokens of the text

A source returns the drafts for the next forward after a run is committed. Rows of one batch may have different ones.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mars_jax.decoding.plan import Plan
from mars_jax.decoding.settings import SOURCES, Settings

# Longest suffix that `lookup` compares; longer matches say little more.
LONGEST_MATCH = 4


class Drafts(NamedTuple):
    """Unchecked candidates for the tokens from `length` on.

    tokens: int32 `[B, K]`.
    count:  int32 `[B]`, how many there are.
    q:      float32 `[B, K, V]`, the distribution that each was drawn from; None where none was drawn.
    found:  other candidates for the same places, from lookup, where the plan checks them beside these.
    """

    tokens: jax.Array
    count: jax.Array
    q: jax.Array | None
    found: "Drafts | None" = None

    def distributions(self, vocab_size: int) -> jax.Array:
        return jax.nn.one_hot(self.tokens, vocab_size, dtype=jnp.float32) if self.q is None else self.q


def of_rows(by_source: Mapping[str, Drafts], plan: Plan, settings: Settings) -> Drafts:
    """Each row's drafts, of its own source, and those of lookup beside them where the row asked for them.

    Rows that check no drafts may have a source that the plan lacks: they get the first one's, which are none to them.
    """
    drafts, *others = (by_source[name] for name in plan.sources)
    for name, other in zip(plan.sources[1:], others, strict=True):
        if drafts.q is not None or other.q is not None:
            vocab_size = (other if drafts.q is None else drafts).q.shape[-1]
            drafts, other = (d._replace(q=d.distributions(vocab_size)) for d in (drafts, other))
        drafts = chosen(settings.source == SOURCES.index(name), other, drafts)
    if not plan.found:
        return drafts
    found = by_source["lookup"]
    return drafts._replace(found=found._replace(count=jnp.where(settings.beside, found.count, 0)))


def chosen(where_B: jax.Array, ours, theirs):
    """One of two pytrees of arrays `[B, ...]`, by row."""
    return jax.tree.map(lambda a, b: jnp.where(where_B.reshape(-1, *[1] * (a.ndim - 1)), a, b), ours, theirs)


def lookup(tokens_BN: jax.Array, length_B: jax.Array, width_B: jax.Array, drafts: int) -> Drafts:
    """What followed the longest, then latest, earlier match of each row's last tokens; no drafts without a match."""
    capacity = tokens_BN.shape[1]
    end_BN = jnp.broadcast_to(jnp.arange(capacity), tokens_BN.shape)  # a match ends here
    matched_BN = jnp.zeros_like(tokens_BN)
    still_BN = end_BN < length_B[:, None] - 1
    for back in range(LONGEST_MATCH):
        own_B1 = jnp.take_along_axis(tokens_BN, length_B[:, None] - 1 - back, axis=1, mode="clip")
        still_BN &= (jnp.roll(tokens_BN, back, axis=1) == own_B1) & (end_BN >= back)
        matched_BN += still_BN
    best_B = jnp.argmax(matched_BN * capacity + end_BN * (matched_BN > 0), axis=1)
    place_BK = best_B[:, None] + 1 + jnp.arange(drafts)[None]
    found_B = jnp.take_along_axis(matched_BN, best_B[:, None], axis=1)[:, 0] > 0
    count_B = jnp.where(found_B, jnp.minimum(width_B, jnp.minimum(drafts, length_B - 1 - best_B)), 0)
    return Drafts(jnp.take_along_axis(tokens_BN, place_BK, axis=1, mode="clip"), count_B, None)


def guesses(u_BK: jax.Array, tokens_BN: jax.Array, length_B: jax.Array) -> jax.Array:
    """Random tokens of each row's own text, as Jacobi decoding starts from; `u_BK` are uniform in [0, 1)."""
    place_BK = (u_BK * length_B[:, None]).astype(jnp.int32)
    return jnp.take_along_axis(tokens_BN, place_BK, axis=1, mode="clip")


def jacobi(choice_BX: jax.Array, confirmed_B: jax.Array, guess_BK: jax.Array, width_B: jax.Array) -> Drafts:
    """The choices made at the places after the first new token, filled up with guesses."""
    place_BK = confirmed_B[:, None] + 1 + jnp.arange(guess_BK.shape[1])[None]
    chosen_BK = jnp.take_along_axis(choice_BX, place_BK, axis=1, mode="clip")
    count_B = jnp.minimum(width_B, guess_BK.shape[1])
    return Drafts(jnp.where(place_BK <= count_B[:, None], chosen_BK, guess_BK), count_B, None)
