"""Every command that the pages show, in its dry form."""

import importlib
import re
import shlex

import pytest
from helpers.commands import ROOT, launch

from mars_jax.config import load_config

PAGES = ("laptop", "one_gpu", "tpu_vm", "gke", "slurm", "reproduce")
PAPER = sorted((ROOT / "configs/paper").glob("*.yaml"))


def commands(page: str) -> list[list[str]]:
    """The words of each command in the page's bash blocks, without leading assignments."""
    text = (ROOT / f"docs/{page}.md").read_text()
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
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


def test_no_command_is_left_out():
    for page in PAGES:
        for words in commands(page):
            known = words[0].startswith("launch/") or words[:2] == ["python", "-m"] or words[0] in ("docker", "kill")
            assert known or (words[:1] == ["python"] and words[1].startswith("launch/")), words
    assert len(SCRIPTS) > 20


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


@pytest.mark.parametrize("words", all_commands("python", "-m"))
def test_python_commands_have_options_that_exist(words):
    module = importlib.import_module(words[2])
    build = getattr(module, "build_parser", None) or module.build
    args = build().parse_args(words[3:])  # exits where an option or value is wrong
    if words[2] == "mars_jax.train":
        load_config(ROOT / args.config, args.overrides)


@pytest.mark.parametrize("words", all_commands("docker", "build"))
def test_images_are_built_with_an_extra_that_the_dockerfile_knows(words):
    extra = words[words.index("--build-arg") + 1].removeprefix("EXTRA=")
    assert f"{extra}) extra=" in (ROOT / "Dockerfile").read_text()


def test_every_row_of_the_paper_has_a_config_on_the_page():
    page = (ROOT / "docs/reproduce.md").read_text()
    named = {f"configs/paper/{path.name}" for path in PAPER}
    assert named == set(re.findall(r"^\|.*`(configs/paper/[^`]+)`", page, re.M))
    assert len(named) == 11


def test_the_chip_hours_follow_from_their_row():
    page = (ROOT / "docs/reproduce.md").read_text()
    row = r"^\| `(\w+\.yaml)` \| \S+, (\d+) chips \|.*\| ([\d.]+) s \| (\d+) \| ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row, page, re.M)
    assert rows
    for name, chips, seconds, steps, hours, chip_hours in rows:
        epochs = load_config(ROOT / "configs/paper" / name).train.epochs
        assert int(steps) == epochs * (2_000_000 // 384)
        assert float(hours) == pytest.approx(int(steps) * float(seconds) / 3600, abs=0.1)
        assert int(chip_hours) == pytest.approx(float(hours) * int(chips), rel=0.01)


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
