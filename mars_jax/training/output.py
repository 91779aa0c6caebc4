"""The output folder of a run, on a disk or in object storage.

Checkpoints go straight to their place: Orbax writes to either. The small files (config, tokenizer, metrics, curves) are
made in a folder on this machine, since object storage cannot append; for a remote run that folder is a copy, fetched
when the run starts and published at every checkpoint.

Two runs in one folder would overwrite each other's checkpoints. On a disk the first process of a run holds a lock on
the folder, which the kernel frees however the run ends; object storage has no locks.
"""

import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import jax
from etils import epath

from mars_jax.errors import UserError
from mars_jax.storage import copy_tree, is_remote, place

log = logging.getLogger(__name__)

LOCK = ".lock"
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
    """The folder of a run while the block runs; what a remote one wrote is published at the end, also of a failure.

    Raises UserError if another run is using a folder on a disk.
    """
    if not is_remote(output_dir):
        output = OutputFolder(place(output_dir), Path(place(output_dir)))
        with _locked(output.local) if jax.process_index() == 0 else nullcontext():
            yield output
        return
    with tempfile.TemporaryDirectory(prefix="mars_jax_run_") as scratch:
        output = OutputFolder(place(output_dir), Path(scratch) / output_dir.rstrip("/").rpartition("/")[2])
        output.local.mkdir()
        output.fetch()
        try:
            yield output
        finally:
            output.publish()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"output_dir={folder} cannot be written: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"output_dir={folder} is in use by {holder}: wait until that run ends, or choose another folder"
            ) from error
        except OSError as error:  # a file system without locks
            log.warning("output_dir=%s cannot be locked (%s): let no two runs use it at a time", folder, error)
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield
