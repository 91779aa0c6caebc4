"""A run that takes seconds: a new two-layer model on chats that the package makes itself."""

import json
from pathlib import Path

from mars_jax.config import RunConfig, parse_config
from mars_jax.training.metrics import read_metrics

SCRATCH = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}


def tiny_tree(folder: Path, **sections) -> dict:
    """The configuration as a nested dict; keyword arguments replace keys of its sections."""
    tree = {
        "output_dir": str(folder),
        "model": {"scratch": SCRATCH},
        "data": {"path": "synthetic", "max_rows": 200, "eval_rows": 16},
        "objective": {"recipe": "mars", "row_length": 64, "logits_chunk": 64, "attention": "dense"},
        "optimizer": {"learning_rate": 1e-2},
        "train": {"steps": 12, "global_batch": 8, "save_every": 5, "keep": 10},
        "logging": {"tensorboard": False},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return tree


def tiny_run(folder: Path, **sections) -> RunConfig:
    return parse_config(tiny_tree(folder, **sections), "test")


def write_tiny_config(path: Path, folder: Path, **sections) -> Path:
    path.write_text(json.dumps(tiny_tree(folder, **sections)))  # JSON is YAML
    return path


def logged(folder: Path, split: str = "train") -> list[dict]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["split"] == split]


def learning_curve(folder: Path) -> list[tuple]:
    """What must not depend on interruptions or on the clock."""
    return [(line["step"], line["loss"], line["grad_norm"], line["trained_tokens"]) for line in logged(folder)]


def saved_state(folder: Path, step: int) -> dict:
    """Parameters, optimizer state and data position of a checkpoint, as numpy arrays."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    place = (folder / "checkpoints" / str(step)).absolute()
    reader = ocp.PyTreeCheckpointer()

    def arrays(item):
        """Read without the devices that wrote them."""
        as_numpy = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(place / item).item_metadata.tree
        )
        return reader.restore(place / item, restore_args=as_numpy)

    position = json.loads((place / "data" / "metadata").read_text())
    return {"params": arrays("params"), "opt_state": arrays("opt_state"), "data": position}
