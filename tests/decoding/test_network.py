"""The network of decoding against the plain forward of `models.decoder`, for every switch of the architecture."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.decoding.network import DecoderNetwork
from mars_jax.decoding.weights import decode_weights, without_updates
from mars_jax.models import decoder, parameters
from mars_jax.models.attention import dense_attention
from mars_jax.models.config import Lora, ModelConfig
from mars_jax.objective.visibility import Tokens, public, visible

LLAMA = ModelConfig(
    family="llama", vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=8,
)  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "untied": dataclasses.replace(LLAMA, tie_embeddings=False),
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_dim=12),
    "all biases": dataclasses.replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "one kv head": dataclasses.replace(LLAMA, num_kv_heads=1),
    "no groups": dataclasses.replace(LLAMA, num_kv_heads=6),
}


def random_parameters(cfg):
    """All tensors random, biases and norms too."""
    shapes, treedef = jax.tree.flatten(parameters.parameter_shapes(cfg))
    rng = np.random.default_rng(0)
    return treedef.unflatten([jnp.array(0.3 * rng.standard_normal(s.shape), jnp.float32) for s in shapes])


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_against_a_cache_give_the_logits_of_one_plain_forward(name):
    cfg = CONFIGS[name]
    params = random_parameters(cfg)
    tokens = jnp.array(np.random.default_rng(1).integers(0, cfg.vocab_size, (2, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    causal = public(jnp.ones_like(positions), positions)
    mask = visible(causal, causal)
    hidden = decoder.forward(params, cfg, tokens, positions, lambda q, k, v: dense_attention(q, k, v, mask))
    expected = decoder.unembed(params, cfg, hidden)

    network, weights = DecoderNetwork(cfg), decode_weights(params, cfg)
    cache, rows = network.init_cache(2, 16), jnp.arange(2)
    for first, last in [(0, 7), (7, 8), (8, 12)]:
        visibility = jax.tree.map(lambda a, part=slice(first, last): a[:, part], causal)
        cursor = jnp.full(2, first)
        hidden, kv = network.forward(weights, tokens[:, first:last], visibility, cache, cursor)
        np.testing.assert_allclose(network.logits(weights, hidden), expected[:, first:last], atol=2e-4, rtol=1e-4)
        cache = network.write(cache, kv, rows, cursor, jnp.full(2, last - first))


def test_a_grown_cache_holds_what_it_held():
    network = DecoderNetwork(LLAMA)
    cache = jax.tree.map(lambda a: a + 1, network.init_cache(2, 4))
    for (k, v), (k_grown, v_grown) in zip(cache, network.grow(cache, 10), strict=True):
        assert (k_grown.shape[3], v_grown.shape[2]) == (10, 10)
        assert (k_grown[..., :4] == k).all()
        assert (v_grown[:, :, :4] == v).all()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("targets", [("query", "value", "down"), ("key", "output", "gate", "up")])
def test_low_rank_updates_are_those_of_the_plain_forward(gated, targets):
    lora = Lora(3, 6.0, targets, gate=5 if gated else None)
    cfg = dataclasses.replace(LLAMA, qkv_bias=True, lora=lora)
    params = random_parameters(cfg)
    tokens = jnp.array([[7, 5, 9, 5, 5], [8, 6, 5, 5, 5]], jnp.int32)
    # Three placeholders come last; a public token that looks like one is none.
    group = jnp.broadcast_to(jnp.array([0, 0, 1, 1, 1]), tokens.shape)
    tokens = jnp.where(group > 0, 5, tokens)
    position = jnp.broadcast_to(jnp.arange(5), tokens.shape)
    visibility = Tokens(jnp.ones_like(position), position, group, jnp.minimum(position + 1, 2), position)
    mask = visible(visibility, visibility)
    hidden = decoder.forward(
        params, cfg, tokens, position, lambda q, k, v: dense_attention(q, k, v, mask), gate_BT=group > 0
    )
    expected = decoder.unembed(params, cfg, hidden)

    network, weights = DecoderNetwork(cfg), decode_weights(params, cfg)
    found, _ = network.forward(weights, tokens, visibility, None, jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(network.logits(weights, found), expected, atol=2e-4, rtol=1e-4)
    bare = without_updates(weights)
    base, _ = network.forward(bare, tokens, visibility, None, jnp.zeros(2, jnp.int32))
    if gated:
        np.testing.assert_allclose(found[:, :2], base[:, :2], atol=1e-6)
        assert (jnp.abs(found[:, 2:] - base[:, 2:]).max(-1) > 1e-2).all()
    else:  # merged: there is nothing to leave out
        assert jax.tree.structure(bare) == jax.tree.structure(weights)
