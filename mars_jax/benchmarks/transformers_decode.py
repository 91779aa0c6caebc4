"""Greedy decoding with `transformers`, to compare with; needs torch."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mars_jax.models.loading import LoadedModel


def through_transformers(
    folder: Path, model: LoadedModel, prompts: Sequence[tuple[int, ...]], batch: int, limit: int
) -> Callable[[], list[tuple[list[int], list[int]]]]:
    """A function that decodes all prompts with `generate` of the exported checkpoint, `batch` left-padded at a time.

    It returns token ids and run lengths (of one) of every prompt; ids that `model` may not emit are suppressed.
    """
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    banned = np.flatnonzero(~np.asarray(model.emit_mask)).tolist()

    def answer(rows):
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
        attended = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        made = network.generate(
            input_ids=ids,
            attention_mask=attended,
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=list(model.stop_ids),
            pad_token_id=model.stop_ids[0],
            suppress_tokens=banned or None,
        )
        return [_until_stop(row[width:].tolist(), model.stop_ids) for row in made]

    def decode():
        with torch.inference_mode():
            answers = [ids for first in range(0, len(prompts), batch) for ids in answer(prompts[first : first + batch])]
        return [(ids, [1] * len(ids)) for ids in answers]

    return decode


def _until_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    """The ids up to and including the first end token: what follows in a batch is padding."""
    ends = [i for i, token in enumerate(ids) if token in stop_ids]
    return ids[: ends[0] + 1] if ends else ids
