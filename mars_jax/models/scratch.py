"""A new model: the folder that a run trained from scratch keeps in place of a source's."""

import json
from pathlib import Path

import jax
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_jax.errors import UserError
from mars_jax.models.config import ModelConfig
from mars_jax.models.families import hf_config, tensor_names
from mars_jax.models.hf_folder import TENSOR_DTYPES, save_tokenizer, write_json


def create_folder(out: Path, cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: str = "float32") -> None:
    """Write `config.json`, `generation_config.json` and the tokenizer of an architecture that has no weights yet.

    dtype: the type in which its weights will be exported.

    Raises `UserError` for a tokenizer that `transformers` would not give back as it is.
    """
    out.mkdir(parents=True, exist_ok=True)
    ids = {role: getattr(tokenizer, role) for role in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "config.json", {**hf_config(cfg), "dtype": dtype, **ids})
    write_json(out / "generation_config.json", {"_from_model_config": True, **ids})
    stored = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    names = [name for entry in jax.tree.leaves(tensor_names(cfg)) for name in entry.names]
    write_json(out / TENSOR_DTYPES, dict.fromkeys(names, stored))
    save_tokenizer(tokenizer, out)
    _check_reload(out, cfg, tokenizer)


def _check_reload(out: Path, cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """`AutoTokenizer` rebuilds the text splitting of some families from code, whatever `tokenizer.json` says."""

    def splitting(tok):
        described = json.loads(tok.backend_tokenizer.to_str())
        return described["normalizer"], described["pre_tokenizer"]

    reloaded = AutoTokenizer.from_pretrained(out, local_files_only=True)
    if splitting(reloaded) != splitting(tokenizer):
        raise UserError(
            f"transformers replaces the way this tokenizer splits text for family={cfg.family!r}, "
            "so it would cut the same text differently after export; use family 'llama'"
        )
