"""The output folder of a run, on a disk or in object storage.

Checkpoints go straight to their place: Orbax writes to either. The small files (config, tokenizer, metrics, curves) are
made in a folder on this machine, since object storage cannot append; for a remote run that folder is a copy, fetched
when the run starts and published at every checkpoint.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax
from etils import epath

from mars_jax.storage import copy_tree, is_remote, place

CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"  # each life of a run writes event files of its own: nothing to go on from


@dataclass(frozen=True)
class OutputFolder:
    """place: `output_dir`. local: where its small files are made; the same folder if it is on a disk."""

    place: epath.Path
    local: Path
    _published: dict[Path, int] = field(default_factory=dict)

    @property
    def checkpoints(self) -> epath.Path:
        return self.place / CHECKPOINTS

    def fetch(self) -> None:
        """Bring the small files of a remote run here."""
        if is_remote(self.place) and self.place.exists():
            copy_tree(self.place, epath.Path(self.local), skip=(CHECKPOINTS, TENSORBOARD))

    def publish(self) -> None:
        """Send what is new since the last time to a remote run's place."""
        if not is_remote(self.place) or jax.process_index() != 0:
            return
        for path in sorted(p for p in self.local.rglob("*") if p.is_file()):
            changed = path.stat().st_mtime_ns
            if self._published.get(path) != changed:
                target = self.place / path.relative_to(self.local).as_posix()
                target.parent.mkdir(parents=True, exist_ok=True)
                epath.Path(path).copy(target, overwrite=True)
                self._published[path] = changed


@contextmanager
def open_output(output_dir: str) -> Iterator[OutputFolder]:
    """The folder of a run while the block runs; what a remote one wrote is published at the end, also of a failure."""
    if not is_remote(output_dir):
        yield OutputFolder(place(output_dir), Path(output_dir))
        return
    with tempfile.TemporaryDirectory(prefix="mars_jax_run_") as scratch:
        output = OutputFolder(place(output_dir), Path(scratch) / output_dir.rstrip("/").rpartition("/")[2])
        output.local.mkdir()
        output.fetch()
        try:
            yield output
        finally:
            output.publish()
