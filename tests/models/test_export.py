"""Export: what goes in comes out bit for bit, and plain `transformers` computes the same with it."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import transformers
from helpers import checkpoints
from helpers.forward import causal_logits, random_tokens
from helpers.paths import TINY_QWEN2
from helpers.runs import save_run
from safetensors.numpy import load_file

from mars_jax import load
from mars_jax.errors import UserError
from mars_jax.models.export import export
from mars_jax.models.families import EMBEDDING, HEAD

BF16 = np.dtype(ml_dtypes.bfloat16)


def read_all(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same_tensors(folder, other):
    ours, theirs = read_all(folder), read_all(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert ours[name].tobytes() == tensor.tobytes(), name


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama_biases", "smollm2", "qwen2", "qwen3"])
def test_round_trip_is_bit_equal(variant, dtype, tmp_path):
    config = checkpoints.config_of(variant, dtype=np.dtype(dtype).name)
    source = checkpoints.write(tmp_path / "source", config, checkpoints.random_tensors(config, dtype=dtype))
    first = export(load(source), tmp_path / "first")
    assert_same_tensors(first, source)
    assert json.loads((first / "config.json").read_text()) == config
    second = export(load(first), tmp_path / "second")
    assert contents(second) == contents(first)


def test_names_and_mixed_types_of_the_source_are_kept(tmp_path):
    """A redundant head is written again, and norms that the source stores in float32 stay so."""
    config = checkpoints.config_of("qwen2")
    tensors = checkpoints.random_tensors(config)
    tensors = {name: t if "norm" in name else t.astype(BF16) for name, t in tensors.items()}
    tensors[HEAD] = tensors[EMBEDDING]
    source = checkpoints.write(tmp_path / "source", config, tensors)
    assert_same_tensors(export(load(source), tmp_path / "out"), source)


def test_matrices_are_written_as_they_are_read_not_as_they_lie(tmp_path):
    """Our matrices are transposed views when written; a writer that ignored strides would write other numbers."""
    source = checkpoints.random_checkpoint(tmp_path / "source", "llama")
    model = load(source)
    name = "model.layers.1.mlp.up_proj.weight"
    written = read_all(export(model, tmp_path / "out"))[name]
    np.testing.assert_array_equal(written, np.asarray(model.params["layers"]["mlp"]["up"]["kernel"])[1].T)


@pytest.mark.parametrize("variant", ["llama", "llama3", "qwen3"])
def test_transformers_gives_the_same_logits(variant, tmp_path):
    model = load(checkpoints.random_checkpoint(tmp_path / "source", variant))
    changed = jax.tree.map(lambda a: a * 1.01, model.params)
    out = export(dataclasses.replace(model, params=changed), tmp_path / "out", max_shard_size=40_000)
    assert len(list(out.glob("model-*.safetensors"))) > 3
    tokens = random_tokens(384, 100)
    _, expected = checkpoints.reference(out)(tokens)
    np.testing.assert_allclose(causal_logits(changed, model.cfg, tokens), expected, atol=1e-3)


def test_shards_have_an_index_and_are_no_larger_than_asked(tmp_path):
    source = checkpoints.random_checkpoint(tmp_path / "source", "llama")
    out = export(load(source), tmp_path / "out", max_shard_size="100KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = read_all(source)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for file in set(index["weight_map"].values()):
        assert (out / file).stat().st_size < 110_000
    assert_same_tensors(out, source)


def test_a_chosen_dtype_is_recorded(tmp_path):
    source = checkpoints.random_checkpoint(tmp_path / "source", "qwen2")
    out = export(load(source), tmp_path / "out", dtype="bfloat16")
    assert {t.dtype for t in read_all(out).values()} == {BF16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    checkpoints.edit_json(source / "config.json", dtype=..., torch_dtype="float32")
    out = export(load(source), tmp_path / "out", dtype="float16")
    config = json.loads((out / "config.json").read_text())
    assert (config["torch_dtype"], "dtype" in config) == ("float16", False)


def test_values_beyond_float16_are_refused(tmp_path):
    config = checkpoints.config_of("qwen2")
    tensors = checkpoints.random_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e5
    model = load(checkpoints.write(tmp_path / "source", config, tensors))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds values that float16 cannot"):
        export(model, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_from_a_run_with_another_chat_template(tmp_path):
    """Everything but the weights travels through the run's folder."""
    model = load(TINY_QWEN2)
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    model.tokenizer.chat_template = template
    save_run(tmp_path / "run", model, steps=[2], scale=0.5)
    out = export(load(tmp_path / "run"), tmp_path / "out")

    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == template
    assert (out / "chat_template.jinja").read_text() == template
    messages = [{"role": "user", "content": "List: red, blue."}]
    plain = transformers.AutoTokenizer.from_pretrained(out)
    assert plain.apply_chat_template(messages) == model.tokenizer.apply_chat_template(messages)
    assert (out / "config.json").read_bytes() == (TINY_QWEN2 / "config.json").read_bytes()
    source = load_file(TINY_QWEN2 / "model.safetensors")
    for name, tensor in read_all(out).items():
        np.testing.assert_array_equal(tensor, source[name] / 4)
    assert not (out / "source_tensors.json").exists()


