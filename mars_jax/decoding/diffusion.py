"""A step of block diffusion (arXiv 2503.09573), the baseline whose placeholders predict the tokens they stand for.

    pending …     the last block, whose keys and values are now made of the tokens that it came to hold
    block of W    each place a [MASK], or the token that an earlier forward filled in; all see the past and each other

Each forward fills the places whose score passes, and the likeliest one in any case. A full block is committed as one
run; the next forward starts the next block.
"""

import jax
import jax.numpy as jnp

from mars_jax.decoding.acceptance import cut, finish, iota, leading, likeliest, passes
from mars_jax.decoding.layout import Layout, joined, real_tokens
from mars_jax.decoding.network import Network
from mars_jax.decoding.plan import Plan
from mars_jax.decoding.sampling import Purpose, distribution, draw, uniforms
from mars_jax.decoding.settings import Settings, Vocabulary
from mars_jax.decoding.state import NEVER, Block, DecodeState
from mars_jax.decoding.step import append
from mars_jax.objective.visibility import Tokens


def step(
    network: Network, plan: Plan, params, vocabulary: Vocabulary, settings: Settings, state: DecodeState
) -> DecodeState:
    """Advance every running row by one forward."""
    layout = joined(real_tokens(plan, state), _block(vocabulary, state))
    hidden_BTD, kv = network.forward(params, layout.tokens, layout.visibility, state.cache, state.cursor)
    logits_BWV = network.logits(params, hidden_BTD[:, plan.real :])
    block = _filled(plan, settings, state, jnp.where(vocabulary.emit[None, None], logits_BWV, NEVER))

    # A row whose end or limit lies among the tokens without a gap before it waits for no others.
    leading_B = leading(block.is_filled)
    count_B, stopped_B = cut(block.tokens, leading_B, settings.limit - state.length, settings.stop)
    whole_B = stopped_B | (leading_B == plan.masks) | (leading_B >= settings.limit - state.length)
    count_B = jnp.where(state.running & whole_B, count_B, 0)
    length_B = state.length + count_B

    kept_B = jnp.where(state.running, state.pending, 0)
    kept = jax.tree.map(lambda a: a[:, : plan.real], kv)
    cache = network.write(state.cache, kept, jnp.arange(kept_B.shape[0]), state.cursor, kept_B)
    return append(state, block.tokens, block.forward, count_B, None)._replace(
        cache=cache,
        length=length_B,
        cursor=state.cursor + kept_B,
        block=block.emptied(count_B > 0),
        forwards=state.forwards + state.running,
        finish=jnp.where(state.running, finish(stopped_B & whole_B, length_B, settings.limit), state.finish),
    )


def _block(vocabulary: Vocabulary, state: DecodeState) -> Layout:
    tokens = jnp.where(state.block.is_filled, state.block.tokens, vocabulary.mask_id)
    start = jnp.broadcast_to(state.length[:, None], tokens.shape)
    ones = jnp.ones_like(tokens)
    return Layout(tokens, Tokens(ones, start + iota(tokens.shape, 1), group=ones, limit=start, order=ones))


def _filled(plan: Plan, settings: Settings, state: DecodeState, logits_BWV: jax.Array) -> Block:
    """The block with the places filled that this forward is surest of."""
    tokens_BW = likeliest(logits_BWV)
    if plan.sampled:
        u_BW = uniforms(settings.sampling.seed, state.forwards, Purpose.AHEAD, plan.masks)
        tokens_BW = draw(distribution(logits_BWV, settings.sampling), u_BW)
    logprobs_BWV = jax.nn.log_softmax(logits_BWV, axis=-1)
    logprob_BW = jnp.take_along_axis(logprobs_BWV, tokens_BW[..., None], axis=-1)[..., 0]
    surest_B1 = jnp.argmax(jnp.where(state.block.is_filled, -jnp.inf, logprob_BW), axis=1)[:, None]
    sure_BW = passes(logits_BWV, tokens_BW, settings) | (iota(tokens_BW.shape, 1) == surest_B1)
    fill_BW = sure_BW & ~state.block.is_filled
    return Block(
        jnp.where(fill_BW, tokens_BW, state.block.tokens),
        jnp.where(fill_BW, state.forwards[:, None], state.block.forward),
    )
