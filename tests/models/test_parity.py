"""The forward against `transformers` in float32: logits and the hidden state after every layer, for every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import checkpoints
from helpers.forward import random_tokens
from helpers.paths import TINY_QWEN2

from mars_jax import load
from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention

POSITIONS = [0, 1, 50, 199]  # position 0 alone proves nothing about rotary embeddings


@functools.partial(jax.jit, static_argnums=1)
def hidden_states(params, cfg, tokens_BT):
    """Embeddings, the state after each layer but the last, the final normed state; and logits."""
    length = tokens_BT.shape[1]
    positions = jnp.arange(length)[None]
    mask = jnp.tril(jnp.ones((1, length, length), bool))

    def attend(q, k, v):
        return dense_attention(q, k, v, mask)

    rope = decoder.rotation(cfg, positions)
    states = [decoder.embed(params, tokens_BT, jnp.float32)]
    for i in range(cfg.num_layers - 1):
        states.append(decoder.layer(states[-1], jax.tree.map(lambda a, i=i: a[i], params["layers"]), cfg, rope, attend))
    hidden = decoder.forward(params, cfg, tokens_BT, positions, attend)
    return [*states, hidden], decoder.unembed(params, cfg, hidden)


def compare(folder, length=200, positions=POSITIONS, reference=None):
    """Assert that a folder gives the hidden states and logits of `transformers` (or of a given reference)."""
    loaded = load(folder)
    tokens = random_tokens(loaded.cfg.vocab_size, length)
    expected_states, expected = (reference or checkpoints.reference(folder))(tokens)
    states, logits = hidden_states(loaded.params, loaded.cfg, jnp.asarray(tokens))
    for number, (ours, theirs) in enumerate(zip(states, expected_states, strict=True)):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4, err_msg=f"after layer {number}")
    expected = expected[0, positions]
    assert np.abs(expected).max() > 1, "the logits are too small for the comparison to mean anything"
    difference = np.abs(np.asarray(logits)[0, positions] - expected).max(axis=-1)
    assert (difference < 1e-3).all(), dict(zip(positions, difference, strict=True))


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_every_family_computes_what_transformers_computes(variant, tmp_path):
    compare(checkpoints.random_checkpoint(tmp_path / variant, variant))


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_llama3_rope_scaling_in_every_spelling(spelling, tmp_path):
    folder = checkpoints.random_checkpoint(tmp_path / "llama3", "llama3")
    reference = checkpoints.reference(folder)
    if spelling != "rope_parameters":
        scaling = dict(checkpoints.LLAMA3_ROPE)
        if spelling == "type":
            scaling["type"] = scaling.pop("rope_type")
        old = {"rope_parameters": ..., "rope_scaling": scaling, "rope_theta": 500000.0}
        checkpoints.edit_json(folder / "config.json", **old)
    compare(folder, length=300, positions=[10, 299], reference=reference)


def test_the_comparison_sees_a_missing_rope_scaling(tmp_path):
    folder = checkpoints.random_checkpoint(tmp_path / "llama3", "llama3")
    reference = checkpoints.reference(folder)
    checkpoints.edit_json(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with pytest.raises(AssertionError):
        compare(folder, length=300, positions=[299], reference=reference)


def test_the_golden_checkpoint():
    compare(TINY_QWEN2)
