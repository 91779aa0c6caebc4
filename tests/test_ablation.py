"""The ablation command: what its table says, what it refuses, what it does not run twice."""

import dataclasses
import functools
import json

import jax
import pytest
from helpers.tiny_run import tiny_tree

from mars_jax import ablation
from mars_jax.benchmarks.ablation import (
    VARIANTS,
    Decoding,
    Result,
    decode_options,
    read_result,
    select,
    settings_of,
    write_result,
)
from mars_jax.benchmarks.ablation_report import drafts_taken, spread, table
from mars_jax.config import ObjectiveSection, load_config
from mars_jax.errors import UserError
from mars_jax.training import loop
from mars_jax.training.setup import run_mesh

TREE = Decoding(tokens_per_forward=2.25, acceptance_by_offset=[1.0, 0.75, 0.5], right_answers=0.9, same_as_ar=1.0)
RESULT = Result(
    name="quarter",
    settings={"prompts": 2, "train": {"steps": 20}},
    row_tokens=80,
    tokens_per_step=640,
    trained_tokens_per_step=99.5,
    seconds_per_step=0.125,
    loss_ar=0.25,
    accuracy=[0.97, 0.8, 0.6, None],
    decoding={
        "ar": Decoding(1.0, [1.0], 0.875, 1.0),
        "window": Decoding(1.5, [1.0, 0.5], 0.75, 0.5),
        "tree": TREE,
    },
)


def _run(folder, *arguments):
    ablation.command(ablation.build_parser().parse_args(["--output", str(folder), *arguments]))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_changes_only_what_its_name_says(variant):
    path = ablation.CONFIGS / "ablation_mars.yaml"
    base, cfg = load_config(path), load_config(path, variant.overrides)
    changed = {key for key, value in vars(base.objective).items() if getattr(cfg.objective, key) != value}
    assert changed == {o.split("=")[0].removeprefix("objective.") for o in variant.overrides if "objective" in o}
    train = dataclasses.replace(cfg.train, seed=base.train.seed, steps=base.train.steps)
    assert dataclasses.replace(cfg, objective=base.objective, train=train, lora=base.lora) == base
    assert (cfg.lora != base.lora) == variant.name.startswith("lora")
    assert cfg.lora.mask_gated == (variant.name == "lora_gated")


def test_variants_of_the_same_cost_compute_as_many_tokens_as_mars():
    path = ablation.CONFIGS / "ablation_mars.yaml"
    costs = {}
    for variant in VARIANTS:
        cfg = load_config(path, variant.overrides)
        costs[variant.name] = cfg.train.steps * cfg.objective.stream_config(mask_id=0).length
    assert costs["half_same_cost"] == costs["quarter_same_cost"] == costs["mars"]


def test_labels_keep_their_order_and_their_distance():
    places = spread([3.0, 2.99, 2.98, 1.0, -1.0], lines=8)
    assert places == [3.0, 2.5, 2.0, 1.0, -1.0]


def test_names_are_distinct():
    assert len({variant.name for variant in VARIANTS}) == len({variant.overrides for variant in VARIANTS})


def test_stages_share_data_and_shape():
    ar, mars = (load_config(ablation.CONFIGS / f"ablation_{name}.yaml") for name in ("ar_sft", "mars"))
    assert mars.model.path == ar.output_dir
    assert (mars.data, mars.objective.row_length) == (ar.data, ar.objective.row_length)


@pytest.mark.parametrize(
    ("objective", "widths"),
    [
        (ObjectiveSection(), {"window": 3, "tree": 3}),
        (ObjectiveSection(masks_per_block=4), {"window": 3, "tree": 3, "window_own": 4, "tree_own": 4}),
        (ObjectiveSection(block_size=8), {"window": 3, "tree": 3, "window_own": 7, "tree_own": 7}),
        (ObjectiveSection(recipe="block_diffusion"), {"diffusion": 4}),
    ],
)
def test_variants_are_decoded_at_the_common_and_at_their_own_width(objective, widths):
    options = decode_options(objective)
    assert options.pop("ar") == {"mode": "ar"}
    assert {name: o.get("window", o.get("draft")) for name, o in options.items()} == widths


