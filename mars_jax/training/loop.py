"""A training run from configuration to last checkpoint: the only place where steps, files and signals meet."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from mars_jax.config import RunConfig, dump_config
from mars_jax.data.pipeline import Pipeline, make_eval_pipeline, make_pipeline
from mars_jax.errors import UserError
from mars_jax.models.parameters import split
from mars_jax.objective.streams import Batch
from mars_jax.parallel.mesh import row_parts
from mars_jax.training.checkpoint import Checkpoints, run_metadata
from mars_jax.training.metrics import MetricsLog, peak_memory_bytes, to_host
from mars_jax.training.optimizer import decayed_names
from mars_jax.training.output import OutputFolder, open_output
from mars_jax.training.preemption import Preemption, watch_preemption
from mars_jax.training.progress import Progress
from mars_jax.training.report import draw_report
from mars_jax.training.setup import Steps, make_steps, run_mesh
from mars_jax.training.source import Source, open_source
from mars_jax.training.state import TrainState, init_state
from mars_jax.training.step import loss_metrics

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite."""


def train(cfg: RunConfig) -> None:
    """Run, or continue, the training that `cfg` describes; returns when it is done or was asked to stop by SIGTERM."""
    with open_output(cfg.output_dir) as output:
        _train(cfg, output)


def _train(cfg: RunConfig, output: OutputFolder) -> None:
    folder = output.local
    mesh = run_mesh(cfg)
    checkpoints = Checkpoints(output.checkpoints, cfg.train.keep, cfg.train.keep_best)
    found = checkpoints.steps()
    if found and not cfg.train.resume:
        raise UserError(
            f"train.resume=false, but {output.place} holds checkpoints {found}: "
            "choose another output_dir or remove them"
        )
    source = open_source(cfg, output, mesh, continues=bool(found))
    data, held_out = open_data(cfg, source, row_parts(mesh))
    total = data.num_batches or cfg.train.steps
    steps = make_steps(cfg, source.model, mesh, total)
    metadata = run_metadata(cfg, source.model)
    batches = data.iterator()
    state = checkpoints.restore(steps.target, batches, metadata)
    if state is None:
        state = init_state(source.take_params(), steps.optimizer, steps.shardings)
    elif steps.shardings.frozen is not None:  # checkpoints hold what is trained
        state = state._replace(frozen=split(source.take_params())[0])
    start = int(state.step)
    log.info("weight decay of %g on: %s", cfg.optimizer.weight_decay, ", ".join(decayed_names(source.model)))
    log.info("%s at step %d of %d, mesh %s", "continuing" if found else "starting", start, total, dict(mesh.shape))
    if jax.process_index() == 0:
        (folder / "config.yaml").write_text(dump_config(cfg), encoding="utf-8")
    metrics = MetricsLog(
        folder, start, cfg.logging.tensorboard, cfg.logging.wandb_project, config=dataclasses.asdict(cfg)
    )
    skipped = start - int(optax.tree.get(state.opt_state, "count"))
    run = Run(cfg, output, steps, checkpoints, metrics, metadata, held_out, total, skipped)
    # Whatever ends the run, a checkpoint under way is finished first.
    with watch_preemption() as preemption, contextlib.closing(metrics), contextlib.closing(checkpoints):
        run.until_done(state, start, batches, preemption)
    if jax.process_index() == 0 and (picture := draw_report(folder)):
        log.info("curves: %s", picture)


def open_data(cfg: RunConfig, source: Source, share: tuple[tuple[int, ...], int]) -> tuple[Pipeline, Pipeline | None]:
    """This process's `row_parts` of the training batches and, if the run evaluates, of the held-out ones."""
    stream = cfg.objective.stream_config(source.mask_id)
    parts, count = share
    data = make_pipeline(
        cfg.data,
        stream,
        source.tokenizer,
        global_batch_rows=cfg.train.global_batch,
        accumulation=cfg.train.accumulation,
        seed=cfg.train.seed,
        parts=parts,
        num_parts=count,
        epochs=cfg.train.epochs,
    )
    if not cfg.train.eval_every:
        return data, None
    rows = cfg.train.global_batch // cfg.train.accumulation
    held_out = make_eval_pipeline(
        cfg.data, stream, source.tokenizer, global_batch_rows=rows, parts=parts, num_parts=count
    )
    return data, held_out


