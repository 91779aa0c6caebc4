"""A step compiled for a TPU slice, and what the compiler says it needs: memory, work, communication."""

import dataclasses
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from mars_jax.config import RunConfig
from mars_jax.data.chat import Chat
from mars_jax.data.packing import placeholder_budget, placeholder_cost
from mars_jax.decoding.batch import Batch as DecodeBatch
from mars_jax.decoding.network import DecoderNetwork
from mars_jax.decoding.planning import plan_of
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.decoding.settings import Vocabulary
from mars_jax.decoding.step import step as decoding_step
from mars_jax.decoding.weights import decode_weights
from mars_jax.models import blockwise, splash
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import parameter_shapes
from mars_jax.objective.streams import Batch, Row, StreamConfig, build_streams
from mars_jax.objective.visibility import visible
from mars_jax.parallel import hlo
from mars_jax.parallel.mesh import row_shards
from mars_jax.parallel.roofline import Chip, Estimate, attention_flops, estimate, matrix_parameters, useful_train_flops
from mars_jax.training.setup import make_steps

MASK_ID = 3  # any id: shapes do not depend on it


class DoesNotFitError(Exception):
    """The compiled program needs more memory than a device has."""


@dataclass(frozen=True)
class Memory:
    """Bytes on each device. aliased: outputs that take over the buffers of donated arguments."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True)
class Compiled:
    """What a step needs on each device. flops: of matrix products, kernels included. largest: buffers, described."""

    memory: Memory
    flops: float
    counts: hlo.Counts
    estimate: Estimate
    largest: list[str]
    seconds_to_compile: float


def costliest_row(stream: StreamConfig) -> Batch:
    """A row filled by one chat, with as long an answer as its room for placeholders permits."""
    length = stream.row_length
    tokens = np.zeros(length, np.int32)
    for prompt in range(1, length):
        spans = np.array([[prompt, length]])
        if placeholder_cost(Chat(tokens, spans), stream) <= placeholder_budget(stream):
            break
    row = Row(tokens, np.ones(length, np.int32), np.arange(length, dtype=np.int32), spans)
    return build_streams(row, stream, np.random.default_rng(0))


def compile_train_step(cfg: RunConfig, model: ModelConfig, mesh: Mesh, chip: Chip) -> Compiled:
    """The training step of a configuration. Work that depends on the data is that of `costliest_row` in every row.

    Raises DoesNotFitError.
    """
    stream = cfg.objective.stream_config(MASK_ID)
    accumulation = cfg.train.accumulation
    rows = cfg.train.global_batch // accumulation
    steps = make_steps(cfg, model, mesh, total_steps=1000)
    lowered = steps.train.lower(steps.target, steps.batch_shapes(stream, accumulation, rows))
    program, seconds = _compile(lowered)

    row = costliest_row(stream)
    row_visibility = jax.tree.map(lambda a: a[None], row.visibility)
    rows_a_device = rows // row_shards(mesh)
    text = program.as_text()
    blockwise_tiles = int(blockwise.plan_tiles(row_visibility).count[0])
    counts = hlo.count(text, unknown_trips=blockwise_tiles * rows_a_device)
    kernel_flops = 0.0
    if "tpu_custom_call" in counts.kernels:
        tiles = int(splash.plan_tiles(row_visibility).useful.sum()) * rows_a_device * accumulation
        heads = model.num_heads // mesh.shape["tensor"]
        kernel_flops = _splash_flops_a_tile(model.head_dim, cfg.model.remat) * heads * model.num_layers * tiles
    entries = int((row.weight_ar + row.weight_mask > 0).sum())
    pairs = int(np.asarray(visible(row.visibility, row.visibility)).sum())
    tokens = int((row.visibility.segment > 0).sum())
    useful_flops = useful_train_flops(model, tokens, entries, pairs) * cfg.train.global_batch / mesh.size
    return Compiled(
        memory=_memory(program),
        flops=counts.flops + kernel_flops,
        counts=counts,
        estimate=estimate(counts, kernel_flops, useful_flops, chip),
        largest=hlo.largest_buffers(text),
        seconds_to_compile=seconds,
    )


def _splash_flops_a_tile(head_dim: int, remat: bool) -> float:
    """Of one head: two products forward (scores, mixing), three for dq, four for dk and dv, each over one tile."""
    products = 2 * (2 if remat else 1) + 3 + 4
    return products * 2.0 * splash.LANES**2 * head_dim


@dataclass(frozen=True)
class _Engine:
    """As much of a decoding engine as shapes depend on."""

    network: DecoderNetwork
    cfg: ModelConfig
    slots: int
    stop_ids: tuple[int, ...] = (MASK_ID,)


def compile_decode_step(
    model: ModelConfig, window: int, device, chip: Chip, *, slots: int, capacity: int, dtype
) -> Compiled:
    """One decoding forward of `slots` rows with room for `capacity` tokens, on one chip: decoding does not span chips.

    Raises DoesNotFitError.
    """
    here = SingleDeviceSharding(device)

    def placed(shapes):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes)

    model = dataclasses.replace(model, max_positions=max(capacity, model.max_positions))
    network = DecoderNetwork(model, dtype)
    request = Request((MASK_ID,), DecodeOptions(mode="window", window=window, max_new_tokens=capacity - 1))
    plan = plan_of([request.options], capacity)

    def make_inputs(params):
        batch = DecodeBatch(_Engine(network, model, slots), [request])
        state = batch.state._replace(cache=network.init_cache(slots, capacity))
        vocabulary = Vocabulary(jnp.ones(model.vocab_size, bool), jnp.int32(MASK_ID))
        return decode_weights(params, model, dtype), vocabulary, batch.settings, state

    inputs = placed(jax.eval_shape(make_inputs, parameter_shapes(model, dtype)))
    one_forward = jax.jit(decoding_step, static_argnums=(0, 1), donate_argnums=5)
    program, seconds = _compile(one_forward.lower(network, plan, *inputs))

    width = plan.real + plan.stops * plan.masks
    useful = slots * (
        2.0 * matrix_parameters(model) * width
        + 2.0 * model.vocab_size * model.hidden_size * (plan.drafts + 1 + plan.stops * plan.masks)
        + attention_flops(model, width * capacity)
    )
    text = program.as_text()
    counts = hlo.count(text)
    return Compiled(
        memory=_memory(program),
        flops=counts.flops,
        counts=counts,
        estimate=estimate(counts, 0.0, useful, chip),
        largest=hlo.largest_buffers(text),
        seconds_to_compile=seconds,
    )


def _memory(program) -> Memory:
    stats = program.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def _compile(lowered) -> tuple[jax.stages.Compiled, float]:
    began = time.perf_counter()
    try:
        return lowered.compile(), time.perf_counter() - began
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFitError(str(error).splitlines()[0]) from error