def test_table_has_the_measured_numbers_and_names_what_is_missing():
    header, _, line, _, missing = table([RESULT]).splitlines()
    cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert cells["| variant"] == "| quarter"
    assert cells["tokens/step"] == "640"
    assert cells["AR loss"] == "0.2500"
    assert cells["AR right"] == "88%"
    assert cells["accuracy at 1 / 2 / 3"] == "80% / 60% / —"
    assert cells["tree took 1 / 2 / 3"] == "75% / 50% / 0%"
    assert cells["tree tok/fwd"] == "2.25"
    assert cells["window tok/fwd"] == "1.50"
    assert "mars_seed1" in missing and "quarter" not in missing.replace(",", "").split()


def test_tokens_per_forward_are_one_and_the_drafts_taken():
    assert 1 + sum(drafts_taken(TREE)) == TREE.tokens_per_forward


def test_results_come_back_from_their_file(tmp_path):
    write_result(RESULT, tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == RESULT
    assert read_result(tmp_path / "other.json") is None


def test_unknown_variant_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match=r"'quater': expected some of ar_sft, mars, .*quarter"):
        _run(tmp_path, "--only", "mars,quater")


def test_variants_come_in_the_order_named():
    assert [variant.name for variant in select(["quarter", "mars"])] == ["quarter", "mars"]
    assert select(None) == list(VARIANTS)


def test_table_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="no variant is finished"):
        _run(tmp_path, "--table")


def _finish(folder, steps: int, prompts: int):
    cfg = load_config(ablation.CONFIGS / "ablation_mars.yaml", [f"train.steps={steps}", f"train.save_every={steps}"])
    (folder / "mars").mkdir()
    result = dataclasses.replace(RESULT, name="mars", settings=settings_of(cfg, prompts))
    write_result(result, folder / "mars" / ablation.RESULT)


def test_finished_variant_is_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mars_jax.benchmarks.ablation.train", lambda cfg: pytest.fail("trained again"))
    _finish(tmp_path, steps=7, prompts=2)
    _run(tmp_path, "--only", "mars", "--steps", "7", "--prompts", "2")
    assert "| mars | 640 |" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "prompts", "what"), [(8, 2, "train"), (7, 3, "prompts")])
def test_finished_variant_of_other_settings_is_refused(tmp_path, steps, prompts, what):
    _finish(tmp_path, steps=7, prompts=2)
    with pytest.raises(UserError, match=rf"other settings \({what}\)"):
        _run(tmp_path, "--only", "mars", "--steps", str(steps), "--prompts", str(prompts))


@pytest.mark.slow
def test_two_variants_from_one_start(tmp_path, monkeypatch, capsys):
    """The whole command on a two-layer model; a second call goes on with what is missing."""
    configs, out = tmp_path / "configs", tmp_path / "out"
    configs.mkdir()
    for name, recipe in (("ar_sft", "ar_sft"), ("mars", "mars")):
        tree = tiny_tree(out, objective={"recipe": recipe, "row_length": 128}, train={"steps": 3, "save_every": 3})
        tree["model"] = {"path": "replaced"} if name == "mars" else tree["model"]
        (configs / f"ablation_{name}.yaml").write_text(json.dumps(tree))
    monkeypatch.setattr(ablation, "CONFIGS", configs)
    # Runs take every device there is; one is enough here.
    monkeypatch.setattr(loop, "run_mesh", functools.partial(run_mesh, devices=jax.devices()[:1]))
    _run(out, "--only", "mars", "--prompts", "4")
    first = (out / "mars" / ablation.RESULT).read_text()
    _run(out, "--only", "mars,half", "--prompts", "4")
    assert (out / "mars" / ablation.RESULT).read_text() == first
    results = {r["name"]: r for r in json.loads((out / "results.json").read_text())["results"]}
    assert results["mars"]["row_tokens"] == 128 + 96 and results["half"]["row_tokens"] == 128 + 64
    for result in results.values():
        assert result["decoding"]["tree"]["same_as_ar"] == 1  # exact, however little was learned
        assert len(result["accuracy"]) == 9 and result["loss_ar"] > 0
    assert (out / "ablation.png").stat().st_size > 1000
    assert (out / "table.md").read_text().count("\n| ") == 3
