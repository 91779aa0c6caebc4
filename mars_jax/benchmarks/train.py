"""What a training step costs: plain SFT, MARS and the paper's way on the same chats, side by side in one run."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from mars_jax.config import ObjectiveSection, RunConfig
from mars_jax.data.chat import Chat, encode_chats
from mars_jax.data.packing import best_room, fit, make_row, pack
from mars_jax.data.sources import training_chats
from mars_jax.errors import UserError
from mars_jax.models.blockwise import TILE, plan_tiles
from mars_jax.objective.streams import Batch, StreamConfig, build_streams, empty_row, stack
from mars_jax.objective.visibility import Tokens, visible
from mars_jax.parallel import hlo
from mars_jax.parallel.mesh import row_shards
from mars_jax.training.output import open_output
from mars_jax.training.setup import Steps, make_steps, run_mesh
from mars_jax.training.source import open_source
from mars_jax.training.state import init_state

log = logging.getLogger(__name__)

SAMPLED_FRACTION = 0.25


@dataclass(frozen=True)
class Variant:
    """One way to train on the chats. label: for tables."""

    name: str
    label: str
    objective: ObjectiveSection


@dataclass(frozen=True)
class Cost:
    """One pass over the chats: forward, backward and update, all devices together.

    rows, row_tokens: packed rows, and tokens of both streams in each. trained_tokens: the same for every variant.
    noisy_length:     placeholders a row has room for: the value for `objective.noisy_length` that suits these chats.
    flops:   of matrix products in the compiled program. bytes: read and written by its instructions.
    memory:  peak bytes a device: arguments, results and temporaries of the compiled program.
    seconds: median of the timed passes; None if none was timed.
    tiles_computed, tiles_useful: attention tiles of a layer, and those in which some key is visible.
    """

    name: str
    label: str
    rows: int
    row_tokens: int
    noisy_length: int
    trained_tokens: int
    flops: float
    bytes: float
    memory: int
    temporaries: int
    seconds: float | None
    tiles_computed: int
    tiles_useful: int


def variants(objective: ObjectiveSection) -> list[Variant]:
    """SFT, MARS with all and with sampled blocks, and the paper's layout, from one configuration."""
    mars = dataclasses.replace(objective, recipe="mars", block_fraction=1.0, random_offset=False, noisy_length=None)
    return [
        Variant("sft", "packed SFT", dataclasses.replace(mars, recipe="ar_sft")),
        Variant("mars", "MARS, every block", mars),
        Variant(
            "mars_sampled",
            f"MARS, {SAMPLED_FRACTION:.0%} of blocks",
            dataclasses.replace(mars, block_fraction=SAMPLED_FRACTION, random_offset=True),
        ),
        Variant(
            "dense_2l",
            "dense 2L (the paper's way)",
            dataclasses.replace(
                mars,
                anchor="sequence",
                masks_per_block=objective.block_size,
                noisy_length=objective.row_length,
                attention="dense",
                logits_chunk=2 * objective.row_length,  # logits of all positions at once
            ),
        ),
    ]


def read_chats(cfg: RunConfig, tokenizer, mask_id: int, count: int) -> list[Chat]:
    """The first `count` chats with something to train that fit a row whole."""
    stream = dataclasses.replace(cfg.objective, recipe="ar_sft").stream_config(mask_id)
    encoded = encode_chats(training_chats(cfg.data)[: 2 * count], tokenizer)
    chats = [chat for chat in encoded if isinstance(chat, Chat) and len(chat.tokens) <= stream.row_length]
    chats = [fitted for chat in chats if (fitted := fit(chat, stream))][:count]
    if len(chats) < count:
        raise UserError(
            f"--chats {count}: of the first {2 * count} chats of {cfg.data.path}, {len(chats)} have something to train "
            f"and at most objective.row_length={stream.row_length} tokens"
        )
    return chats


def fitting_stream(variant: Variant, chats: Sequence[Chat], mask_id: int) -> StreamConfig:
    """The variant's rows, with the room for placeholders that lets these chats go into the fewest tokens."""
    stream = variant.objective.stream_config(mask_id)
    if variant.objective.noisy_length is not None or stream.recipe == "ar_sft":
        return stream
    return best_room(chats, stream)


def make_batch(chats: Sequence[Chat], stream: StreamConfig, rows_at_once: int) -> Batch:
    """All chats as micro-batches `[A, rows_at_once, …]`, at least two, filled up with empty rows."""
    fitted = [fit(chat, stream) for chat in chats]
    rng = np.random.default_rng(0)
    rows = [build_streams(make_row([fitted[i] for i in row]), stream, rng) for row in pack(fitted, stream)]
    while len(rows) % rows_at_once or len(rows) < 2 * rows_at_once:
        rows.append(empty_row(stream))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, rows_at_once, *leaf.shape[1:]), stack(rows))


