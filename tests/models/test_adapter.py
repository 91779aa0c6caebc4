"""Adapters in folders: what PEFT makes of ours, what we make of PEFT's, and what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.checkpoints import edit_json, random_checkpoint, reference
from helpers.forward import causal_logits, random_tokens
from safetensors.numpy import load_file, save_file

from mars_jax.errors import UserError
from mars_jax.models.adapter import Adapter
from mars_jax.models.config import Lora
from mars_jax.models.export import export, export_adapter
from mars_jax.models.loading import load
from mars_jax.models.parameters import init_lora, join

TARGETS = ("query", "value", "output", "gate", "down")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("base") / "qwen2", "qwen2")


def adapted(base, gated=False, targets=TARGETS):
    """The base with a random update, as a run of such an update is loaded."""
    model = load(base)
    lora = Lora(4, 6.0, targets, model.mask_id if gated else None)
    cfg = dataclasses.replace(model.cfg, lora=lora)
    rng = np.random.default_rng(0)
    update = jax.tree.map(
        lambda a: jnp.asarray(0.2 * rng.standard_normal(a.shape), jnp.float32), init_lora(jax.random.key(0), cfg)
    )
    adapter = dataclasses.replace(
        Adapter.of(str(base), lora, model.tokenizer.mask_token, model.params), folder=base.parent / "run"
    )
    return dataclasses.replace(model, cfg=cfg, params=join(model.params, update), adapter=adapter)


@pytest.fixture(scope="module")
def plain(base):
    return adapted(base)


@pytest.fixture(scope="module")
def plain_folder(plain, tmp_path_factory):
    return export_adapter(plain, tmp_path_factory.mktemp("out") / "adapter")


def logits(model, tokens):
    return np.asarray(causal_logits(model.params, model.cfg, tokens))


def test_peft_gives_the_logits_of_our_adapter(base, plain, plain_folder):
    torch = pytest.importorskip("torch", reason="TORCH ABSENT: no adapter was compared with PEFT")
    peft = pytest.importorskip("peft", reason="PEFT ABSENT: no adapter was compared with it")
    import transformers

    tokens = random_tokens(384, 12)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        without = model(torch.tensor(tokens)).logits.numpy()
        found = peft.PeftModel.from_pretrained(model, plain_folder)(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(plain, tokens), found, atol=2e-4)
    assert np.abs(found - without).max() > 0.1

    # And the way back: what PEFT saves is loaded as it is.
    again = plain_folder.parent / "by_peft"
    peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), plain_folder
    ).save_pretrained(again)
    loaded = load(again)
    assert loaded.cfg == plain.cfg
    for have, want in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(have, want)


def test_the_merged_export_gives_the_logits_of_the_adapter(plain, tmp_path):
    folder = export(plain, tmp_path / "merged")
    tokens = random_tokens(384, 12)
    _, found = reference(folder)(tokens)  # plain transformers
    np.testing.assert_allclose(logits(plain, tokens), found, atol=2e-4)
    assert not (folder / "adapter_config.json").exists()
    assert load(folder).cfg.lora is None


@pytest.mark.parametrize("gated", [False, True])
def test_an_exported_adapter_comes_back_bit_for_bit(base, plain, gated, tmp_path):
    model = adapted(base, gated=True) if gated else plain
    loaded = load(export_adapter(model, tmp_path / "adapter"))
    assert loaded.cfg == model.cfg
    assert loaded.cfg.lora.gate == (model.mask_id if gated else None)
    assert dataclasses.replace(loaded.adapter, folder=None) == dataclasses.replace(model.adapter, folder=None)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(model.params)
    for have, want in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(have, want)


def test_the_file_holds_two_tensors_a_targeted_matrix_and_layer(plain_folder):
    tensors = load_file(plain_folder / "adapter_model.safetensors")
    assert len(tensors) == 3 * len(TARGETS) * 2
    assert tensors["base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"].shape == (4, 80)
    assert tensors["base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"].shape == (48, 4)
    config = json.loads((plain_folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 6)
    assert config["target_modules"] == ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def test_a_gated_adapter_is_not_merged_and_peft_refuses_it(base, tmp_path):
    model = adapted(base, gated=True)
    with pytest.raises(UserError, match=r"cannot be merged.*acts on placeholders only.*--adapter"):
        export(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    folder = export_adapter(model, tmp_path / "adapter")
    peft = pytest.importorskip("peft", reason="PEFT ABSENT: nothing says that it refuses mask-gated adapters")
    with pytest.raises(KeyError, match="MASK_GATED_LORA"):
        peft.PeftConfig.from_pretrained(folder)


def test_without_the_gate_a_gated_update_is_as_if_absent(base):
    model, tokens = adapted(base, gated=True), random_tokens(384, 12)
    np.testing.assert_array_equal(logits(model, tokens), logits(load(base), tokens))


def test_a_base_with_other_weights_is_refused(plain, tmp_path):
    base = random_checkpoint(tmp_path / "base", "qwen2")
    model = adapted(base)
    folder = export_adapter(model, tmp_path / "adapter")
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"adapter: the weights of .*base are not those that this"):
        load(folder)
    (base / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"adapter: its base model cannot be loaded: .*base"):
        load(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported"),
        ({"use_rslora": True}, "use_rslora=True changes what the model computes"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"r": 0}, "r=0: expected a positive integer"),
        ({"r": 5}, "do not fit .*wrong shape"),
        ({"lora_alpha": "x"}, "lora_alpha='x': expected a positive number"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules=.*expected a list of some of q_proj"),
        ({"target_modules": "all-linear"}, "target_modules='all-linear'"),
        ({"target_modules": ["q_proj"]}, "do not fit .*unused"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path=None"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(plain_folder, change, message, tmp_path):
    folder = shutil.copytree(plain_folder, tmp_path / "adapter")
    edit_json(folder / "adapter_config.json", **change)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_an_adapter_of_an_adapter_is_refused(plain_folder, tmp_path):
    folder = shutil.copytree(plain_folder, tmp_path / "adapter")
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(folder))
    with pytest.raises(UserError, match="is an adapter too"):
        load(folder)


def test_an_export_never_replaces_the_adapter_it_reads(plain_folder):
    with pytest.raises(UserError, match="holds the model that is to be exported"):
        export(load(plain_folder), plain_folder, force=True)


def test_a_model_without_update_has_no_adapter_to_export(base, tmp_path):
    with pytest.raises(UserError, match="no low-rank update"):
        export_adapter(load(base), tmp_path / "adapter")
