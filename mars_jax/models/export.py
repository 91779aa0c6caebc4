"""A Hugging Face folder from a loaded model: what plain `transformers` loads with the same logits; or its adapter's.

The folder is written under a temporary name beside its place and renamed: a reader sees the old export or the new one.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mars_jax.errors import UserError
from mars_jax.models import hf_folder
from mars_jax.models.adapter import CONFIG, WEIGHTS, update_tensors, write_adapter
from mars_jax.models.families import EMBEDDING, HEAD, TensorName, tensor_names
from mars_jax.models.hf_folder import MARKER
from mars_jax.models.loading import LoadedModel
from mars_jax.models.lora import merged
from mars_jax.models.tensors import INDEX_FILE

log = logging.getLogger(__name__)

NUMPY_TYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
STORED_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def export(model: LoadedModel, out, *, dtype: str | None = None, max_shard_size="5GB", force: bool = False) -> Path:
    """Write `model` to the folder `out`.

    dtype: "float32", "bfloat16" or "float16" for all tensors; by default each keeps the type it has in the source, so
        that an unchanged model comes back bit for bit.
    force: replace a folder that is not an export of ours.

    A low-rank update is merged into the weights.

    Raises `UserError` if `out` holds anything that this would destroy, and for a mask-gated update.
    """
    out = Path(out).expanduser().resolve()
    merged_model = merged(model)
    with _new_folder(out, model, force) as temporary:
        hf_folder.copy_files(model, temporary)
        types = dict(model.tensor_dtypes)
        if dtype is not None:
            types = dict.fromkeys(types, STORED_TYPES[dtype])
            _record_dtype(temporary / "config.json", dtype)
        write_weights(merged_model, types, temporary, max_shard_size)
        _write_marker(model, temporary)
    return out


def export_adapter(model: LoadedModel, out, *, dtype: str | None = None, force: bool = False) -> Path:
    """Write the low-rank update of `model` alone, as PEFT lays it out; float32 by default.

    Raises `UserError` if there is none, or `out` holds anything that this would destroy.
    """
    if model.adapter is None:
        raise UserError("the model has no low-rank update (lora.rank) to export as an adapter; leave --adapter out")
    out = Path(out).expanduser().resolve()
    stored = NUMPY_TYPES[STORED_TYPES[dtype or "float32"]]
    with _new_folder(out, model, force) as temporary:
        write_adapter(model.adapter, temporary)
        with np.errstate(over="ignore"):
            tensors = update_tensors(model.params, model.cfg, stored)
        _check_finite(tensors)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(temporary / CONFIG, temporary / WEIGHTS)
        _write_marker(model, temporary, base_fingerprint=model.adapter.fingerprint)
    return out


@contextmanager
def _new_folder(out: Path, model: LoadedModel, force: bool) -> Iterator[Path]:
    """A temporary folder that takes the place of `out` if the block succeeds."""
    _check_replaceable(out, model, force)
    temporary = out.with_name(f".{out.name}.writing-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info("exported to %s", out)


def write_weights(model: LoadedModel, types: Mapping[str, str], out: Path, max_shard_size) -> None:
    """`model.safetensors`, or shards with an index, holding the tensors of `types` in those types."""
    from huggingface_hub import split_state_dict_into_shards_factory

    where = _places(model)
    names = {name: NUMPY_TYPES[stored] for name, stored in types.items() if name in where}
    shards = split_state_dict_into_shards_factory(
        {name: (where[name], dtype) for name, dtype in names.items()},
        filename_pattern="model{suffix}.safetensors",
        get_storage_size=lambda tensor: _size(*tensor),
        max_shard_size=max_shard_size,
    )
    for file, contents in shards.filename_to_tensors.items():
        with np.errstate(over="ignore"):  # said better by the check
            # safetensors writes wrong data, silently, for arrays that are not contiguous.
            tensors = {name: np.ascontiguousarray(_tensor(where[name]), names[name]) for name in contents}
        _check_finite(tensors)
        save_file(tensors, out / file, metadata={"format": "pt"})
        shutil.copymode(out / "config.json", out / file)  # safetensors makes files that only their owner can read
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": dict(sorted(shards.tensor_to_filename.items()))}
        hf_folder.write_json(out / INDEX_FILE, index)


def _places(model: LoadedModel) -> dict[str, tuple[jax.Array, TensorName, int]]:
    """For every Hugging Face name: the parameter that holds it, and its layer."""
    pairs = zip(jax.tree.leaves(model.params), jax.tree.leaves(tensor_names(model.cfg)), strict=True)
    where = {name: (array, entry, i) for array, entry in pairs for i, name in enumerate(entry.names)}
    if model.cfg.tie_embeddings:
        where[HEAD] = where[EMBEDDING]  # written only where the source has this redundant tensor
    return where


def _size(place: tuple[jax.Array, TensorName, int], dtype: np.dtype) -> int:
    array, entry, _ = place
    return array.size // len(entry.names) * dtype.itemsize


def _tensor(place: tuple[jax.Array, TensorName, int]) -> np.ndarray:
    array, entry, layer = place
    values = np.asarray(array[layer] if entry.stacked else array)
    return values.T if entry.transpose else values


def _check_finite(tensors: dict[str, np.ndarray]) -> None:
    """float16 ends at 65504: values of a bfloat16 model may lie beyond."""
    for name, values in tensors.items():
        if values.dtype == np.float16 and not np.isfinite(values).all():
            raise UserError(f"{name} holds values that float16 cannot; export with --dtype bfloat16 or float32")


def _record_dtype(path: Path, dtype: str) -> None:
    config = hf_folder.read_json(path)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    hf_folder.write_json(path, {**config, key: dtype})


def _write_marker(model: LoadedModel, folder: Path, **notes) -> None:
    files = sorted(path.name for path in folder.iterdir())
    marker = {
        "format": "mars_jax.export.1",
        "mask_token": model.tokenizer.mask_token,
        "mask_token_id": model.mask_id,
        "files": [*files, MARKER],
        **notes,
    }
    hf_folder.write_json(folder / MARKER, marker)


def _check_replaceable(out: Path, model: LoadedModel, force: bool) -> None:
    sources = [model.hf_folder, *([model.adapter.folder] if model.adapter else [])]
    if any(folder.resolve().is_relative_to(out) for folder in sources):
        raise UserError(f"{out}: holds the model that is to be exported; choose another folder")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; choose another name")
    if force or not out.exists():
        return
    present = {path.name for path in out.iterdir()}
    ours = set(json.loads((out / MARKER).read_text())["files"]) if MARKER in present else set()
    foreign = sorted(present - ours)
    if foreign:
        raise UserError(
            f"{out}: holds files that no export of ours wrote ({', '.join(foreign[:5])}), which would be lost; "
            "choose another folder or pass --force"
        )


def _replace(new: Path, place: Path) -> None:
    old = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)
