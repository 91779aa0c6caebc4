"""`load(path)`: a model from a Hugging Face folder, a hub id, a `.gguf` file, a training run or an adapter's folder."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_jax.errors import UserError
from mars_jax.models import families, gguf, masking, run_folder
from mars_jax.models.adapter import Adapter, is_adapter, read_adapter, read_updates
from mars_jax.models.config import ModelConfig
from mars_jax.models.hf_folder import COPIED_FILES, TENSOR_DTYPES, read_json
from mars_jax.models.parameters import Params, is_spec, join, parameter_specs, split
from mars_jax.models.tensors import SafetensorsFolder, read_parameters
from mars_jax.storage import is_remote, on_this_machine, place


@dataclass(frozen=True)
class LoadedModel:
    """Everything that training, decoding and export need of a checkpoint.

    cfg: the architecture.
    params: nested dict of arrays, layers stacked (`models.parameters`).
    tokenizer: with `mask_token` set.
    mask_id: the id of `[MASK]`.
    stop_ids: end tokens, the union of config, generation config and tokenizer, sorted.
    emit_mask: boolean `[V]`, false for `[MASK]`, padded vocabulary rows and ids unknown to the tokenizer.
    hf_folder: holds the source's `config.json` and tokenizer files.
    tensor_dtypes: the stored type of every tensor of the source by its Hugging Face name; export keeps both.
    adapter: where the low-rank update `cfg.lora` comes from.
    """

    cfg: ModelConfig
    params: Params = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    mask_id: int
    stop_ids: tuple[int, ...]
    emit_mask: np.ndarray = field(repr=False)
    hf_folder: Path
    tensor_dtypes: Mapping[str, str] = field(repr=False)
    adapter: Adapter | None = None


def load(path, *, dtype=None, shardings=None, mask_token=None, revision=None, step=None) -> LoadedModel:
    """Load a model for training, decoding or export.

    path: a Hugging Face folder with safetensors, a hub id, a `.gguf` file, a run's `output_dir`, or an adapter's
        folder as PEFT lays it out, which names its base model; folders may be gs://.
    dtype: of the parameters, float32 by default.
    shardings: a tree of `jax.sharding.Sharding` like the parameters, or a function of the `ModelConfig` that makes one;
        each host then reads only its devices' slices. By default everything lies on one device.
    mask_token: the text of the token to serve as `[MASK]`; by default see `masking.choose_mask`.
    revision: of a hub repository.  step: of a run's checkpoints, the latest by default.

    Raises `UserError` for a path that holds none of these, an unsupported architecture or tensors that do not fit it.
    """
    if not str(path).strip():
        raise UserError("the model's path is empty: expected a folder, a hub id, a .gguf file or a run's output_dir")
    dtype = jnp.dtype(dtype or jnp.float32)
    found = place(path)
    is_run = run_folder.is_run_folder(found)
    if step is not None and not is_run:
        raise UserError(f"step={step}: {path} is not a run's output folder, so it has no steps")
    if adapter_place := _adapter_place(found):
        return _load_adapter(found, adapter_place, dtype=dtype, shardings=shardings, mask_token=mask_token, step=step)
    if is_run:
        folder = on_this_machine(found / run_folder.METADATA)
        tensor_dtypes = read_json(folder / TENSOR_DTYPES)
    else:
        folder, source = _open(path, found, revision)
        tensor_dtypes = source.dtypes()
    cfg = families.model_config(read_json(folder / "config.json"))
    tokenizer = _tokenizer(folder)
    mask_id = masking.choose_mask(tokenizer, cfg.vocab_size, mask_token)
    shardings = _all_shardings(cfg, shardings)
    if is_run:
        params = run_folder.restore_parameters(found, cfg, dtype=dtype, shardings=shardings, step=step)
    else:
        params = read_parameters(cfg, source, dtype=dtype, shardings=shardings)
    return LoadedModel(
        cfg=cfg,
        params=params,
        tokenizer=tokenizer,
        mask_id=mask_id,
        stop_ids=stop_ids(folder, tokenizer),
        emit_mask=masking.emit_mask(tokenizer, cfg.vocab_size, mask_id),
        hf_folder=folder,
        tensor_dtypes=tensor_dtypes,
    )


def _adapter_place(found: epath.Path) -> epath.Path | None:
    """The folder that describes the adapter in `found`, if that holds one."""
    described = found / run_folder.METADATA if run_folder.is_run_folder(found) else found
    return described if is_adapter(described) else None


def _load_adapter(found, described, *, dtype, shardings, mask_token, step) -> LoadedModel:
    """The base model that an adapter names, with the adapter's update beside its weights."""
    folder = on_this_machine(described)
    adapter = read_adapter(folder)
    if _adapter_place(place(adapter.base)):
        raise UserError(
            f"{found}: its base {adapter.base} is an adapter too; name a model, such as that adapter merged by "
            "python -m mars_jax.export"
        )

    def shardings_of(cfg: ModelConfig):
        return split(_all_shardings(replace(cfg, lora=adapter.lora(mask_id=0)), shardings))  # which id is no matter

    try:
        base = load(
            adapter.base,
            dtype=dtype,
            shardings=lambda cfg: shardings_of(cfg)[0],
            mask_token=mask_token or adapter.mask_token,
        )
    except UserError as error:
        raise UserError(f"{found}: its base model cannot be loaded: {error}") from error
    adapter.check_base(base.params, found)
    cfg = replace(base.cfg, lora=adapter.lora(base.mask_id))
    own = shardings_of(base.cfg)[1]
    if run_folder.is_run_folder(found):
        updates = run_folder.restore_parameters(found, cfg, dtype=dtype, shardings=own, step=step)
    else:
        updates = read_updates(folder, cfg, dtype=dtype, shardings=own)
    return replace(base, cfg=cfg, params=join(base.params, updates), adapter=adapter)


