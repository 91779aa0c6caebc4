"""Compiling for a TPU slice without one: the splash kernel included, memory against HBM, honest failures."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from helpers.paths import REPOSITORY

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the optional package libtpu is absent: pip install 'mars-jax[tpu]' to test compiling for TPU",
)

ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 512,
}
CONFIG = """
output_dir: unused
model: {path: unused, remat: true}
data: {path: synthetic}
objective: {recipe: mars, block_size: 4, row_length: 256}
train: {global_batch: 4, steps: 1, dtype: bfloat16}
mesh: {data: 1, fsdp: 2, tensor: 2}
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURE))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def _compile(files, *arguments):
    command = [sys.executable, "-m", "mars_jax.compile", "--config", files / "run.yaml"]
    command += ["--architecture", files / "config.json", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


@needs_libtpu
@pytest.mark.slow
def test_compiles_a_train_step_with_the_splash_kernel(files):
    done = _compile(files, "--topology", "v5e:2x2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2}
    memory = report["memory"]
    # float32 parameters and both moments, cut in four but for norms and biases; donated, so outputs take no room.
    parameters = 2 * (256 * 64 * 12 + 3 * 256 * 512) + 512 * 256
    assert 3 * 4 * parameters / 4 < memory["arguments"] < 1.05 * 3 * 4 * parameters / 4
    assert memory["outputs"] - memory["aliased"] < 0.01 * memory["outputs"]
    # Two rows a device: forward, rematerialised forward, dq and dkv kernels in each of two layers.
    assert report["counts"]["kernels"]["tpu_custom_call"] == 2 * 2 * 4
    tokens = 2 * (256 + 192)
    layers = 2 * (256 * 64 * 12 + 3 * 256 * 512) / 2
    assert 2 * layers * tokens * 3 < report["counts"]["flops"] < 2 * (layers + 512 * 256 / 2) * tokens * 4.2
    assert report["counts"]["collectives"]["all-gather"] > 0
    assert 0 < report["estimate"]["mfu"] < 1


@needs_libtpu
def test_compiles_a_decoding_step_for_one_chip(files):
    done = _compile(files, "--topology", "v5e:2x2", "--step", "decode", "--slots", "4", "--capacity", "256", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    parameters = 2 * (256 * 64 * 12 + 3 * 256 * 512) + 512 * 256
    cache = 2 * 4 * 256 * 2 * 2 * 64  # layers, slots, capacity, keys and values, kv heads, head_dim
    weights_and_cache = 2 * (parameters + cache)  # bfloat16
    assert weights_and_cache < report["memory"]["arguments"] < 1.1 * weights_and_cache
    assert report["memory"]["outputs"] - report["memory"]["aliased"] < 1000  # the cache is updated in place
    # Window of 3: four pending tokens and three placeholders a row; logits of the root and the placeholders.
    layers, head = 2 * (256 * 64 * 12 + 3 * 256 * 512), 512 * 256
    products = 2 * 4 * (layers * 7 + head * 4)
    attention = 4 * 2 * 4 * 64 * 4 * 7 * (256 + 7)
    assert report["flops"] == pytest.approx(products + attention, rel=0.02)


@needs_libtpu
@pytest.mark.slow
def test_names_the_largest_buffers_of_a_step_that_does_not_fit(files):
    """64 rows of 2^18 tokens in bfloat16: keys and values take 4 GiB in each of two layers, four times."""
    done = _compile(files, "--topology", "v5e:2x2", "--step", "decode", "--slots", "64", "--capacity", str(2**18))
    assert done.returncode == 1, done.stderr
    assert "Ran out of memory" in done.stderr
    assert "largest buffers" in done.stderr and "bf16[64,2,64,262144]" in done.stderr


@needs_libtpu
def test_refuses_a_slice_that_does_not_exist(files):
    done = _compile(files, "--topology", "v5e:3x5")
    assert done.returncode == 2
    assert "--topology v5e:3x5" in done.stderr


@needs_libtpu
def test_refuses_a_mesh_that_does_not_fit_the_slice(files):
    done = _compile(files, "--topology", "v5e:2x4")
    assert done.returncode == 2
    assert "does not fit the 8 devices" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed: nothing to ask for")
def test_asks_for_libtpu_where_it_is_missing(files):
    done = _compile(files, "--topology", "v5e:2x2")
    assert done.returncode == 2
    assert "pip install 'mars-jax[tpu]'" in done.stderr
