"""`gs://` paths that lie in a folder: enough for all small files, and fast. Orbax's arrays need a server."""

from pathlib import Path

from etils.epath import backend
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class FolderBucket(DirFileSystem):
    """A file system for which gs://bucket/x is FOLDER/bucket/x."""

    protocol = ("gs", "gcs")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("gs://") if isinstance(path, str) else path


def use_fake_bucket(monkeypatch, folder: Path) -> None:
    """For the rest of the test, `gs://` lies in FOLDER."""
    local = LocalFileSystem(auto_mkdir=True)
    bucket = FolderBucket(path=str(folder), fs=local)
    monkeypatch.setattr(
        type(backend.fsspec_backend), "_get_filesystem", lambda self, name: bucket if name == "gcs" else local
    )