def _open(path, found: epath.Path, revision: str | None):
    """The folder with config and tokenizer, and the tensors."""
    if found.is_dir():
        local = on_this_machine(found)
        return local, SafetensorsFolder(local)
    if found.exists():
        if found.suffix != ".gguf" or is_remote(found):
            raise UserError(f"{path}: expected a folder or a local .gguf file")
        return gguf.unpack(Path(found))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise UserError(f"{path}: no such file or folder, nor a hub id of the form owner/name")
    folder = _download(str(path), revision)
    return folder, SafetensorsFolder(folder)


def _download(repository: str, revision: str | None) -> Path:
    """Fetch a hub repository's config, tokenizer and safetensors; never a pickle or code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    allowed = ["model*.safetensors", "model.safetensors.index.json", *COPIED_FILES]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=allowed, ignore_patterns=["*/*"]))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{repository}: no such folder here, and the hub cannot be reached for it; "
            "download the repository elsewhere and pass its folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(f"{repository}: no such folder here, and the hub refused it: {error}") from error


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    # Where none of these lies there, some transformers classes give an empty tokenizer instead of an error.
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{folder}: holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes the parsers raise
        raise UserError(f"{folder}: holds no tokenizer that transformers can load ({error})") from error


def _all_shardings(cfg: ModelConfig, shardings) -> Params:
    if callable(shardings):
        return shardings(cfg)
    if shardings is not None:
        return shardings
    alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: alone, parameter_specs(cfg), is_leaf=is_spec)


def stop_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every end token that `config.json`, `generation_config.json` or the tokenizer names."""
    ids = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        values = value if isinstance(value, list) else [value]
        if not all(entry is None or (type(entry) is int and entry >= 0) for entry in values):
            raise UserError(f"{folder / name}: eos_token_id={value!r}: expected a token id or a list of them")
        ids |= set(values)
    return tuple(sorted(ids - {None}))
