"""Configuration: what is read, and what is refused with which words."""

import pytest
from helpers.paths import REPOSITORY

from mars_jax.config import dump_config, load_config
from mars_jax.errors import UserError

SMALL = """
output_dir: runs/x
model: {path: somewhere}
data: {path: chats.jsonl}
train: {steps: 10}
optimizer: {learning_rate: 5e-6}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"

    def write(text=SMALL):
        path.write_text(text)
        return path

    return write


def test_reads_sections_and_defaults(config):
    cfg = load_config(config())
    assert cfg.optimizer.learning_rate == 5e-6  # plain YAML reads this as text
    assert (cfg.data.path, cfg.train.steps, cfg.objective.recipe, cfg.mesh.data) == ("chats.jsonl", 10, "mars", -1)


def test_overrides_replace_and_extend(config):
    overrides = ["train.steps=20", "data.path=other.jsonl", "objective.block_size=8", "logging.profile_steps=[2,4]"]
    cfg = load_config(config(), overrides)
    assert (cfg.train.steps, cfg.data.path, cfg.objective.block_size) == (20, "other.jsonl", 8)
    assert cfg.logging.profile_steps == (2, 4)


def test_two_spellings_of_the_same_updates_are_the_same_model(config):
    first, second = (
        load_config(config(), ["lora.rank=4", "lora.alpha=2", f"lora.targets={targets}"]).lora.lora(mask_id=3)
        for targets in ("[down,q]", "[q,down]")
    )
    assert first == second
    assert (first.targets, first.scale, first.gate) == (("query", "down"), 0.5, None)
    assert load_config(config()).lora.lora(mask_id=3) is None
    assert load_config(config(), ["lora.rank=4", "lora.mask_gated=true"]).lora.lora(mask_id=3).gate == 3


def test_is_frozen(config):
    with pytest.raises(AttributeError):
        load_config(config()).train.steps = 3


def test_printed_configuration_reads_back(config):
    cfg = load_config(config(), ["train.global_batch=4", "model.path=null", *SCRATCH])
    assert load_config(config(dump_config(cfg))) == cfg


SCRATCH = [
    f"model.scratch.{key}"
    for key in (
        "vocab_size=300",
        "hidden_size=32",
        "intermediate_size=48",
        "num_layers=2",
        "num_heads=4",
        "num_kv_heads=2",
    )
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stepz=20"], r"train\.stepz is not a known key; did you mean train\.steps\?"),
        (["optimizer.lr=1"], r"optimizer\.lr is not a known key; known: optimizer\.learning_rate"),
        (["train.learning_rate=1"], r"train\.learning_rate is not .*; did you mean optimizer\.learning_rate\?"),
        (["trian.steps=1"], r"trian is not a known key; did you mean train\?"),
        (["data.pth=x"], r"data\.pth is not a known key; did you mean data\.path\?"),
        (["model.scratch.hiden_size=4"], r"model\.scratch\.hiden_size is not a known key; did you mean"),
        (["train.steps=many"], r"train\.steps=many: .*integer"),
        (["train.steps=true"], r"train\.steps=True: .*integer"),
        (["train.steps=1.5"], r"train\.steps=1\.5: .*integer"),
        (["data.path=7"], r"data\.path=7: .*string"),
        (["objective.recipe=marz"], r"objective\.recipe=marz: .*'mars'"),
        (["train.epochs=2"], r"train: give exactly one of train\.steps and train\.epochs"),
        (SCRATCH, r"model: give exactly one of model\.path and model\.scratch"),
        (["objective.masks_per_block=2"], r"masks_per_block=2 must be block_size-1=3"),
        (["objective.block_fraction=0"], r"block_fraction=0.* must lie in"),
        (["train.accumulation=3"], r"global_batch=8 is not a multiple of accumulation=3"),
        (["train.keep_best=loss"], r"keep_best=loss needs .*eval_every"),
        (["lora.rank=-1"], r"lora: rank=-1 must be at least 0"),
        (["lora.rank=4", "lora.alpha=0"], r"alpha=0\.0 must be positive"),
        (["lora.rank=4", "lora.targets=[q,w]"], r"lora\.targets\.1=w: .*'gate'"),
        (["lora.rank=4", "lora.targets=[]"], r"targets=\[\] must name some matrices"),
        (["lora.rank=4", "lora.targets=[q,q]"], r"targets=\['q', 'q'\] .* each once"),
        (["lora.mask_gated=true"], r"mask_gated=true .* give their rank"),
        (["lora.rank=4", "model.path=null", *SCRATCH], r"lora\.rank=4 adapts a trained model: give model\.path"),
        (
            ["lora.rank=4", "lora.mask_gated=true", "objective.recipe=ar_sft"],
            r"mask_gated=true trains placeholders alone, and objective\.recipe=ar_sft has none",
        ),
        (["train.steps"], r"'train\.steps' is not of the form key\.path=value"),
        (["train=5"], r"train=5"),
        (["output_dir=''"], r"output_dir is empty"),
        (["train.steps=0"], r"steps=0 must be at least 1"),
        (["train.seed=-1"], r"seed=-1 must be at least 0"),
        (["train.eval_every=-1"], r"eval_every=-1 must be at least 0"),
        (["optimizer.learning_rate=-1"], r"learning_rate=-1.0 must be at least 0"),
        (["optimizer.learning_rate=.nan"], r"learning_rate=nan must be"),
        (["optimizer.b1=2"], r"b1=2.0 must lie in"),
        (["optimizer.clip_norm=0"], r"clip_norm=0.0 must be positive"),
        (["objective.row_length=0"], r"row_length=0 must be at least 2"),
        (["objective.noisy_length=0"], r"noisy_length=0 must be at least 1"),
        (["objective.logits_chunk=0"], r"logits_chunk=0 must be at least 1"),
        (["objective.ar_weight=-1"], r"ar_weight=-1.0 must be at least 0"),
        (["objective.offset_weights=[.nan]"], r"offset_weights=.*must be finite"),
        (["schedule.final_ratio=-1"], r"final_ratio=-1.0 must lie in"),
        (["logging.every=0"], r"every=0 must be at least 1"),
        (["logging.profile_steps=[5,2]"], r"profile_steps=.* must be a first and a last step"),
        (["[=1"], r"with \['\[=1'\]"),
    ],
)
def test_refuses_by_name(config, overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(config(), overrides)


def test_names_missing_keys_and_files(config, tmp_path):
    with pytest.raises(UserError, match="output_dir is missing"):
        load_config(config("model: {path: x}\ndata: {}\ntrain: {steps: 1}"))
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match=r"run\.yaml"):
        load_config(config("a: [1\nb: 2"))
    with pytest.raises(UserError, match="expected sections"):
        load_config(config("- 1"))


def test_streams_follow_the_objective(config):
    within = load_config(config(), ["objective.row_length=128"]).objective.stream_config(mask_id=9)
    assert (within.masks_per_block, within.noisy_length, within.mask_id) == (3, 96, 9)
    shifted = load_config(config(), ["objective.row_length=128", "objective.masks_per_block=4"]).objective
    assert shifted.stream_config(9).noisy_length == 128
    sampled = load_config(config(), ["objective.row_length=128", "objective.block_fraction=0.25"]).objective
    assert sampled.stream_config(9).noisy_length == 32  # room for 8 of the 32 blocks
    sft = load_config(config(), ["objective.recipe=ar_sft"]).objective
    assert sft.stream_config(9).noisy_length == 0


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid(path):
    load_config(path)
