"""From named tensors in files to the parameter tree, reading only what each device holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from safetensors import safe_open

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.models.families import EMBEDDING, HEAD, TensorName, tensor_names
from mars_jax.models.hf_folder import read_json
from mars_jax.models.parameters import Params, is_spec, parameter_specs

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F32", "F16", "BF16")  # what float32 parameters can hold exactly


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def dtypes(self) -> Mapping[str, str]:
        """Stored types in safetensors' spelling: `F32`, `BF16`, …"""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray: ...


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: Path):
        self._slices = {}
        for path in _weight_files(folder):
            try:
                # Kept open by its slices; memory-mapped, so nothing is read before `read`.
                file = safe_open(path, framework="np")
            except Exception as error:
                raise UserError(f"{path}: not a readable safetensors file ({error})") from error
            self._slices |= {name: file.get_slice(name) for name in file.keys()}

    def shapes(self):
        return {name: tuple(s.get_shape()) for name, s in self._slices.items()}

    def dtypes(self):
        return {name: s.get_dtype() for name, s in self._slices.items()}

    def read(self, name, index):
        return self._slices[name][index]


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).exists():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{folder / INDEX_FILE}: no weight_map of tensors to files; repeat the download")
        shards = sorted(set(weight_map.values()))
        absent = [name for name in shards if not (folder / name).exists()]
        if absent:
            raise UserError(
                f"{folder}: {INDEX_FILE} lists {', '.join(absent)}, which are not there; complete the download"
            )
        return [folder / name for name in shards]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    pickles = sorted(p.name for p in folder.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors" if pickles else ""
    raise UserError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} found{hint}")


def read_parameters(cfg: ModelConfig, source: TensorSource, *, dtype, shardings: Params) -> Params:
    """The parameter tree of `cfg` in `dtype`, each array placed by the sharding at its place in `shardings`.

    Raises `UserError` listing every missing, unused and mis-shaped tensor at once.
    """
    tied = cfg.tie_embeddings and HEAD in source.shapes() and _equal(source, HEAD, EMBEDDING)
    return read_tensors(
        parameter_specs(cfg),
        tensor_names(cfg),
        source,
        dtype=dtype,
        shardings=shardings,
        where="config.json",
        redundant=[HEAD] if tied else [],
    )


def read_tensors(
    specs: Params, table: Params, source: TensorSource, *, dtype, shardings: Params, where, redundant=()
) -> Params:
    """The arrays of `specs` by the names of `table`; `where` says in errors what the tensors do not fit."""
    _check(source, specs, table, where, redundant)

    def place(spec, name, sharding):
        return _place(spec.shape, name, source, np.dtype(dtype), sharding)

    return jax.tree.map(place, specs, table, shardings, is_leaf=is_spec)


def _place(shape, name: TensorName, source: TensorSource, dtype, sharding) -> jax.Array:
    cached = {}  # devices that hold the same slice, as data-parallel ones do, share one read

    def read(index):
        key = tuple(axis.indices(n) for axis, n in zip(index, shape, strict=True))
        if key not in cached:
            cached[key] = _read_slice(tuple(slice(*k) for k in key), name, source, dtype)
        return cached[key]

    return jax.make_array_from_callback(shape, sharding, read)


def _read_slice(index: tuple[slice, ...], name: TensorName, source: TensorSource, dtype) -> np.ndarray:
    layers = range(index[0].start, index[0].stop) if name.stacked else (0,)
    within = index[1:] if name.stacked else index
    out = np.empty((len(layers), *(axis.stop - axis.start for axis in within)), dtype)
    for row, layer in zip(out, layers, strict=True):
        tensor = source.read(name.names[layer], within[::-1] if name.transpose else within)
        row[...] = tensor.T if name.transpose else tensor
    return out if name.stacked else out[0]


def _expected_shapes(specs: Params, table: Params) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for spec, name in zip(jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(table), strict=True):
        shape = spec.shape[1:] if name.stacked else spec.shape
        shapes |= dict.fromkeys(name.names, shape[::-1] if name.transpose else shape)
    return shapes


def _check(source: TensorSource, specs: Params, table: Params, where, redundant: Sequence[str]) -> None:
    expected, shapes = _expected_shapes(specs, table), source.shapes()
    # Old exporters stored the rotary buffers, which the config determines.
    known = {*expected, *redundant}
    unused = [name for name in shapes if name not in known and not name.endswith("rotary_emb.inv_freq")]
    problems = {
        "missing": sorted(expected.keys() - shapes.keys()),
        "unused": sorted(unused),
        "wrong shape": [
            f"{name} is {shapes[name]}, expected {shape}"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape
        ],
        "wrong type": [
            f"{name} is {dtype}, expected one of {', '.join(FLOATS)}"
            for name, dtype in source.dtypes().items()
            if name in expected and dtype not in FLOATS
        ],
    }
    found = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if HEAD in unused:
        found.append(f"{HEAD} differs from the embedding though tie_word_embeddings is true: set it to false")
    if found:
        raise UserError(f"the tensors do not fit {where}. {'; '.join(found)}")


def _equal(source: TensorSource, first: str, second: str) -> bool:
    shape = source.shapes()[first]
    if shape != source.shapes().get(second):
        return False
    step = max(1, 2**24 // shape[1])  # some tens of MB at a time
    blocks = [(slice(i, min(i + step, shape[0])), slice(0, shape[1])) for i in range(0, shape[0], step)]
    return all(np.array_equal(source.read(first, block), source.read(second, block)) for block in blocks)
