import pytest
from helpers.commands import FakeTools, make_fake_tools


@pytest.fixture
def tools(tmp_path) -> FakeTools:
    """Fake cloud tools for one test."""
    return make_fake_tools(tmp_path / "bin")
