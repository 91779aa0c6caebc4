"""Everything of a Hugging Face folder but the weights: config, tokenizer, chat template, generation config, licences.

The source's files are copied and patched only where something changed: whatever reads the source reads the result.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mars_jax.models.loading import LoadedModel

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.jinja",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
MARKER = "mars_jax.json"  # what the formats of others have no key for
TENSOR_DTYPES = "source_tensors.json"  # in a run's folder: what the export of its checkpoints has to write


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the user's. Raises `UserError` if it is missing, broken or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:  # of the JSON or of its UTF-8
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_metadata(model: "LoadedModel", out: Path) -> None:
    """Write what a run keeps of its source, so that its checkpoints alone make a complete model again."""
    out.mkdir(parents=True, exist_ok=True)
    copy_files(model, out)
    write_json(out / TENSOR_DTYPES, model.tensor_dtypes)


def copy_files(model: "LoadedModel", out: Path) -> None:
    """Copy config, tokenizer and licences of the source; record `[MASK]`, the chat template and the end tokens."""
    for pattern in COPIED_FILES:
        for path in filter(Path.is_file, model.hf_folder.glob(pattern)):
            shutil.copyfile(path, out / path.name)
    if (out / "tokenizer.json").exists():
        _record_mask(model, out)
        _record_template(model.tokenizer.chat_template, out)
    else:  # a tokenizer of other files is converted by transformers; write what it made of them
        model.tokenizer.save_pretrained(out)
        _record_template(model.tokenizer.chat_template, out)
    _record_generation_config(model, out)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", out: Path) -> None:
    """Write a tokenizer that has no source files, under names that transformers 4 knows too."""
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = read_json(path)
    special = config.pop("extra_special_tokens", [])
    renamed = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {"additional_special_tokens": special} if special else {}
    )
    write_json(path, {**config, **renamed})


def _patch(path: Path, changes: Mapping[str, Any]) -> None:
    """Set top-level keys of a JSON file; leaves the file alone, byte for byte, where they already hold."""
    before = read_json(path)
    if any(before.get(key) != value for key, value in changes.items()):
        write_json(path, {**before, **changes})


def _text(token) -> str | None:
    """The text of a special token in a tokenizer's JSON: a string, or a dict with its flags."""
    return token["content"] if isinstance(token, dict) else token


def _record_mask(model: "LoadedModel", out: Path) -> None:
    token, mask_id = model.tokenizer.mask_token, model.mask_id
    flags = {
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    added = read_json(out / "tokenizer.json").get("added_tokens", [])
    if all(entry["id"] != mask_id for entry in added):
        _patch(out / "tokenizer.json", {"added_tokens": [*added, {"id": mask_id, **flags}]})
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if not (out / name).exists():
            continue
        config = read_json(out / name)
        if _text(config.get("mask_token")) != token:
            _patch(out / name, {"mask_token": token})
        known = config.get("added_tokens_decoder")
        if known is not None and str(mask_id) not in known:
            _patch(out / name, {"added_tokens_decoder": {**known, str(mask_id): flags}})


def _record_template(template, out: Path) -> None:
    """In both places where readers look: some know only `tokenizer_config.json`, others prefer the file."""
    if isinstance(template, str):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
        _patch(out / "tokenizer_config.json", {"chat_template": template})


def _record_generation_config(model: "LoadedModel", out: Path) -> None:
    path = out / "generation_config.json"
    if path.exists():
        return
    config = read_json(out / "config.json")
    stops = list(model.stop_ids)
    ids = {"bos_token_id": config.get("bos_token_id"), "pad_token_id": config.get("pad_token_id")}
    ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
    write_json(path, {"_from_model_config": True} | {key: value for key, value in ids.items() if value is not None})
