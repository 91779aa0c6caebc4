"""SIGTERM means: save and leave. Preemptible machines send it some seconds before they go away."""

import signal
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Whether the run was asked to stop. All processes of a run get the same answer at the same step."""

    def __init__(self):
        self.signalled = False

    def reached(self, step: int) -> bool:
        if jax.process_count() > 1:  # jax's own notifier agrees on a step that every process has yet to reach
            return multihost_utils.reached_preemption_sync_point(step)
        return self.signalled


@contextmanager
def watch_preemption():
    """Turn SIGTERM into `Preemption.reached` while the block runs."""
    preemption = Preemption()
    if jax.process_count() > 1:
        yield preemption
        return

    def note(signum, frame):
        preemption.signalled = True

    previous = signal.signal(signal.SIGTERM, note)
    try:
        yield preemption
    finally:
        signal.signal(signal.SIGTERM, previous)
