"""A stand-in for `python -m mars_jax.train`: counts steps in a file, saves on SIGTERM, fails on cue.

Written to a folder as an executable; PYTHON names it, so the launch scripts start it in the trainer's place.
"""

import sys
from pathlib import Path

STUB = """#!{python}
import json, os, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
me = os.environ.get("MARS_PROCESS_ID", "0")
life = len(list(folder.glob("life-" + me + "-*")))
told = {{k: v for k, v in os.environ.items() if k.startswith(("MARS_", "JAX_", "CUDA_"))}}
(folder / f"life-{{me}}-{{life}}").write_text(json.dumps({{"argv": sys.argv[1:], "environment": told}}))
cue = json.loads((folder / "cues.json").read_text()).get(f"{{me}}:{{life}}", {{}})
state = folder / f"step-{{me}}"
step = int(state.read_text()) if state.exists() else 0
stop = []
if cue.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif not cue.get("unprepared"):
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
(folder / f"ready-{{me}}-{{life}}").write_text("")
if "exit" in cue:
    print("cue:", cue["exit"])
    sys.exit(cue["exit"])
while step < {steps} or cue.get("deaf"):
    time.sleep(0.05)
    step += 1
    if stop:
        time.sleep(cue.get("saving", 0.2))
        break
state.write_text(str(step))
"""


def make_stub_trainer(folder: Path, steps: int = 6) -> str:
    """Write the stub; returns what PYTHON must be. Cues by `process:life` go into `cues.json` (see `set_cues`)."""
    folder.mkdir(parents=True)
    stub = folder / "python"
    stub.write_text(STUB.format(python=sys.executable, folder=str(folder), steps=steps))
    stub.chmod(0o755)
    (folder / "cues.json").write_text("{}")
    return str(stub)
