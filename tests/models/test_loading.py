"""`load` for every kind of path."""

import json

import jax
import numpy as np
import pytest
from helpers import checkpoints
from helpers.paths import TINY_QWEN2
from helpers.runs import save_run
from jax.sharding import AxisType, PartitionSpec

import mars_jax
from mars_jax import load
from mars_jax.errors import UserError
from mars_jax.models.hf_folder import write_metadata
from mars_jax.parallel.rules import parameter_shardings


def test_the_golden_checkpoint():
    model = load(TINY_QWEN2)
    assert (model.cfg.family, model.cfg.num_layers, model.cfg.tie_embeddings) == ("qwen2", 3, True)
    assert (model.mask_id, model.stop_ids) == (3, (2,))
    assert np.flatnonzero(~model.emit_mask).tolist() == [3, 380, 381, 382, 383]
    assert model.hf_folder == TINY_QWEN2
    assert set(model.tensor_dtypes.values()) == {"F32"}


def test_rendered_prompts_are_the_golden_ones():
    """`transformers` splits this family's text by its own code: `tokenizer.json` alone would give other ids."""
    tokenizer = load(TINY_QWEN2).tokenizer
    for case in json.loads((TINY_QWEN2.parent / "decode.json").read_text()):
        rendered = tokenizer.apply_chat_template(case["messages"], add_generation_prompt=True)
        assert rendered["input_ids"] == case["prompt_ids"]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, [5, 2], (2, 5)),
        (2, [2, 5], (2, 5)),
        ([7, 5], 6, (2, 5, 6, 7)),
        (None, None, (2,)),  # the tokenizer's own
        (None, ..., (2,)),
    ],
)
def test_stop_ids_are_the_union_of_all_three_places(tmp_path, config, generation, expected):
    folder = checkpoints.random_checkpoint(tmp_path, "qwen2", eos_token_id=config)
    if generation is not ...:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load(folder).stop_ids == expected


@pytest.mark.parametrize("value", ["</s>", [2, "</s>"], -1, 2.5, {"id": 2}])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, value):
    folder = checkpoints.random_checkpoint(tmp_path, "qwen2", eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id=.*expected a token id or a list"):
        load(folder)


def test_paths_that_hold_no_model(tmp_path):
    for empty in ("", " "):
        with pytest.raises(UserError, match="path is empty"):
            load(empty)
    with pytest.raises(UserError, match="no such file or folder, nor a hub id"):
        load(tmp_path / "absent")
    with pytest.raises(UserError, match="expected a folder or a"):
        (tmp_path / "model.safetensors").touch()
        load(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="neither model"):
        (tmp_path / "empty").mkdir()
        load(tmp_path / "empty")
    folder = checkpoints.random_checkpoint(tmp_path / "no_config", "qwen2")
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        load(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: expected a JSON object"):
        load(folder)
    with pytest.raises(UserError, match=r"step=3: .* not a run's output folder"):
        load(TINY_QWEN2, step=3)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    folder = checkpoints.random_checkpoint(tmp_path, "qwen2")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="holds no tokenizer"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="holds no tokenizer that transformers can load"):
        load(folder)


def test_a_hub_id_without_a_hub_says_so():
    with pytest.raises(UserError, match="the hub cannot be reached"):  # tests/conftest.py sets HF_HUB_OFFLINE
        load("nobody/no-such-model")


def test_a_hub_download_leaves_pickles_and_code_behind(monkeypatch, tmp_path):
    import huggingface_hub

    checkpoints.random_checkpoint(tmp_path / "hub", "qwen2")
    asked = {}

    def snapshot_download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = load("owner/name", revision="v1")
    assert (asked["repository"], asked["revision"], model.cfg.family) == ("owner/name", "v1", "qwen2")
    offered = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
        "LICENSE",
        "pytorch_model.bin",
        "modeling_custom.py",
        "consolidated.safetensors",
        "original/model.safetensors",
        "training_args.bin",
    ]
    filters = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    taken = list(huggingface_hub.utils.filter_repo_objects(offered, **filters))
    assert taken == offered[:6]


def test_a_runs_output_folder(tmp_path):
    source = load(TINY_QWEN2)
    save_run(tmp_path / "run", source, steps=[1, 3])
    latest, first = load(tmp_path / "run"), load(tmp_path / "run", step=1, dtype="bfloat16")
    table = np.asarray(source.params["embedding"]["table"])
    np.testing.assert_array_equal(latest.params["embedding"]["table"], table * 8)
    assert first.params["embedding"]["table"].dtype == "bfloat16"
    np.testing.assert_array_equal(first.params["embedding"]["table"], (table * 2).astype("bfloat16"))
    assert (latest.mask_id, latest.stop_ids, latest.cfg) == (source.mask_id, source.stop_ids, source.cfg)
    assert latest.tensor_dtypes == source.tensor_dtypes
    with pytest.raises(UserError, match="no checkpoint of step 2; there are 1, 3"):
        load(tmp_path / "run", step=2)


def test_a_runs_checkpoint_onto_a_mesh(tmp_path):
    save_run(tmp_path / "run", load(TINY_QWEN2), steps=[1])
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    sharded = load(tmp_path / "run", shardings=lambda cfg: parameter_shardings(cfg, mesh))
    kernel = sharded.params["layers"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert kernel.addressable_shards[0].data.shape == (3, 48, 128)
    jax.tree.map(np.testing.assert_array_equal, sharded.params, load(tmp_path / "run").params)


def test_an_interrupted_save_is_not_the_latest_checkpoint(tmp_path):
    source = load(TINY_QWEN2)
    save_run(tmp_path / "run", source, steps=[1])
    (tmp_path / "run" / "checkpoints" / "2.orbax-checkpoint-tmp-123").mkdir()
    np.testing.assert_array_equal(
        load(tmp_path / "run").params["final_norm"]["scale"], source.params["final_norm"]["scale"] * 2
    )


def test_a_run_without_checkpoints_says_so(tmp_path):
    write_metadata(load(TINY_QWEN2), tmp_path / "run" / "hf")
    with pytest.raises(UserError, match="no checkpoint yet"):
        load(tmp_path / "run")


def test_a_damaged_checkpoint_is_named(tmp_path):
    save_run(tmp_path / "run", load(TINY_QWEN2), steps=[1])
    for path in (tmp_path / "run" / "checkpoints" / "1" / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(UserError, match="checkpoints/1: cannot be read"):
        load(tmp_path / "run")


def test_the_package_offers_load_and_nothing_unknown():
    assert mars_jax.load is load
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = mars_jax.lode
