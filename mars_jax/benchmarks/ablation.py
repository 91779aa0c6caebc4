"""What each choice of training brings: variants of one small stage-2 run, all from the same AR model."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import jax

from mars_jax.config import ObjectiveSection, RunConfig
from mars_jax.data.pipeline import make_eval_pipeline
from mars_jax.errors import UserError
from mars_jax.evaluation.tally import Tally
from mars_jax.generate import generate
from mars_jax.models.loading import LoadedModel, load
from mars_jax.training.loop import train
from mars_jax.training.metrics import read_metrics, to_host
from mars_jax.training.setup import make_steps, run_mesh
from mars_jax.training.step import loss_metrics

logger = logging.getLogger(__name__)

Messages = list[dict]
WIDTH = 3  # placeholders and drafts of every variant, so that forwards cost the same
TAU = 0.9
MAX_NEW_TOKENS = 96
YARDSTICK_BLOCK = 8


@dataclass(frozen=True)
class Variant:
    """One way to train. overrides: what it changes in `configs/ablation_mars.yaml`, as `mars_jax.train` takes it."""

    name: str
    overrides: tuple[str, ...] = ()


def _objective(**keys) -> tuple[str, ...]:
    return tuple(f"objective.{key}={json.dumps(value)}" for key, value in keys.items())


LORA = ("lora.rank=16", "lora.alpha=32")


VARIANTS = (
    Variant("ar_sft", _objective(recipe="ar_sft")),
    Variant("mars"),
    Variant("mars_seed1", ("train.seed=1",)),
    Variant("shifted", _objective(masks_per_block=4)),
    Variant("sequence", _objective(anchor="sequence")),
    Variant("paper", _objective(masks_per_block=4, anchor="sequence")),
    Variant("random_offset", _objective(random_offset=True)),
    Variant("half", _objective(block_fraction=0.5, random_offset=True)),
    Variant("quarter", _objective(block_fraction=0.25, random_offset=True)),
    # As many tokens in all as `mars`, of 1,536 and 1,280 a step where it has 1,792.
    Variant("half_same_cost", ("train.steps=210", *_objective(block_fraction=0.5, random_offset=True))),
    Variant("quarter_same_cost", ("train.steps=252", *_objective(block_fraction=0.25, random_offset=True))),
    Variant("b8", _objective(block_size=8)),
    Variant("b16", _objective(block_size=16)),
    Variant("mask_only", _objective(recipe="mars_mask_only")),
    Variant("mask_only_b8", _objective(recipe="mars_mask_only", block_size=8)),
    Variant("mask_only_b16", _objective(recipe="mars_mask_only", block_size=16)),
    Variant("block_diffusion", _objective(recipe="block_diffusion")),
    Variant("offset_weights", _objective(offset_weights=[1.0, 0.8, 0.64])),
    Variant("distill_half", _objective(distill=0.5)),
    Variant("distill", _objective(distill=1.0)),
    Variant("lora", LORA),
    Variant("lora_gated", (*LORA, "lora.mask_gated=true")),
)


@dataclass(frozen=True)
class Decoding:
    """Answers to the held-out prompts in one mode.

    acceptance_by_offset: share of forwards that took at least 1, 2, … tokens.
    right_answers, same_as_ar: shares of the prompts.
    """

    tokens_per_forward: float
    acceptance_by_offset: list[float]
    right_answers: float
    same_as_ar: float


@dataclass(frozen=True)
class Result:
    """What one variant cost and brought.

    settings:          what the figures depend on (`settings_of`).
    row_tokens:        of both streams, as laid out. tokens_per_step: of all rows of a step.
    trained_tokens_per_step: answer tokens, on average.
    seconds_per_step:  median.
    loss_ar:           on held-out chats, nats a trained token.
    accuracy:          on held-out chats, top-1, by number of placeholders looked through; on the same blocks for all.
    decoding:          by the names of `decode_options`.
    """

    name: str
    settings: dict
    row_tokens: int
    tokens_per_step: int
    trained_tokens_per_step: float
    seconds_per_step: float
    loss_ar: float
    accuracy: list[float | None]
    decoding: dict[str, Decoding]


def select(names: Sequence[str] | None) -> list[Variant]:
    """The named variants, in the order named; all if there are no names."""
    known = {variant.name: variant for variant in VARIANTS}
    for name in names or ():
        if name not in known:
            raise UserError(f"--only {name!r}: expected some of {', '.join(known)}")
    return [known[name] for name in names or known]


def settings_of(cfg: RunConfig, prompts: int) -> dict:
    sections = {name: asdict(getattr(cfg, name)) for name in ("data", "objective", "optimizer", "schedule", "train")}
    if cfg.lora.rank:
        sections["lora"] = asdict(cfg.lora)
    return json.loads(json.dumps({"prompts": prompts, **sections}))  # tuples as they come back from a file


def decode_options(objective: ObjectiveSection) -> dict[str, dict]:
    """How a variant is decoded: with `WIDTH`, and with as many placeholders as its blocks had.

    Placeholders of block diffusion predict the token they stand for: its own mode reads them so.
    """
    options = {"ar": {"mode": "ar"}}
    if objective.recipe == "block_diffusion":
        return options | {"diffusion": {"mode": "diffusion", "tau": TAU, "window": objective.block_size}}
    own = objective.stream_config(mask_id=0).masks_per_block
    for suffix, width in (("", WIDTH), *([("_own", own)] if own != WIDTH else [])):
        options["window" + suffix] = {"mode": "window", "tau": TAU, "window": width}
        options["tree" + suffix] = {"mode": "verify", "layout": "tree", "draft": width}
    return options


def train_to_end(cfg: RunConfig) -> bool:
    """Train, or continue; false if SIGTERM stopped it before its last step."""
    train(cfg)
    return _train_lines(cfg)[-1]["step"] == cfg.train.steps


def _train_lines(cfg: RunConfig) -> list[dict]:
    lines = read_metrics(Path(cfg.output_dir) / "metrics.jsonl")
    return [line for line in lines if line["split"] == "train"]


def run_variant(name: str, cfg: RunConfig, chats: Sequence[Messages]) -> Result | None:
    """Train a variant, or continue it, and measure it; None if SIGTERM stopped the training."""
    if not train_to_end(cfg):
        return None
    lines = _train_lines(cfg)
    model = load(cfg.output_dir, step=cfg.train.steps)
    row_tokens = cfg.objective.stream_config(model.mask_id).length
    loss_ar, accuracy = held_out_figures(cfg, model)
    return Result(
        name=name,
        settings=settings_of(cfg, len(chats)),
        row_tokens=row_tokens,
        tokens_per_step=row_tokens * cfg.train.global_batch,
        trained_tokens_per_step=mean(line["trained_tokens"] for line in lines),
        seconds_per_step=median(line["step_seconds"] for line in lines),
        loss_ar=loss_ar,
        accuracy=accuracy,
        decoding=decode_all(model, chats, decode_options(cfg.objective)),
    )


def held_out_figures(cfg: RunConfig, model: LoadedModel) -> tuple[float, list[float | None]]:
    """Loss of the AR stream and accuracy by offset, measured with one objective whatever the model was trained with."""
    yardstick = ObjectiveSection(
        block_size=YARDSTICK_BLOCK, random_offset=True, row_length=cfg.objective.row_length, attention="dense"
    )
    mesh = run_mesh(cfg)
    steps = make_steps(dataclasses.replace(cfg, objective=yardstick), model.cfg, mesh, total_steps=1)
    stream = yardstick.stream_config(model.mask_id)
    chats = make_eval_pipeline(cfg.data, stream, model.tokenizer, global_batch_rows=cfg.train.global_batch)
    params = jax.device_put(model.params, steps.shardings.all_params)
    parts = [steps.evaluate(params, steps.to_device(chats.batch(n))) for n in range(chats.num_batches)]
    figures = to_host(loss_metrics(*jax.tree.map(lambda *leaves: sum(leaves), *parts), steps.options))
    return figures["loss_ar"], figures["accuracy"]


def decode_all(model: LoadedModel, chats: Sequence[Messages], options: dict[str, dict]) -> dict[str, Decoding]:
    """Each chat's last answer in every mode; `ar` comes first."""
    prompts = [chat[:-1] for chat in chats]
    found, ar = {}, None
    for name, values in options.items():
        generations = generate(model, prompts, max_new_tokens=MAX_NEW_TOKENS, **values)
        ar = ar or generations
        tally = Tally()
        for g in generations:
            tally.add(g.accepted, prompt_tokens=g.prompt_tokens, seconds=0.0, truncated=False)
        counts = tally.summary()
        found[name] = Decoding(
            tokens_per_forward=counts["tokens_per_forward"],
            acceptance_by_offset=counts["acceptance_by_offset"],
            right_answers=mean(g.text == chat[-1]["content"] for g, chat in zip(generations, chats, strict=True)),
            same_as_ar=mean(g.token_ids == a.token_ids for g, a in zip(generations, ar, strict=True)),
        )
        logger.info("%s: %.2f tokens per forward", name, found[name].tokens_per_forward)
    return found


def write_result(result: Result, path: Path) -> None:
    """The file appears whole: it is what says that the variant is finished."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    partial.replace(path)


def read_result(path: Path) -> Result | None:
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Result(**values | {"decoding": {name: Decoding(**d) for name, d in values["decoding"].items()}})


def is_finished(path: Path, cfg: RunConfig, prompts: int) -> bool:
    """Whether the result is there. Raises UserError where it is that of other settings."""
    result = read_result(path)
    if result is None:
        return False
    wanted = settings_of(cfg, prompts)
    differing = [name for name in wanted if result.settings.get(name) != wanted[name]]
    if differing:
        raise UserError(
            f"{path}: measured with other settings ({', '.join(differing)}): remove its folder or change --output"
        )
    return True
