import pytest
from helpers import tiny

from mars_jax.benchmarks import decode, decode_steps
from mars_jax.benchmarks.records import Records
from mars_jax.decoding.requests import DecodeOptions
from mars_jax.models.loading import load

CONTEXT = 40
SLOTS = 2


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    records = Records(tmp_path_factory.mktemp("steps") / "passes.jsonl", {})
    chosen = [v for v in decode.variants(DecodeOptions()) if v.name in ("ar", "verify tree K=1")]
    decode_steps.measure_steps(load(tiny.FOLDER), chosen, [SLOTS], CONTEXT, 1, records)
    machine = decode_steps.Machine(bytes_per_second=1e9, flops_per_second=1e12)
    return {c.name: c for c in decode_steps.costs(records, machine)}


def matrix_flops(tokens: int, predictions: int, cached: int) -> int:
    """Counted by hand from the architecture: two flops a weight and token, and attention over cached and own keys."""
    c = tiny.CONFIG
    attention = c.num_heads * c.head_dim
    weights = c.hidden_size * (2 * attention + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    scores_and_mixing = 2 * 2 * tokens * (cached + tokens) * attention
    return c.num_layers * (2 * weights * tokens + scores_and_mixing) + 2 * predictions * c.hidden_size * c.vocab_size


@pytest.mark.parametrize(
    ("name", "tokens", "predictions", "cached"),
    [
        ("ar", 1, 1, 128),  # the bucket of 40 tokens of context and those of the timed steps
        ("verify tree K=1", 4, 4, 128),  # root, draft, and a placeholder after each
    ],
)
def test_a_step_multiplies_only_what_it_needs(costs, name, tokens, predictions, cached):
    assert costs[name].flops == pytest.approx(SLOTS * matrix_flops(tokens, predictions, cached), rel=0.02)


def test_bound_is_the_slower_of_reading_and_multiplying(costs):
    ar = costs["ar"]
    assert ar.bound == pytest.approx(max(ar.bytes / 1e9, ar.flops / 1e12))
    assert ar.bytes > 4 * 330_000  # at least the weights, once
    assert ar.roofline_share == ar.bound / ar.seconds
