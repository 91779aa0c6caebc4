"""Weights stored in fewer bytes: an independent dequantisation, exactness, sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny

from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.network import DecoderNetwork
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.decoding.weights import STORAGE, decode_weights
from mars_jax.errors import UserError
from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import parameter_shapes
from mars_jax.objective.visibility import public, visible

UNTIED = ModelConfig(
    family="llama", vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=8, tie_embeddings=False,
)  # fmt: skip
PROMPTS = [tuple(case["prompt_ids"]) for case in tiny.decode_cases()[:8]]


def random_parameters(cfg):
    shapes, treedef = jax.tree.flatten(parameter_shapes(cfg))
    rng = np.random.default_rng(0)
    return treedef.unflatten([jnp.array(0.3 * rng.standard_normal(s.shape), jnp.float32) for s in shapes])


MODELS = {"tied": lambda: (tiny.CONFIG, tiny.params()), "untied": lambda: (UNTIED, random_parameters(UNTIED))}


def rounded(params):
    """The parameters that int8 stands for, in plain numpy: every output's column of a kernel on its own grid."""

    def on_grid(path, array):
        if path[-1].key != "kernel":
            return array
        kernel = np.asarray(array, np.float64)  # [..., in, out]
        step = np.abs(kernel).max(axis=-2, keepdims=True) / 127
        return jnp.asarray(np.rint(kernel / step) * step, jnp.float32)

    return jax.tree_util.tree_map_with_path(on_grid, params)


def plain_logits(cfg, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    causal = public(jnp.ones_like(positions), positions)
    mask = visible(causal, causal)

    @jax.jit
    def logits(params):
        hidden = decoder.forward(params, cfg, tokens, positions, lambda q, k, v: dense_attention(q, k, v, mask))
        return decoder.unembed(params, cfg, hidden)

    return np.asarray(logits(params))


def decoding_logits(cfg, weights, tokens):
    network = DecoderNetwork(cfg)

    @jax.jit
    def logits(weights):
        hidden, _ = network.forward(weights, tokens, visibility, None, None)
        return network.logits(weights, hidden)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    visibility = public(jnp.ones_like(positions), positions)
    return np.asarray(logits(weights))


@pytest.mark.parametrize("name", MODELS)
def test_int8_gives_the_logits_of_an_independent_dequantisation(name):
    cfg, params = MODELS[name]()
    for width in (1, 9):  # one token takes another product
        tokens = jnp.array(np.random.default_rng(1).integers(0, cfg.vocab_size, (1, width)), jnp.int32)
        found = decoding_logits(cfg, decode_weights(params, cfg, quantize=True), tokens)
        expected = plain_logits(cfg, rounded(params), tokens)
        exact = plain_logits(cfg, params, tokens)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-5)
        error = np.abs(exact - expected).max()
        assert error > 50 * np.abs(found - expected).max(), "the oracle must tell int8 from float32"
        assert error < 0.1 * np.abs(exact).max()


def test_rows_of_zeros_stay_zeros():
    params = jax.tree.map(jnp.zeros_like, random_parameters(UNTIED))
    weights = decode_weights(params, UNTIED, quantize=True)
    assert not any(layer["qkv"]["kernel"].any() for layer in weights["layers"])
    assert jnp.isfinite(weights["head"]["scale"]).all()


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_verify_gives_what_ar_gives_with_the_same_weights(weights):
    engine = DecodeEngine(tiny.model(), slots=4, weights=weights)
    ar, verify = (engine.generate([Request(p, DecodeOptions(mode=mode)) for p in PROMPTS]) for mode in ("ar", "verify"))
    assert [r.token_ids for r in verify] == [r.token_ids for r in ar]
    assert sum(r.forwards for r in verify) < 0.7 * sum(r.forwards for r in ar)


def bytes_of(tree) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_each_storage(name):
    cfg, params = MODELS[name]()
    full, half, int8 = (bytes_of(decode_weights(params, cfg, *STORAGE[w])) for w in STORAGE)
    norms = sum(a.nbytes for path, a in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "scale")
    assert full == bytes_of(params)
    assert half - norms == (full - norms) / 2
    kernels = [a for path, a in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "kernel"]
    saved = sum(3 * a.size for a in kernels) - sum(4 * a.size // a.shape[-2] for a in kernels)
    assert full - int8 == saved


def test_an_unknown_storage_is_refused():
    with pytest.raises(UserError, match="weights='int4': expected one of float32, bfloat16, int8"):
        DecodeEngine(tiny.model(), slots=1, weights="int4")
