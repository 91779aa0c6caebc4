"""Every command that the pages show, in its dry form."""

import importlib
import json
import math
import re
import shlex
from types import SimpleNamespace

import pytest
from helpers.commands import ROOT, launch

from mars_jax.config import load_config
from mars_jax.evaluation.paper import ABLATION, MAIN
from mars_jax.models.families import model_config
from mars_jax.parallel.rules import check_divisible

ROADS = ("laptop", "one_gpu", "tpu_vm", "gke", "slurm", "reproduce")
PAGES = {path.stem: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
PAPER = sorted((ROOT / "configs/paper").glob("*.yaml"))
ROWS = 2_000_000  # chats of an epoch in the page's estimates


def code_lines(page: str) -> list[str]:
    """The lines of the page's shell blocks: fenced, or indented."""
    fence, lines = None, []
    for line in PAGES[page].read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fence = line[3:] if fence is None else None
        elif fence in ("", "bash") or (fence is None and line.startswith("    ")):
            lines.append(line.strip())
    return lines


def commands(page: str) -> list[list[str]]:
    """The words of each command of Python, launch/ and docker, without leading assignments."""
    found = []
    for line in code_lines(page):
        if re.match(r"(python|launch/|docker|[A-Z_]+=)", line):
            words = shlex.split(line)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            found.append(words)
    return found


def all_commands(*first: str) -> list:
    chosen = [(page, words) for page in PAGES for words in commands(page) if tuple(words[: len(first)]) == first]
    return [pytest.param(words, id=f"{page}: {' '.join(words)[:60]}") for page, words in chosen]


SCRIPTS = [
    pytest.param(words[1:] if words[0] == "python" else words, id=f"{page}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in commands(page)
    if any(word.startswith("launch/") for word in words[:2])
]
MODULES = [parameter for parameter in all_commands("python", "-m") if parameter.values[0][2].startswith("mars_jax.")]


def test_no_command_of_a_road_is_left_out():
    for page in ROADS:
        left_out = len(code_lines(page)) - len(commands(page))
        assert left_out == sum(line.startswith("kill ") for line in code_lines(page)), page
    assert len(SCRIPTS) > 20 and len(MODULES) > 25


@pytest.mark.parametrize("words", SCRIPTS)
def test_launch_commands_run_dry(words, tools):
    script, *arguments = words
    if "--dry-run" not in arguments:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        arguments.insert(end, "--dry-run")
    result = launch(script.removeprefix("launch/"), *arguments, tools=tools)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert tools.calls() == []
    if "--estimate" in words:
        assert "mars_jax.estimate" in result.stdout


@pytest.mark.parametrize("words", MODULES)
def test_python_commands_have_options_that_exist(words):
    module = importlib.import_module(words[2])
    build = getattr(module, "build_parser", None) or module.build
    args = build().parse_args(words[3:])  # exits where an option or value is wrong
    if getattr(args, "config", None) is not None:
        load_config(ROOT / args.config, args.overrides)
    if getattr(args, "architecture", None) is not None:
        assert (ROOT / args.architecture).is_file()


@pytest.mark.parametrize("words", all_commands("docker", "build"))
def test_images_are_built_with_an_extra_that_the_dockerfile_knows(words):
    extra = words[words.index("--build-arg") + 1].removeprefix("EXTRA=")
    assert f"{extra}) extra=" in (ROOT / "Dockerfile").read_text()


def test_every_row_of_the_paper_has_a_config_on_the_page():
    page = (ROOT / "docs/reproduce.md").read_text()
    named = {f"configs/paper/{path.name}" for path in PAPER}
    assert named == set(re.findall(r"^\|.*`(configs/paper/[^`]+)`", page, re.M))
    assert len(named) == 11


def test_every_line_of_the_papers_tables_has_its_evaluation():
    """Block Diffusion apart, which is decoded in a way of its own."""
    lines = {(row.size, row.label, row.mode) for row in (*MAIN, *ABLATION) if row.mode != "block diffusion"}
    shown = set()
    for words in commands("reproduce"):
        if words[2:3] == ["mars_jax.evaluate"]:
            args = importlib.import_module("mars_jax.evaluate").build_parser().parse_args(words[3:])
            size = re.search(r"0p5b|7b|0\.5B|7B", args.model)[0].upper().replace("P", ".")
            shown.add((size, args.label, "ar" if args.mode == "ar" else f"τ={args.tau:g}"))
    assert {line for line in shown if not line[1].startswith("Block Diffusion")} == lines


def test_the_chip_hours_follow_from_their_row():
    page = (ROOT / "docs/reproduce.md").read_text()
    row = r"^\| `(\w+\.yaml)` \| (\S+), (\d+) chips \|.*\| ([\d.]+) s \| (\d+) \| ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row, page, re.M)
    assert {name for name, *_ in rows} == {path.name for path in PAPER}
    for name, topology, chips, seconds, steps, hours, chip_hours in rows:
        epochs = load_config(ROOT / "configs/paper" / name).train.epochs
        assert int(chips) == chips_of(topology)
        assert int(steps) == math.ceil(epochs * ROWS / 384)
        assert float(hours) == pytest.approx(int(steps) * float(seconds) / 3600, abs=0.1)
        assert int(chip_hours) == pytest.approx(int(steps) * float(seconds) / 3600 * int(chips), rel=0.02)


def chips_of(topology: str) -> int:
    return math.prod(int(side) for side in topology.partition(":")[2].split("x"))


LARGE = sorted((ROOT / "configs").rglob("*7b_*.yaml"))


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_large_config_names_a_slice_that_its_mesh_fits(path):
    """Its first comment has the command that compiled it there, and what that said."""
    comment = path.read_text().partition("output_dir:")[0].replace("# ", "").replace("\\\n", " ")
    words = shlex.split(re.search(r"python -m mars_jax\.compile .*", comment)[0])
    args = importlib.import_module("mars_jax.compile").build_parser().parse_args(words[3:])
    assert ROOT / args.config == path
    cfg = load_config(path)
    chips = chips_of(args.topology)
    fsdp, tensor = chips // cfg.mesh.tensor, cfg.mesh.tensor
    assert re.search(rf"{chips} chips as fsdp {fsdp} x tensor {tensor}: [\d.]+ of \d+ GiB", comment), comment
    assert cfg.train.global_batch % fsdp == 0
    mesh = SimpleNamespace(shape={"data": 1, "fsdp": fsdp, "tensor": tensor})
    check_divisible(model_config(json.loads((ROOT / args.architecture).read_text())), mesh)


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_configs_are_the_papers_recipe(path):
    cfg = load_config(path)
    assert (cfg.train.global_batch, cfg.objective.row_length, cfg.data.pack) == (384, 512, False)
    assert (cfg.optimizer.learning_rate, cfg.schedule.warmup_ratio, cfg.objective.ar_weight) == (5e-6, 0.03, 1.0)
    assert cfg.train.epochs == (10 if path.stem.endswith("10ep") else 5)
    assert cfg.objective.block_fraction == 1.0
    size, _, row = path.stem.partition("_")
    if row.startswith("ar_sft"):
        assert cfg.objective.recipe == "ar_sft"
        assert cfg.model.path == {"0p5b": "Qwen/Qwen2.5-0.5B-Instruct", "7b": "Qwen/Qwen2.5-7B-Instruct"}[size]
    else:
        recipe, block = re.fullmatch(r"(\w+)_b(\d+)", row).groups()
        assert (cfg.objective.recipe, cfg.objective.block_size) == (recipe, int(block))
        assert cfg.model.path == f"runs/paper/{size}_ar_sft"
    assert cfg.output_dir == f"runs/paper/{path.stem}"