def count_tiles(visibility: Tokens, attention: str) -> tuple[int, int]:
    """`(computed, useful)` attention tiles of one layer, from visibility `[R, T]` of all rows.

    Useful ones are counted from the mask itself, not from the plan that decides which are computed.
    """
    rows, length = visibility.segment.shape
    tiles = -(-length // TILE)
    mask = np.zeros((rows, tiles * TILE, tiles * TILE), bool)
    mask[:, :length, :length] = jax.jit(visible)(visibility, visibility)
    useful = int(mask.reshape(rows, tiles, TILE, tiles, TILE).any((2, 4)).sum())
    computed = rows * tiles**2 if attention == "dense" else int(jax.jit(plan_tiles)(visibility).count[0])
    return computed, useful


def used_chunks(batch: Batch, chunk: int) -> float:
    """Share of the chunks of loss entries that hold any; the others are skipped."""
    weights = np.asarray(batch.weight_ar + batch.weight_mask)
    chunk = min(chunk, weights.shape[-1])
    weights = np.pad(weights, ((0, 0), (0, 0), (0, -weights.shape[-1] % chunk)))
    return float((weights.reshape(*weights.shape[:2], -1, chunk) > 0).any((1, 3)).mean())


@dataclass
class Prepared:
    """A variant compiled for its batch, and the seconds of its passes so far."""

    variant: Variant
    steps: Steps
    batch: Batch
    compiled: jax.stages.Compiled
    seconds: list[float] = dataclasses.field(default_factory=list)


def prepare(cfg: RunConfig, variant: Variant, model, mask_id: int, chats: Sequence[Chat], mesh: Mesh) -> Prepared:
    stream = fitting_stream(variant, chats, mask_id)
    batch = make_batch(chats, stream, cfg.train.global_batch // cfg.train.accumulation)
    count, rows = batch.tokens.shape[:2]
    objective = dataclasses.replace(variant.objective, noisy_length=stream.noisy_length)
    train = dataclasses.replace(cfg.train, global_batch=count * rows, accumulation=count)
    steps = make_steps(dataclasses.replace(cfg, objective=objective, train=train), model, mesh, total_steps=1000)
    log.info("compiling %s: %d rows of %d tokens", variant.label, count * rows, stream.length)
    compiled = steps.train.lower(steps.target, steps.batch_shapes(stream, count, rows)).compile()
    return Prepared(variant, steps, batch, compiled)


def cost(prepared: Prepared, mesh: Mesh) -> Cost:
    batch, objective = prepared.batch, prepared.variant.objective
    micro_batches, rows, row_tokens = batch.tokens.shape
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch.visibility)
    computed, useful = count_tiles(flat, objective.attention)
    counts = hlo.count(
        prepared.compiled.as_text(),
        unknown_trips=computed / micro_batches / row_shards(mesh),
        taken=used_chunks(batch, objective.logits_chunk),
    )
    memory = prepared.compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Cost(
        name=prepared.variant.name,
        label=prepared.variant.label,
        rows=micro_batches * rows,
        row_tokens=row_tokens,
        noisy_length=row_tokens - objective.row_length,
        trained_tokens=int(batch.trained.sum()),
        flops=counts.flops * mesh.size,
        bytes=counts.bytes * mesh.size,
        memory=kept + memory.temp_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        seconds=float(np.median(prepared.seconds)) if prepared.seconds else None,
        tiles_computed=computed,
        tiles_useful=useful,
    )


def measure(cfg: RunConfig, chats: int, repeats: int) -> list[Cost]:
    """Costs of every variant on the same chats; `repeats` timed passes each, taken in turns; 0 only compiles."""
    if cfg.lora.mask_gated:
        raise UserError("lora.mask_gated=true: plain SFT, the yardstick here, has no placeholders; set it to false")
    mesh = run_mesh(cfg)
    with open_output(cfg.output_dir) as output:
        source = open_source(cfg, output, mesh, continues=False)
    encoded = read_chats(cfg, source.tokenizer, source.mask_id, chats)
    prepared = [
        prepare(cfg, variant, source.model, source.mask_id, encoded, mesh) for variant in variants(cfg.objective)
    ]
    if repeats:
        state = init_state(source.take_params(), prepared[0].steps.optimizer, prepared[0].steps.shardings)
        arrays = [p.steps.to_device(p.batch) for p in prepared]
        for turn in range(repeats + 1):  # the first turn warms up
            for p, batch in zip(prepared, arrays, strict=True):
                began = time.perf_counter()
                state, metrics = p.compiled(state, batch)
                jax.block_until_ready((state, metrics))
                if turn:
                    p.seconds.append(time.perf_counter() - began)
                log.info("%s: %.2f s%s", p.variant.label, time.perf_counter() - began, "" if turn else " (warm-up)")
    return [cost(p, mesh) for p in prepared]
