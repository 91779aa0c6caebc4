"""Running the launch scripts against tools that only record what they are asked, and answer on cue."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("gcloud", "kubectl", "xpk", "gcluster", "sbatch", "squeue", "srun", "scontrol", "nvidia-smi", "docker")

# Stands for every tool. `rules.json` lists answers: the first rule whose pattern is found in the command line and
# whose `times` are not used up answers with its output, after its delay, with its exit code.
FAKE_TOOL = """#!{python} -SE
import fcntl, json, pathlib, re, shlex, sys, time
folder = pathlib.Path(__file__).resolve().parent
line = shlex.join([pathlib.Path(__file__).name, *sys.argv[1:]])
stdin = "" if sys.stdin.isatty() or "--filename=-" not in line else sys.stdin.read()
with open(folder / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(folder / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({{"line": line, "stdin": stdin}}) + "\\n")
    rules = json.loads((folder / "rules.json").read_text())
    answer = None
    for rule in rules:
        if re.search(rule["pattern"], line) and rule["times"] != 0:
            rule["times"] -= 1
            answer = rule
            break
    (folder / "rules.json").write_text(json.dumps(rules))
if answer:
    time.sleep(answer["delay"])
    sys.stdout.write(answer["output"])
    sys.stderr.write(answer["error"])
    sys.exit(answer["code"])
"""


@dataclass(frozen=True)
class FakeTools:
    """A folder on PATH with the fake tools; `calls` are the command lines they were given, in order."""

    folder: Path

    def rule(
        self, pattern: str, output: str = "", *, error: str = "", code: int = 0, times: int = -1, delay: float = 0
    ):
        """Answer commands that match `pattern`, `times` times (-1: always). Earlier rules come first."""
        rules = json.loads((self.folder / "rules.json").read_text())
        rules.append(
            {"pattern": pattern, "output": output, "error": error, "code": code, "times": times, "delay": delay}
        )
        (self.folder / "rules.json").write_text(json.dumps(rules))

    def records(self) -> list[dict]:
        log = self.folder / "calls.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def calls(self) -> list[str]:
        return [record["line"] for record in self.records()]

    def matching(self, *patterns: str) -> list[str]:
        """Which of `patterns` the calls contain, call by call: the story of a run in few words."""
        return [pattern for call in self.calls() for pattern in patterns if pattern in call]


def make_fake_tools(folder: Path) -> FakeTools:
    folder.mkdir(parents=True)
    for tool in TOOLS:
        (folder / tool).write_text(FAKE_TOOL.format(python=sys.executable))
        (folder / tool).chmod(0o755)
    (folder / "rules.json").write_text("[]")
    return FakeTools(folder)


def environment(tools: FakeTools | None = None, **extra: str) -> dict[str, str]:
    """PATH with the fakes in front, so that no test can reach a real cloud tool of this machine."""
    path = f"{tools.folder}:/usr/bin:/bin" if tools else os.environ["PATH"]
    return os.environ | {"PATH": path, "PYTHON": sys.executable} | extra


def launch(script: str, *arguments: str, tools: FakeTools | None = None, timeout: float = 60, **extra: str):
    """Run `launch/SCRIPT ARGUMENTS…` from the repository root; returns the CompletedProcess with text output."""
    python = [sys.executable] if script.endswith(".py") else []  # with this interpreter's packages
    return subprocess.run(
        [*python, ROOT / "launch" / script, *arguments],
        cwd=ROOT,
        env=environment(tools, **extra),
        text=True,
        capture_output=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
