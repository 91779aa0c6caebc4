"""The model that a run starts from: a checkpoint, a new one, or the run's own folder when it continues."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_jax.config import RunConfig
from mars_jax.errors import UserError
from mars_jax.models.adapter import CONFIG as ADAPTER_CONFIG
from mars_jax.models.adapter import Adapter, is_adapter, read_adapter, write_adapter
from mars_jax.models.config import ModelConfig
from mars_jax.models.families import model_config
from mars_jax.models.hf_folder import MARKER, read_json, write_json, write_metadata
from mars_jax.models.loading import LoadedModel, load
from mars_jax.models.masking import choose_mask
from mars_jax.models.parameters import Params
from mars_jax.parallel.rules import parameter_shardings
from mars_jax.training.output import OutputFolder
from mars_jax.training.state import add_lora, init_params


@dataclass(frozen=True)
class Source:
    """model: the architecture. take_params: gives the starting parameters, once; their buffers may then be donated."""

    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    mask_id: int
    take_params: Callable[[], Params]


def open_source(cfg: RunConfig, output: OutputFolder, mesh: Mesh, continues: bool) -> Source:
    """Open the model that `cfg.model` names and leave its config and tokenizer in `output_dir/hf`.

    With `continues`, that folder is all that is read: parameters then come from the run's checkpoint. Only a run of
    low-rank updates, whose checkpoints hold nothing else, reads its base again.
    """
    folder = output.local / "hf"
    dtype = jnp.dtype(cfg.train.parameter_dtype)
    if cfg.lora.rank:
        return _open_base(cfg, output, mesh, folder, continues)
    if cfg.model.scratch is None and not continues:
        return _open_checkpoint(cfg, output, mesh, folder, dtype)
    if not continues:
        _on_first_process(output, lambda: _create(cfg, folder))
    model = model_config(read_json(folder / "config.json"))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    mask_id = choose_mask(tokenizer, model.vocab_size, cfg.model.mask_token)
    shardings = parameter_shardings(model, mesh)
    return Source(model, tokenizer, mask_id, lambda: init_params(cfg.train.seed, model, shardings, dtype))


def _load(cfg: RunConfig, mesh: Mesh, dtype) -> LoadedModel:
    loaded = load(
        cfg.model.path,
        dtype=dtype,
        shardings=lambda model: parameter_shardings(model, mesh),
        mask_token=cfg.model.mask_token,
    )
    if loaded.cfg.lora is not None:
        raise UserError(
            f"model.path={cfg.model.path} is an adapter: train from its base {loaded.adapter.base}, or from the merged "
            "model that python -m mars_jax.export writes of an adapter that is not mask-gated"
        )
    return loaded


def _open_base(cfg: RunConfig, output: OutputFolder, mesh: Mesh, folder: Path, continues: bool) -> Source:
    """A model and fresh updates to it. Frozen weights are kept in the type that is computed with."""
    loaded = _load(cfg, mesh, jnp.dtype(cfg.train.dtype))
    lora = cfg.lora.lora(loaded.mask_id)
    if continues and is_adapter(folder):  # without: the checkpoints are another run's, which restoring them will say
        read_adapter(folder).check_base(loaded.params, output.place)
    elif not continues:
        adapter = Adapter.of(cfg.model.path, lora, loaded.tokenizer.mask_token, loaded.params)
        _on_first_process(output, lambda: _write_metadata(loaded, adapter, folder))
    model = replace(loaded.cfg, lora=lora)
    shardings = parameter_shardings(model, mesh)
    params = [add_lora(loaded.params, cfg.train.seed, model, shardings, jnp.dtype(cfg.train.parameter_dtype))]
    return Source(model, loaded.tokenizer, loaded.mask_id, params.pop)


def _write_metadata(loaded: LoadedModel, adapter: Adapter | None, folder: Path) -> None:
    write_metadata(loaded, folder)
    (folder / ADAPTER_CONFIG).unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    if adapter is not None:
        write_adapter(adapter, folder)
        write_json(folder / MARKER, adapter.notes)


def _open_checkpoint(cfg: RunConfig, output: OutputFolder, mesh: Mesh, folder: Path, dtype) -> Source:
    loaded = _load(cfg, mesh, dtype)
    _on_first_process(output, lambda: _write_metadata(loaded, None, folder))
    params = [loaded.params]  # popped by the taker, so that nothing here keeps a second copy alive
    return Source(loaded.cfg, loaded.tokenizer, loaded.mask_id, params.pop)


def _create(cfg: RunConfig, folder: Path) -> None:
    """A new architecture with a tokenizer trained on the run's own chats."""
    from mars_jax.data.sources import training_chats
    from mars_jax.data.synthetic import train_tokenizer
    from mars_jax.models.scratch import create_folder

    tokenizer = train_tokenizer(training_chats(cfg.data), cfg.model.scratch.vocab_size)
    (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
    create_folder(folder, cfg.model.scratch.model_config(len(tokenizer)), tokenizer)


def _on_first_process(output: OutputFolder, action: Callable[[], None]) -> None:
    """Run `action` on process 0 while the others wait for what it leaves in the output folder."""
    if jax.process_index() == 0:
        action()
        output.publish()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("output folder")
        if jax.process_index() != 0:
            output.fetch()