def test_a_new_mask_token_is_recorded(tmp_path):
    """On a free row of the embedding: in the tokenizer's vocabulary and as its mask token."""
    source = checkpoints.random_checkpoint(tmp_path / "source", "llama")
    free = load(source, mask_token="<hole>")
    assert free.mask_id == 380
    out = export(free, tmp_path / "out")
    plain = transformers.AutoTokenizer.from_pretrained(out)
    assert (plain.mask_token, plain.mask_token_id, len(plain)) == ("<hole>", 380, 381)
    text = "List: red<hole>, blue."
    assert plain.encode(text) == free.tokenizer.encode(text)
    assert 380 in plain.encode(text)
    assert plain.decode([380, 5], skip_special_tokens=True) == plain.decode([5])
    again = load(out)
    assert again.mask_id == 380
    assert (again.emit_mask == free.emit_mask).all()
    assert contents(export(again, tmp_path / "again")) == contents(out)


def test_an_existing_token_as_mask_is_recorded_in_every_file(tmp_path):
    """Older tokenizers keep their special tokens in three more places."""
    source = checkpoints.random_checkpoint(tmp_path / "source", "llama")
    plain = transformers.AutoTokenizer.from_pretrained(source)
    decoder = {str(i): {"content": plain.convert_ids_to_tokens(i), "special": True} for i in range(4)}
    checkpoints.edit_json(source / "tokenizer_config.json", added_tokens_decoder=decoder, mask_token=...)
    (source / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    token = plain.convert_ids_to_tokens(300)
    out = export(load(source, mask_token=token), tmp_path / "out")
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["mask_token"] == token
    assert config["added_tokens_decoder"]["300"]["content"] == token
    assert json.loads((out / "special_tokens_map.json").read_text())["mask_token"] == token
    reloaded = transformers.AutoTokenizer.from_pretrained(out)
    assert (reloaded.mask_token_id, len(reloaded)) == (300, len(plain))


def test_generation_config_and_licences_are_carried(tmp_path):
    source = checkpoints.random_checkpoint(tmp_path / "source", "qwen2")
    generation = {"eos_token_id": [2, 7], "temperature": 0.3, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "LICENSE").write_text("terms")
    (source / "modeling_custom.py").write_text("raise SystemExit")
    out = export(load(source), tmp_path / "out")
    assert json.loads((out / "generation_config.json").read_text()) == generation
    assert (out / "LICENSE").read_text() == "terms"
    assert not (out / "modeling_custom.py").exists()


@pytest.mark.parametrize(("config_ids", "expected"), [(2, 2), ([2, 7], [2, 7])])
def test_a_missing_generation_config_is_made(tmp_path, config_ids, expected):
    source = checkpoints.random_checkpoint(tmp_path / "source", "qwen2", eos_token_id=config_ids)
    out = export(load(source), tmp_path / "out")
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (expected, 0)


def test_a_tokenizer_without_tokenizer_json_is_converted(tmp_path):
    """GPT-2 style `vocab.json` and `merges.txt` only."""
    source = checkpoints.random_checkpoint(tmp_path / "source", "qwen2")
    described = json.loads((source / "tokenizer.json").read_text())
    (source / "vocab.json").write_text(json.dumps(described["model"]["vocab"]))
    (source / "merges.txt").write_text("\n".join(" ".join(merge) for merge in described["model"]["merges"]))
    (source / "tokenizer.json").unlink()
    checkpoints.edit_json(source / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    model = load(source)
    out = export(model, tmp_path / "out")
    plain = transformers.AutoTokenizer.from_pretrained(out)
    text = "List: red, blue.<|im_end|>"
    assert plain.encode(text) == model.tokenizer.encode(text)
    assert plain.mask_token_id == model.mask_id
    assert plain.chat_template == model.tokenizer.chat_template


def test_stale_shards_of_an_earlier_export_go(tmp_path):
    model = load(TINY_QWEN2)
    out = export(model, tmp_path / "out", max_shard_size=200_000)
    assert len(list(out.glob("model-*"))) > 1
    export(model, out)
    assert sorted(p.name for p in out.glob("model*")) == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "temporary folders are gone"


def test_what_is_not_an_export_is_not_overwritten(tmp_path):
    model = load(TINY_QWEN2)
    out = export(model, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(UserError, match=r"files that no export of ours wrote \(notes\.txt\)"):
        export(model, out)
    assert contents(out) == before
    export(model, out, force=True)
    assert not (out / "notes.txt").exists()

    foreign = tmp_path / "foreign"
    shutil.copytree(TINY_QWEN2, foreign)
    with pytest.raises(UserError, match="no export of ours"):
        export(model, foreign)
    with pytest.raises(UserError, match="holds the model that is to be exported"):
        export(load(foreign), foreign, force=True)
    run = save_run(tmp_path / "run", model, steps=[1])
    with pytest.raises(UserError, match="holds the model that is to be exported"):
        export(load(run), run, force=True)
    with pytest.raises(UserError, match="is a file"):
        export(model, out / "config.json")
    (tmp_path / "empty").mkdir()
    export(model, tmp_path / "empty")


def test_a_failed_export_leaves_the_old_one(tmp_path, monkeypatch):
    model = load(TINY_QWEN2)
    out = export(model, tmp_path / "out")
    before = contents(out)

    def full_disk(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mars_jax.models.export.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export(model, out)
    assert contents(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