@dataclass
class Pending:
    """A dispatched step whose figures have not been read."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch
    data_seconds: float


@dataclass
class Run:
    """A run under way."""

    cfg: RunConfig
    output: OutputFolder
    steps: Steps
    checkpoints: Checkpoints
    metrics: MetricsLog
    metadata: dict[str, Any]
    held_out: Pipeline | None
    total: int
    skipped: int
    last_read: float = 0.0
    tracing: bool = False

    def until_done(self, state: TrainState, start: int, batches: Iterator[Batch], preemption: Preemption) -> None:
        """Steps, each read while the next one computes; evaluations and checkpoints between them."""
        cfg = self.cfg.train
        self.progress = Progress(start, self.total)
        train_step = None
        pending = None
        for step in range(start + 1, self.total + 1):
            if preemption.reached(step):
                break
            self._profile(step)
            began = time.perf_counter()
            batch = next(batches)
            arrays = self.steps.to_device(batch)
            data_seconds = time.perf_counter() - began
            if train_step is None:
                train_step = self._compile(state, arrays, step)
            state, figures = train_step(state, arrays)
            self._read(pending)
            pending = Pending(step, figures, batch, data_seconds)
            evaluates = self.held_out is not None and (step % cfg.eval_every == 0 or step == self.total)
            saves = step % cfg.save_every == 0 or step == self.total
            if evaluates or saves:
                pending = self._read(pending)
                held_out = self._evaluate(state, step) if evaluates else None
                if saves:
                    self._save(state, step, batches, held_out)
        self._read(pending)
        self.progress.close()
        if self.tracing:
            jax.profiler.stop_trace()
        done = int(state.step)
        if done < self.total:
            if done not in self.checkpoints.steps():
                self._save(state, done, batches, None)
            log.info("stopped by SIGTERM at step %d of %d; the same command continues it", done, self.total)

    def _compile(self, state: TrainState, arrays: Batch, step: int):
        log.info("compiling the step")
        began = time.perf_counter()
        compiled = self.steps.train.lower(state, arrays).compile()
        seconds = time.perf_counter() - began
        log.info("compiled the step in %.1f s", seconds)
        self.metrics.write("event", step, {"event": "compile", "seconds": seconds})
        self.last_read = time.perf_counter()
        return compiled

    def _read(self, pending: Pending | None) -> None:
        """Wait for a step's figures, check and log them."""
        if pending is None:
            return
        values = to_host(pending.metrics)
        now = time.perf_counter()
        seconds, self.last_read = now - self.last_read, now
        if not values.pop("finite"):
            self._not_finite(pending, values)
        values |= {
            "step_seconds": seconds,
            "data_seconds": pending.data_seconds,
            "trained_tokens_per_second": values["trained_tokens"] / seconds,
            "peak_memory_gib": peak_memory_bytes() / 2**30,
            "skipped_steps": self.skipped,
        }
        if pending.step % self.cfg.logging.every == 0:
            self.metrics.write("train", pending.step, values)
        figures = (
            "loss {loss:.4f}  ar {loss_ar:.4f}  grad {grad_norm:.3g}  {trained_tokens_per_second:.0f} trained tok/s"
        )
        self.progress.update(pending.step, figures.format(**values))

    def _not_finite(self, pending: Pending, values: dict) -> None:
        """The step left the weights as they were; stop, or count it and go on."""
        kept = self.output.local / f"nonfinite_step_{pending.step}_process_{jax.process_index()}.npz"
        fields = {
            "/".join(str(getattr(k, "name", k)) for k in path): leaf
            for path, leaf in jax.tree.leaves_with_path(pending.batch)
        }
        np.savez_compressed(kept, **fields)
        first = (pending.step - 1) * self.cfg.train.global_batch
        message = (
            f"step {pending.step}: loss {values['loss']}, gradient norm {values['grad_norm']}; "
            f"batch {pending.step - 1}, rows {first} to {first + self.cfg.train.global_batch - 1} in shuffled order, "
            f"kept in {kept}"
        )
        if self.cfg.train.nonfinite == "stop":
            raise NonFiniteError(message + "; train.nonfinite=skip would go on without such batches")
        self.skipped += 1
        log.warning("%s; skipped (%d so far)", message, self.skipped)

    def _evaluate(self, state: TrainState, step: int) -> dict[str, Any]:
        """Losses and accuracies on the held-out chats, averaged over their trained tokens."""
        began = time.perf_counter()
        totals = None
        for number in range(min(self.held_out.num_batches, self.cfg.train.eval_batches)):
            sums = self.steps.evaluate(state.all_params, self.steps.to_device(self.held_out.batch(number)))
            totals = sums if totals is None else jax.tree.map(jax.numpy.add, totals, sums)
        values = to_host(loss_metrics(*totals, self.steps.options))
        values["seconds"] = time.perf_counter() - began
        self.metrics.write("eval", step, values)
        log.info(
            "step %d  held-out loss %.4f  ar %.4f  accuracy by placeholders looked through %s",
            step,
            values["loss"],
            values["loss_ar"],
            " ".join("-" if value is None else f"{value:.3f}" for value in values["accuracy"]),
        )
        self.last_read = time.perf_counter()
        return values

    def _save(self, state: TrainState, step: int, batches: Iterator[Batch], held_out: dict | None) -> None:
        began = time.perf_counter()
        self.checkpoints.save(step, state, batches, self.metadata, held_out)
        self.metrics.write("event", step, {"event": "save", "seconds": time.perf_counter() - began})
        self.output.publish()
        self.last_read = time.perf_counter()

    def _profile(self, step: int) -> None:
        """Trace the steps that `logging.profile_steps` names, for TensorBoard or Perfetto."""
        first, last = self.cfg.logging.profile_steps or (None, None)
        if step == first:
            jax.profiler.start_trace(self.output.local / "profile")
            self.tracing = True
        elif self.tracing and step > last:
            jax.profiler.stop_trace()
            self.tracing = False
