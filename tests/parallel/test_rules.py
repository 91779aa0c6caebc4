"""Which axis of which parameter is cut over which axis of the mesh."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from helpers.tiny import CONFIG, params
from jax.sharding import PartitionSpec as P

from mars_jax.errors import UserError
from mars_jax.models.parameters import parameter_shapes
from mars_jax.parallel.mesh import make_mesh
from mars_jax.parallel.rules import (
    attention_sharding,
    check_divisible,
    parameter_shardings,
    state_shardings,
    vocabulary_shardings,
)

UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False)
# By hand, from what each array is: [layer, in, out] matrices, heads and mlp columns over tensor, hidden size over fsdp.
WANT = {
    "embedding.table": P("tensor", "fsdp"),
    "head.kernel": P("fsdp", "tensor"),
    "final_norm.scale": P(None),
    "layers.attention.query.kernel": P(None, "fsdp", "tensor"),
    "layers.attention.query.bias": P(None, "tensor"),
    "layers.attention.key.kernel": P(None, "fsdp", "tensor"),
    "layers.attention.key.bias": P(None, "tensor"),
    "layers.attention.value.kernel": P(None, "fsdp", "tensor"),
    "layers.attention.value.bias": P(None, "tensor"),
    "layers.attention.output.kernel": P(None, "tensor", "fsdp"),
    "layers.attention_norm.scale": P(None, None),
    "layers.mlp.gate.kernel": P(None, "fsdp", "tensor"),
    "layers.mlp.up.kernel": P(None, "fsdp", "tensor"),
    "layers.mlp.down.kernel": P(None, "tensor", "fsdp"),
    "layers.mlp_norm.scale": P(None, None),
}


def by_name(tree) -> dict:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def test_every_parameter_is_cut_as_written():
    shardings = by_name(parameter_shardings(UNTIED, make_mesh(2, 2, 2)))
    assert {name: sharding.spec for name, sharding in shardings.items()} == WANT


def test_a_device_holds_its_piece_of_a_matrix():
    mesh = make_mesh(2, 2, 2)
    placed = jax.device_put(params(), parameter_shardings(CONFIG, mesh))
    gate = np.asarray(params()["layers"]["mlp"]["gate"]["kernel"])  # 3 layers, 96 -> 256
    shard = next(
        s for s in placed["layers"]["mlp"]["gate"]["kernel"].addressable_shards if s.device == mesh.devices[1, 1, 0]
    )
    np.testing.assert_array_equal(shard.data, gate[:, 48:, :128])


def test_moments_lie_like_their_parameters_and_the_rest_everywhere():
    mesh = make_mesh(2, 2, 2)
    shapes = jax.eval_shape(optax.adam(1e-3).init, parameter_shapes(CONFIG))
    moments, _ = state_shardings(shapes, CONFIG, mesh)
    want = {name: spec for name, spec in WANT.items() if name != "head.kernel"}
    for tree in (moments.mu, moments.nu):
        assert {name: sharding.spec for name, sharding in by_name(tree).items()} == want
    assert moments.count.spec == P()


def test_what_is_used_is_cut_over_tensor_and_rows():
    mesh = make_mesh(2, 2, 2)
    assert attention_sharding(mesh).spec == P(("data", "fsdp"), None, "tensor", None)
    vocabulary = by_name(vocabulary_shardings(mesh))
    assert vocabulary["embedding.table"].spec == P("tensor", None)
    assert vocabulary["head.kernel"].spec == P(None, "tensor")


@pytest.mark.parametrize(
    ("sizes", "changes", "named"),
    [
        ((2, 1, 4), {}, "6 attention heads do not divide by mesh.tensor=4; 2 kv heads do not divide by mesh.tensor=4"),
        ((1, 1, 8), {"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 100}, "100 mlp columns"),
        ((4, 1, 2), {"vocab_size": 381}, "381 vocabulary rows do not divide by mesh.tensor=2"),
        ((1, 8, 1), {"hidden_size": 100}, "hidden size do not divide by mesh.fsdp=8"),
    ],
)
def test_a_mesh_that_leaves_a_remainder_is_refused(sizes, changes, named):
    with pytest.raises(UserError, match=named):
        check_divisible(dataclasses.replace(CONFIG, **changes), make_mesh(*sizes))


def test_data_may_be_any_number():
    check_divisible(dataclasses.replace(CONFIG, num_heads=5, num_kv_heads=5, hidden_size=101), make_mesh(8, 1, 1))
