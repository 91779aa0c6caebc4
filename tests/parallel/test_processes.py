"""How a process learns of the others, from what a launcher tells it."""

import jax
import pytest

from mars_jax.errors import UserError
from mars_jax.parallel import processes

TOLD = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:9876", "MARS_NUM_PROCESSES": "4", "MARS_PROCESS_ID": "3"}


@pytest.fixture
def joined(monkeypatch) -> list[tuple]:
    """What `jax.distributed.initialize` was called with; the environment names no run."""
    for name in processes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments: calls.append(arguments))
    return calls


def tell(monkeypatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("distributed", [None, True])
def test_the_environment_says_who_a_process_is(joined, monkeypatch, distributed):
    tell(monkeypatch, **TOLD)
    processes.join(distributed)
    assert joined == [("10.0.0.1:9876", 4, 3)]


def test_alone_where_nothing_names_a_run(joined):
    processes.join(None)
    assert joined == []


def test_false_keeps_a_process_alone(joined, monkeypatch):
    tell(monkeypatch, **TOLD)
    processes.join(False)
    assert joined == []


def test_on_a_cluster_that_jax_knows_it_asks_jax(joined):
    processes.join(True)
    assert joined == [()]


@pytest.mark.parametrize(
    "told",
    [
        {name: value for name, value in TOLD.items() if name != "MARS_PROCESS_ID"},
        TOLD | {"MARS_NUM_PROCESSES": "four"},
        TOLD | {"MARS_PROCESS_ID": "-1"},
        {"MARS_NUM_PROCESSES": "4"},
    ],
)
def test_half_a_description_is_refused(joined, monkeypatch, told):
    tell(monkeypatch, **told)
    with pytest.raises(UserError, match="needs JAX_COORDINATOR_ADDRESS, MARS_NUM_PROCESSES, MARS_PROCESS_ID; found"):
        processes.join(None)
    assert joined == []
