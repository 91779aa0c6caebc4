"""The model that a run starts from: a checkpoint, a new one, or the run's own folder when it continues."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_jax.config import RunConfig
from mars_jax.models.config import ModelConfig
from mars_jax.models.families import model_config
from mars_jax.models.hf_folder import read_json, write_metadata
from mars_jax.models.loading import load
from mars_jax.models.masking import choose_mask
from mars_jax.models.parameters import Params
from mars_jax.parallel.rules import parameter_shardings
from mars_jax.training.output import OutputFolder
from mars_jax.training.state import init_params


@dataclass(frozen=True)
class Source:
    """model: the architecture. take_params: gives the starting parameters, once; their buffers may then be donated."""

    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    mask_id: int
    take_params: Callable[[], Params]


def open_source(cfg: RunConfig, output: OutputFolder, mesh: Mesh, continues: bool) -> Source:
    """Open the model that `cfg.model` names and leave its config and tokenizer in `output_dir/hf`.

    With `continues`, that folder is all that is read: parameters then come from the run's checkpoint.
    """
    folder = output.local / "hf"
    dtype = jnp.dtype(cfg.train.parameter_dtype)
    if cfg.model.scratch is None and not continues:
        return _open_checkpoint(cfg, output, mesh, folder, dtype)
    if not continues:
        _on_first_process(output, lambda: _create(cfg, folder))
    model = model_config(read_json(folder / "config.json"))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    mask_id = choose_mask(tokenizer, model.vocab_size, cfg.model.mask_token)
    shardings = parameter_shardings(model, mesh)
    return Source(model, tokenizer, mask_id, lambda: init_params(cfg.train.seed, model, shardings, dtype))


def _open_checkpoint(cfg: RunConfig, output: OutputFolder, mesh: Mesh, folder: Path, dtype) -> Source:
    loaded = load(
        cfg.model.path,
        dtype=dtype,
        shardings=lambda model: parameter_shardings(model, mesh),
        mask_token=cfg.model.mask_token,
    )
    _on_first_process(output, lambda: write_metadata(loaded, folder))
    params = [loaded.params]  # popped by the taker, so that nothing here keeps a second copy alive
    return Source(loaded.cfg, loaded.tokenizer, loaded.mask_id, params.pop)


def _create(cfg: RunConfig, folder: Path) -> None:
    """A new architecture with a tokenizer trained on the run's own chats."""
    from mars_jax.data.sources import training_chats
    from mars_jax.data.synthetic import train_tokenizer
    from mars_jax.models.scratch import create_folder

    tokenizer = train_tokenizer(training_chats(cfg.data), cfg.model.scratch.vocab_size)
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
