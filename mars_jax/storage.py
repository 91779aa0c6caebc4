"""Folders on a disk or in object storage (`gs://bucket/…`), read and written the same way."""

import tempfile
from pathlib import Path

from etils import epath


def place(path: str | Path) -> epath.Path:
    """`path` as a path object of its storage; a local one behaves like `pathlib.Path`."""
    return epath.Path(path) if is_remote(path) else epath.Path(Path(path).expanduser())


def is_remote(path: str | Path | epath.Path) -> bool:
    return "://" in str(path)


def absolute(path: epath.Path) -> epath.Path:
    """With its full name, as Orbax wants it (`epath`'s own `absolute` puts the working directory before `gs://`)."""
    return path if is_remote(path) else path.absolute()


def copy_tree(source: epath.Path, target: epath.Path, skip: tuple[str, ...] = ()) -> None:
    """Copy the files of a folder and its folders, but not the entries of the top level that `skip` names."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.name in skip:
            continue
        if entry.is_dir():
            copy_tree(entry, target / entry.name)
        else:
            entry.copy(target / entry.name, overwrite=True)


def on_this_machine(folder: epath.Path) -> Path:
    """The folder itself if it is on a disk, else a copy: what reads files by name, as tokenizers do, needs one."""
    if not is_remote(folder):
        return Path(folder)
    copy = Path(tempfile.mkdtemp(prefix="mars_jax_")) / folder.name
    copy_tree(folder, epath.Path(copy))
    return copy
