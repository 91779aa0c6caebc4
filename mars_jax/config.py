"""The configuration of a training run: YAML and dotted overrides onto typed, frozen dataclasses.

What the sections hold is described, and their values are checked, in `config_sections` and `data.config`.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mars_jax.config_sections import (
    LoggingSection,
    LoraSection,
    MeshSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    ScheduleSection,
    TrainSection,
)
from mars_jax.data.config import DataConfig
from mars_jax.errors import UserError


@dataclass(frozen=True)
class RunConfig:
    """Everything a training run depends on."""

    output_dir: str
    model: ModelSection
    data: DataConfig
    train: TrainSection
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    lora: LoraSection = field(default_factory=LoraSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    def __post_init__(self):
        if not self.output_dir.strip():
            raise ValueError("output_dir is empty: name the folder of the run")
        if self.lora.rank and self.model.scratch is not None:
            raise ValueError(f"lora.rank={self.lora.rank} adapts a trained model: give model.path, not model.scratch")
        if self.lora.mask_gated and self.objective.recipe == "ar_sft":
            raise ValueError("lora.mask_gated=true trains placeholders alone, and objective.recipe=ar_sft has none")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and `key.path=value` overrides.

    Raises UserError naming the key, the value and what was expected.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not Path(path).is_file():
        raise UserError(f"--config {path}: no such file")
    for override in overrides:
        if "=" not in override:
            raise UserError(f"override {override!r} is not of the form key.path=value")
    try:
        loaded = OmegaConf.load(path)
        if not OmegaConf.is_dict(loaded):
            raise UserError(f"{path}: expected sections of keys, found a list")
        tree = OmegaConf.to_container(OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides))), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, IndexError) as error:  # the last of a key like "["
        raise UserError(f"{path} with {list(overrides)}: {error}") from error
    return parse_config(tree, where=str(path))


def parse_config(tree: dict, where: str) -> RunConfig:
    """Validate a nested dict; `where` names it in errors."""
    from pydantic import TypeAdapter, ValidationError

    _refuse_unknown_keys(tree, RunConfig, where, prefix="")
    try:
        # JSON mode is strict about types (no "3" for 3, no true for 1) and still reads lists into tuples.
        return TypeAdapter(RunConfig).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(e) for e in error.errors())) from error


def dump_config(cfg: RunConfig) -> str:
    """The configuration as YAML that `load_config` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg)))


def _explain(error: dict) -> str:
    key = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{key} is missing"
    if isinstance(error["input"], dict):
        return f"{key}: {message}" if key else message
    return f"{key}={error['input']}: {message}"


def _section_types(annotation) -> list[type]:
    """The dataclasses that an annotation such as `ScratchSection | None` allows."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return [option for option in options if dataclasses.is_dataclass(option)]


def _refuse_unknown_keys(tree: dict, section: type, where: str, prefix: str) -> None:
    hints = typing.get_type_hints(section)
    for key, value in tree.items():
        if key not in hints:
            near = [prefix + name for name in difflib.get_close_matches(key, hints, n=1)]
            near += [known for known in _dotted_keys(RunConfig) if known.endswith(f".{key}")]
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(prefix + name for name in hints)}"
            raise UserError(f"{where}: {prefix}{key} is not a known key; {hint}")
        for inner in _section_types(hints[key]):
            if isinstance(value, dict):
                _refuse_unknown_keys(value, inner, where, f"{prefix}{key}.")


def _dotted_keys(section: type, prefix: str = "") -> list[str]:
    keys = []
    for name, annotation in typing.get_type_hints(section).items():
        keys.append(prefix + name)
        for inner in _section_types(annotation):
            keys += _dotted_keys(inner, f"{prefix}{name}.")
    return keys
