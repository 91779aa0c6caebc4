"""Low-rank updates in a folder of their own, as PEFT lays it out: `adapter_config.json`, `adapter_model.safetensors`.

A mask-gated update is marked by a type that PEFT does not know: it refuses what it would otherwise apply to every
token. What PEFT has no key for stands in `mars_jax.json`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from mars_jax.errors import UserError
from mars_jax.models.config import Lora, ModelConfig
from mars_jax.models.families import tensor_names
from mars_jax.models.hf_folder import MARKER, read_json, write_json
from mars_jax.models.lora import fingerprint
from mars_jax.models.parameters import Params, parameter_specs, split
from mars_jax.models.tensors import read_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before the names of tensors
PLAIN, GATED = "LORA", "MASK_GATED_LORA"
MODULES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
# Keys of PEFT's configuration that would change what the update computes, with the values under which they do not.
NEUTRAL_VALUES = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    **dict.fromkeys(("use_rslora", "use_dora", "use_qalora", "lora_bias"), (None, False)),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication", "exclude_modules"), (None, [])),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "alora_invocation_tokens"), (None, [])),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "use_bdlora", "arrow_config", "kasa_config"), (None, {})),
    **dict.fromkeys(("velora_config", "monteclora_config"), (None, {})),
}


@dataclass(frozen=True)
class Adapter:
    """What the folder of an update says of it.

    base:        path or hub id of the model that it belongs to.
    gated:       whether it is for placeholders only.
    mask_token:  text of `[MASK]`; None in folders that others wrote.
    fingerprint: of the base's weights; None in folders that others wrote.
    folder:      where this was read.
    """

    base: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    gated: bool
    mask_token: str | None
    fingerprint: int | None
    folder: Path | None = None

    @property
    def notes(self) -> dict:
        """What goes into `mars_jax.json`."""
        return {"mask_token": self.mask_token, "base_fingerprint": self.fingerprint}

    def lora(self, mask_id: int) -> Lora:
        return Lora(self.rank, self.alpha, self.targets, mask_id if self.gated else None)

    @classmethod
    def of(cls, base: str, lora: Lora, mask_token: str, params: Params) -> "Adapter":
        """Of an update to these weights."""
        return cls(base, lora.rank, lora.alpha, lora.targets, lora.gated, mask_token, int(fingerprint(params)))

    def check_base(self, params: Params, where) -> None:
        """Raise UserError if these are not the weights that the update was trained on."""
        if self.fingerprint is not None and int(fingerprint(params)) != self.fingerprint:
            raise UserError(
                f"{where}: the weights of {self.base} are not those that this update was trained on; put those back"
            )


def is_adapter(folder) -> bool:
    return (folder / CONFIG).exists()


def read_adapter(folder: Path) -> Adapter:
    """Raises UserError for an adapter of another kind, naming the key and its value."""
    config = read_json(folder / CONFIG)
    _check(config, folder / CONFIG)
    notes = read_json(folder / MARKER) if (folder / MARKER).exists() else {}
    return Adapter(
        base=config["base_model_name_or_path"],
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        targets=tuple(name for name, module in MODULES.items() if module in config["target_modules"]),
        gated=config["peft_type"] == GATED,
        mask_token=notes.get("mask_token"),
        fingerprint=notes.get("base_fingerprint"),
        folder=folder,
    )


def _check(config: dict, where: Path) -> None:
    if config.get("peft_type") not in (PLAIN, GATED):
        raise UserError(f"{where}: peft_type={config.get('peft_type')!r} is not supported; {PLAIN} and {GATED} are")
    for key, neutral in NEUTRAL_VALUES.items():
        if key in config and config[key] not in neutral:
            raise UserError(f"{where}: {key}={config[key]!r} changes what the model computes and is not implemented")
    known = list(MODULES.values())
    valid = {
        "base_model_name_or_path": (lambda base: isinstance(base, str) and base, "the path of the base model"),
        "r": (lambda rank: type(rank) is int and rank > 0, "a positive integer"),
        "lora_alpha": (lambda alpha: type(alpha) in (int, float) and 0 < alpha < math.inf, "a positive number"),
        "target_modules": (
            lambda modules: isinstance(modules, list) and modules and all(m in known for m in modules),
            f"a list of some of {', '.join(known)}",
        ),
    }
    for key, (fits, expected) in valid.items():
        if not fits(config.get(key)):
            raise UserError(f"{where}: {key}={config.get(key)!r}: expected {expected}")


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write PEFT's configuration; `notes` is for the caller to add to `mars_jax.json`."""
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    config = {
        "peft_type": GATED if adapter.gated else PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": [MODULES[name] for name in adapter.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, config)


def update_tensors(params: Params, cfg: ModelConfig, dtype: np.dtype) -> dict[str, np.ndarray]:
    """The updates of a model by PEFT's names."""
    arrays, names = split(params)[1], split(tensor_names(cfg))[1]
    return {
        PREFIX + name: np.ascontiguousarray(np.asarray(array[layer]).T, dtype)
        for array, entry in zip(jax.tree.leaves(arrays), jax.tree.leaves(names), strict=True)
        for layer, name in enumerate(entry.names)
    }


def read_updates(folder: Path, cfg: ModelConfig, *, dtype, shardings: Params) -> Params:
    """The updates of `cfg.lora` from PEFT's file. Raises UserError where its tensors do not fit."""
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except Exception as error:  # the file is missing or damaged
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error
    source = _Arrays({name.removeprefix(PREFIX): values for name, values in tensors.items()})
    specs, names = split(parameter_specs(cfg))[1], split(tensor_names(cfg))[1]
    return read_tensors(specs, names, source, dtype=dtype, shardings=shardings, where=path)


@dataclass(frozen=True)
class _Arrays:
    """A `TensorSource` in memory."""

    tensors: dict[str, np.ndarray]

    def shapes(self):
        return {name: values.shape for name, values in self.tensors.items()}

    def dtypes(self):
        kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
        return {name: kinds.get(values.dtype.name, values.dtype.name) for name, values in self.tensors.items()}

    def read(self, name, index):
        return self.tensors[name][index]
