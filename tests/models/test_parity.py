"""The forward against `transformers` in float32: logits and the hidden state after every layer, for every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.paths import TINY_QWEN2
from transformers import AutoModelForCausalLM

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

    def attend(q, k, v, _):
        return dense_attention(q, k, v, mask)

    rope = decoder.rotation(cfg, positions)
    states = [decoder.embed(params, tokens_BT, jnp.float32)]
    for layer in decoder.unstack_layers(params)["layers"][:-1]:
        states.append(decoder.layer(states[-1], layer, cfg, rope, attend, None)[0])
    hidden = decoder.forward(params, cfg, tokens_BT, positions, attend)
    return [*states, hidden], decoder.unembed(params, cfg, hidden)


def random_tokens(vocab_size, length):
    return np.random.default_rng(7).integers(0, vocab_size, (1, length))


def compare(model, folder, length=200, positions=POSITIONS):
    """Assert equal hidden states and logits of the transformers model and of our load of its folder."""
    loaded = load(folder)
    tokens = random_tokens(loaded.cfg.vocab_size, length)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens), output_hidden_states=True)
    states, logits = hidden_states(loaded.params, loaded.cfg, jnp.asarray(tokens, jnp.int32))
    assert len(states) == len(theirs.hidden_states) == loaded.cfg.num_layers + 1
    for number, (ours, expected) in enumerate(zip(states, theirs.hidden_states, strict=True)):
        np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4, err_msg=f"after layer {number}")
    expected = theirs.logits.numpy()[0, positions]
    assert np.abs(expected).max() > 1, "the logits are too small for the comparison to mean anything"
    difference = np.abs(np.asarray(logits)[0, positions] - expected).max(axis=-1)
    assert (difference < 1e-3).all(), dict(zip(positions, difference, strict=True))


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_every_family_computes_what_transformers_computes(variant, tmp_path):
    model = checkpoints.build(variant)
    compare(model, checkpoints.save(model, tmp_path / variant))


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_llama3_rope_scaling_in_every_spelling(spelling, tmp_path):
    model = checkpoints.build("llama3")
    folder = checkpoints.save(model, tmp_path / "llama3")
    if spelling != "rope_parameters":
        scaling = dict(checkpoints.LLAMA3_ROPE)
        if spelling == "type":
            scaling["type"] = scaling.pop("rope_type")
        old = {"rope_parameters": ..., "rope_scaling": scaling, "rope_theta": 500000.0}
        checkpoints.edit_json(folder / "config.json", **old)
    compare(model, folder, length=300, positions=[10, 299])


def test_llama3_rope_scaling_matters_at_long_range(tmp_path):
    """The test above is not blind: without the scaling the same weights give other logits at position 299."""
    model = checkpoints.build("llama3")
    folder = checkpoints.save(model, tmp_path / "llama3")
    checkpoints.edit_json(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with pytest.raises(AssertionError):
        compare(model, folder, length=300, positions=[299])


def test_the_golden_checkpoint():
    model = AutoModelForCausalLM.from_pretrained(TINY_QWEN2, dtype=torch.float32, attn_implementation="eager")
    compare(model.eval(), TINY_QWEN2)
