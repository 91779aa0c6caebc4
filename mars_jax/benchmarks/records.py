"""What a long benchmark has measured so far, a line each: a run that was ended goes on where it was."""

import json
from collections.abc import Sequence
from pathlib import Path

from mars_jax.errors import UserError


class Records:
    """JSON lines `{"kind": …, …}` in a file, written as soon as they are known."""

    def __init__(self, path: Path, setup: dict):
        """Go on with the file at `path`, or begin it. Raises UserError where it was measured with another setup."""
        self.path = path
        self._entries = _read(path)
        begun = [entry for entry in self._entries if entry["kind"] == "setup"]
        setup = json.loads(json.dumps({"kind": "setup"} | setup))
        if not begun:
            self.add(**setup)
        elif begun[0] != setup:
            changed = min(key for key in setup if begun[0].get(key) != setup[key])
            raise UserError(
                f"{path}: measured with {changed} {begun[0].get(changed)!r}, not {setup[changed]!r}: "
                "choose another --output, or remove the file"
            )

    def add(self, kind: str, **values) -> None:
        self._entries.append({"kind": kind} | values)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._entries[-1]) + "\n")

    def of(self, kind: str, **wanted) -> Sequence[dict]:
        """The entries of a kind with these values, oldest first."""
        return [entry for entry in self._entries if ({"kind": kind} | wanted).items() <= entry.items()]


def _read(path: Path) -> list[dict]:
    """The whole lines of the file; a line that was cut off while it was written is removed."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]
