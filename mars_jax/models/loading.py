"""`load(path)`: a model from a Hugging Face folder, a hub id, a `.gguf` file or a training run's output folder."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_jax.errors import UserError
from mars_jax.models import families, gguf, masking
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params
from mars_jax.models.tensors import SafetensorsFolder, read_parameters


@dataclass(frozen=True)
class LoadedModel:
    """Everything that training, decoding and export need of a checkpoint.

    cfg: the architecture.
    params: nested dict of arrays, layers stacked (`models.parameters`).
    tokenizer: with `mask_token` set.
    mask_id: the id of `[MASK]`.
    stop_ids: end tokens, the union of config, generation config and tokenizer, sorted.
    emit_mask: boolean `[V]`, false for `[MASK]`, padded vocabulary rows and ids unknown to the tokenizer.
    hf_folder: the source's `config.json` and tokenizer files.
    """

    cfg: ModelConfig
    params: Params
    tokenizer: PreTrainedTokenizerBase
    mask_id: int
    stop_ids: tuple[int, ...]
    emit_mask: np.ndarray
    hf_folder: Path


def load(path, *, dtype=None, shardings=None, mask_token=None, revision=None, step=None) -> LoadedModel:
    """Load a model for training, decoding or export.

    path: a Hugging Face folder with safetensors, a hub id, a `.gguf` file, or a run's `output_dir`.
    dtype: of the parameters, float32 by default.
    shardings: a tree of `jax.sharding.Sharding` like the parameters; each host then reads only its devices' slices.
    mask_token: the text of the token to serve as `[MASK]`; by default see `masking.choose_mask`.
    revision: of a hub repository.  step: of a run's checkpoints, the latest by default.

    Raises `UserError` for a path that holds none of these, an unsupported architecture or tensors that do not fit it.
    """
    dtype = jnp.dtype(dtype or jnp.float32)
    local = Path(path)
    if local.is_file():
        folder, source = gguf.unpack(local)
    elif local.is_dir():
        folder, source = local, SafetensorsFolder(local)
    else:
        raise UserError(f"{path}: no such file or folder")
    cfg = families.model_config(read_json(folder / "config.json"))
    params = read_parameters(cfg, source, dtype=dtype, shardings=shardings)
    return assemble(folder, cfg, params, mask_token)


def assemble(folder: Path, cfg: ModelConfig, params: Params, mask_token: str | None) -> LoadedModel:
    """A `LoadedModel` from parameters and the folder that holds their config and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    mask_id = masking.choose_mask(tokenizer, cfg.vocab_size, mask_token)
    return LoadedModel(
        cfg=cfg,
        params=params,
        tokenizer=tokenizer,
        mask_id=mask_id,
        stop_ids=stop_ids(folder, tokenizer),
        emit_mask=masking.emit_mask(tokenizer, cfg.vocab_size, mask_id),
        hf_folder=folder,
    )


def stop_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every end token that `config.json`, `generation_config.json` or the tokenizer names."""
    generation = folder / "generation_config.json"
    named = [read_json(folder / "config.json").get("eos_token_id"), tokenizer.eos_token_id]
    named.append(read_json(generation).get("eos_token_id") if generation.exists() else None)
    ids = set()
    for value in named:
        ids |= set(value) if isinstance(value, list) else {value}
    return tuple(sorted(ids - {None}))


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
