"""What one decoding step costs: measured, counted by the compiler, and against the machine's own limits."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.benchmarks.decode import Variant
from mars_jax.benchmarks.records import Records
from mars_jax.decoding import loop
from mars_jax.decoding.batch import Batch
from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import Request
from mars_jax.models.loading import LoadedModel
from mars_jax.parallel import hlo

STEPS = 8  # timed at once


@dataclass(frozen=True)
class Machine:
    """Measured here: bytes a second of reading weights, and flops a second of a large matrix product."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class StepCost:
    """One step of a full batch, every row after `context` tokens.

    seconds: median. flops, bytes: from the compiled program. bound: seconds that the machine needs at least for them.
    """

    name: str
    batch: int
    context: int
    seconds: float
    flops: float
    bytes: float
    bound: float

    @property
    def roofline_share(self) -> float:
        return self.bound / self.seconds


def measure_machine() -> Machine:
    """Both limits, from the operations that decoding consists of."""
    weights, vector = jnp.ones((16384, 8192), jnp.float32), jnp.ones((8192, 1), jnp.float32)
    read = _seconds(jnp.matmul, weights, vector)
    square = jnp.ones((2048, 2048), jnp.float32)
    multiply = _seconds(jnp.matmul, square, square)
    return Machine(weights.nbytes / read, 2 * 2048**3 / multiply)


def _seconds(compute, *arrays: jax.Array, repeats: int = 5) -> float:
    compiled = jax.jit(compute)  # arrays are arguments: as constants they would be copied, or folded away
    jax.block_until_ready(compiled(*arrays))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        taken.append(time.perf_counter() - began)
    return min(taken)


def best_machine(records: Records) -> Machine:
    """The best of what was measured before and now: whatever else runs can only hide the limits."""
    records.add("machine", **dataclasses.asdict(measure_machine()))
    measured = [_values(entry) for entry in records.of("machine")]
    return Machine(**{limit: max(values[limit] for values in measured) for limit in measured[0]})


def costs(records: Records, machine: Machine) -> list[StepCost]:
    """Of everything recorded, by batch size."""
    found = []
    for entry in records.of("step"):
        bound = max(entry["bytes"] / machine.bytes_per_second, entry["flops"] / machine.flops_per_second)
        found.append(StepCost(**_values(entry), bound=bound))
    return sorted(found, key=lambda cost: cost.batch)


def _values(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if key != "kind"}


def measure_steps(
    model: LoadedModel,
    chosen: Sequence[Variant],
    batches: Sequence[int],
    context: int,
    repeats: int,
    records: Records,
) -> None:
    """Record steps of the variants at every batch size, timed in turns; those that adapt have no step of their own.

    No row ends: the model's end tokens do not count.
    """
    endless = dataclasses.replace(model, stop_ids=())
    for size in batches:
        missing = [v for v in chosen if not v.adapt and not records.of("step", batch=size, name=v.name)]
        if not missing:
            continue
        engine = DecodeEngine(endless, slots=size)
        ready = {variant.name: _full_batch(engine, variant, context, repeats) for variant in missing}
        taken = {name: [] for name in ready}
        for turn in range(repeats + 1):
            for name, batch in ready.items():
                began = time.perf_counter()
                batch.make_room(STEPS)
                jax.block_until_ready(batch.step(STEPS, until_one_finishes=False))
                if turn:
                    taken[name].append((time.perf_counter() - began) / STEPS)
        for name, batch in ready.items():
            counts = _counts(batch)
            records.add(
                "step",
                name=name,
                batch=size,
                context=context,
                seconds=float(np.median(taken[name])),
                flops=counts.flops,
                bytes=counts.bytes,
            )


def _full_batch(engine: DecodeEngine, variant: Variant, context: int, repeats: int) -> Batch:
    """Every slot after a prompt of `context` ids that the model may emit, with room for all timed steps."""
    room = (repeats + 2) * STEPS * (variant.options.width + 1)
    options = dataclasses.replace(variant.options, max_new_tokens=room)
    allowed = np.flatnonzero(np.asarray(engine.vocabulary.emit))
    rng = np.random.default_rng(0)
    requests = [Request(tuple(rng.choice(allowed, context).tolist()), options) for _ in range(engine.slots)]
    batch = Batch(engine, requests)
    for row, request in enumerate(requests):
        batch.insert(row, request, seed=row)
    return batch


def _counts(batch: Batch):
    """Flops and bytes of one step, from the compiled program."""
    engine = batch.engine
    step = partial(loop.decode.lower, engine.network, batch.plan, batch.weights, engine.vocabulary)
    program = step(batch.settings, batch.state, np.int32(1), np.bool_(False)).compile()
    return hlo.count(program.as_text())  # the loop's body once: one step


def as_record(costs: Sequence[StepCost], machine: Machine) -> dict:
    steps = [dataclasses.asdict(cost) | {"roofline_share": cost.roofline_share} for cost in costs]
    return {"machine": dataclasses.asdict(machine), "steps": steps}


def table(costs: Sequence[StepCost], machine: Machine) -> str:
    """Plain text, one line a variant and batch size."""
    heads = ("ms a step", "GFLOP", "MB moved", "bound ms", "of roofline")
    lines = [f"{'batch':>5}  {'':20}" + "".join(f"{head:>13}" for head in heads)]
    for c in costs:
        cells = (
            f"{c.seconds * 1e3:.1f}",
            f"{c.flops / 1e9:.2f}",
            f"{c.bytes / 1e6:.0f}",
            f"{c.bound * 1e3:.1f}",
            f"{c.roofline_share:.0%}",
        )
        lines.append(f"{c.batch:5}  {c.name:20}" + "".join(f"{cell:>13}" for cell in cells))
    lines.append(
        f"after {costs[0].context} tokens; measured limits here: {machine.bytes_per_second / 1e9:.1f} GB/s, "
        f"{machine.flops_per_second / 1e9:.0f} GFLOP/s"
    )
    return "\n".join(lines)
