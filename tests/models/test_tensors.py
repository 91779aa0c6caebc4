"""Tensors in files to arrays on devices: exactly those expected, everything wrong said at once, slices only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import checkpoints
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mars_jax import load
from mars_jax.errors import UserError
from mars_jax.models.families import EMBEDDING, HEAD, model_config
from mars_jax.models.parameters import is_spec, parameter_specs
from mars_jax.models.tensors import SafetensorsFolder, read_parameters


@pytest.fixture
def config():
    return checkpoints.config_of("qwen2")


@pytest.fixture
def tensors(config):
    return checkpoints.random_tensors(config)


def assert_same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_layers_are_stacked_and_matrices_turned(tmp_path, config, tensors):
    params = load(checkpoints.write(tmp_path, config, tensors)).params
    query = params["layers"]["attention"]["query"]
    for i in range(3):
        np.testing.assert_array_equal(query["kernel"][i], tensors[f"model.layers.{i}.self_attn.q_proj.weight"].T)
        np.testing.assert_array_equal(query["bias"][i], tensors[f"model.layers.{i}.self_attn.q_proj.bias"])
    np.testing.assert_array_equal(params["embedding"]["table"], tensors[EMBEDDING])


def test_shards_give_what_one_file_gives(tmp_path, config, tensors):
    one = load(checkpoints.write(tmp_path / "one", config, tensors))
    many = load(checkpoints.write(tmp_path / "many", config, tensors, shards=3))
    assert_same(one.params, many.params)


def test_a_redundant_head_must_equal_the_tied_embedding(tmp_path, config, tensors):
    tied = load(checkpoints.write(tmp_path / "tied", config, tensors))
    redundant = {**tensors, HEAD: tensors[EMBEDDING]}
    assert_same(load(checkpoints.write(tmp_path / "redundant", config, redundant)).params, tied.params)
    other = tensors[EMBEDDING].copy()
    other[-1, -1] += 1
    with pytest.raises(UserError, match=r"lm_head.weight differs from the embedding .* tie_word_embeddings"):
        load(checkpoints.write(tmp_path / "other", config, {**tensors, HEAD: other}))


def test_an_untied_head_is_read(tmp_path):
    config = checkpoints.config_of("llama")
    tensors = checkpoints.random_tensors(config)
    params = load(checkpoints.write(tmp_path, config, tensors)).params
    np.testing.assert_array_equal(params["head"]["kernel"], tensors[HEAD].T)


def test_every_problem_is_named_at_once(tmp_path, config, tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(48, np.float32)
    tensors["model.layers.2.input_layernorm.weight"] = np.zeros(47, np.float32)
    tensors["model.layers.2.mlp.down_proj.weight"] = np.zeros((48, 80), np.int8)
    with pytest.raises(UserError) as error:
        load(checkpoints.write(tmp_path, config, tensors))
    message = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "unused: model.layers.0.self_attn.o_proj.bias" in message
    assert "model.layers.2.input_layernorm.weight is (47,), expected (48,)" in message
    assert "model.layers.2.mlp.down_proj.weight is I8" in message


def test_rotary_buffers_of_old_exporters_are_no_error(tmp_path, config, tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    load(checkpoints.write(tmp_path, config, tensors))


def test_folders_without_readable_weights(tmp_path, config, tensors):
    folder = checkpoints.write(tmp_path, config, tensors, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"lists model-00002-of-00002\.safetensors, which are not there"):
        load(folder)
    for damaged, message in (("{", "not valid JSON"), ("{}", "no weight_map"), ("[]", "expected a JSON object")):
        (folder / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(UserError, match=rf"model\.safetensors\.index\.json: {message}"):
            load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match="neither model"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load(folder)


def test_dtype_of_the_parameters(tmp_path, config, tensors):
    folder = checkpoints.write(tmp_path, config, tensors)
    params = load(folder, dtype=jnp.bfloat16).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert_same(params, jax.tree.map(lambda a: a.astype(jnp.bfloat16), load(folder).params))


class CountingSource(SafetensorsFolder):
    """Notes how many values each read fetches."""

    def __init__(self, folder):
        super().__init__(folder)
        self.reads = {name: [] for name in self.shapes()}

    def read(self, name, index):
        values = super().read(name, index)
        self.reads[name].append(values.size)
        return values


def test_each_device_slice_is_read_alone_and_once(tmp_path, config, tensors):
    folder = checkpoints.write(tmp_path, config, tensors)
    cfg = model_config(config)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    rules = {"embed": "fsdp", "mlp": "tensor", "heads": "tensor", "kv_heads": "tensor", "vocab": "tensor"}
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in spec.axes))),
        parameter_specs(cfg),
        is_leaf=is_spec,
    )
    source = CountingSource(folder)
    params = read_parameters(cfg, source, dtype=jnp.float32, shardings=shardings)
    assert_same(params, load(folder).params)
    assert params["layers"]["mlp"]["up"]["kernel"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    # Two copies lie along "data", but each of the four slices is fetched once.
    assert source.reads["model.layers.0.mlp.up_proj.weight"] == [80 * 48 // 4] * 4
    assert source.reads["model.layers.2.self_attn.k_proj.bias"] == [16 // 2] * 2
    assert source.reads["model.norm.weight"] == [48]


def test_load_asks_for_shardings_once_the_architecture_is_known(tmp_path, config, tensors):
    device = jax.devices()[3]

    def shardings(cfg):
        assert cfg.hidden_size == 48
        alone = jax.sharding.SingleDeviceSharding(device)
        return jax.tree.map(lambda _: alone, parameter_specs(cfg), is_leaf=is_spec)

    params = load(checkpoints.write(tmp_path, config, tensors), shardings=shardings).params
    assert {leaf.devices().pop() for leaf in jax.tree.leaves(params)} == {device}
