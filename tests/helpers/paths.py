"""Where tests find files."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"
TINY_QWEN2 = GOLDEN / "tiny-qwen2"


def shared_data() -> Path:
    """The folder of real chats and evaluation sets beside the checkout; skips loudly where absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"DATA ABSENT: no {folder} on this machine, so nothing was tested on real data")
    return folder
