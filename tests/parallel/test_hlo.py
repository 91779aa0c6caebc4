"""Counting from HLO text: products with known sizes, loops, collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mars_jax.parallel import hlo
from mars_jax.parallel.hlo_text import shape_bytes
from mars_jax.parallel.mesh import make_mesh

A = jnp.ones((24, 40), jnp.float32)
B = jnp.ones((40, 16), jnp.float32)
LAYERS = jnp.ones((5, 40, 40), jnp.float32)


def _text(function, *args, **jit) -> str:
    return jax.jit(function, **jit).lower(*args).compile().as_text()


def _chain(x, layers):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def test_product():
    assert hlo.count(_text(jnp.matmul, A, B)).flops == 2 * 24 * 40 * 16


def test_batched_product():
    x, y = jnp.ones((3, 8, 20)), jnp.ones((3, 20, 12))
    assert hlo.count(_text(jnp.matmul, x, y)).flops == 2 * 3 * 8 * 20 * 12


def test_scan_counts_every_layer_where_xla_counts_one():
    compiled = jax.jit(_chain).lower(A, LAYERS).compile()
    once = 2 * 24 * 40 * 40
    assert hlo.count(compiled.as_text()).flops == 5 * once
    assert once <= compiled.cost_analysis()["flops"] < 2 * once  # the reason for this module


def test_gradient_through_a_scan():
    """Forward, and two products a layer backward."""
    gradient = jax.grad(lambda x, layers: _chain(x, layers).sum(), argnums=(0, 1))
    assert hlo.count(_text(gradient, A, LAYERS)).flops == 3 * 5 * 2 * 24 * 40 * 40


def test_loops_over_data_run_as_often_as_told():
    def repeat(x, w, times):
        return jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ w), x)

    text = _text(repeat, A, LAYERS[0], 3)
    assert hlo.count(text, unknown_trips=7).flops == 7 * 2 * 24 * 40 * 40


def test_unrolled_loops_are_not_counted_twice():
    """The TPU compiler unrolls loops without saying how often they run: here, by two."""
    text = """
body (arg: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %arg = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8,8] get-tuple-element(%arg), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %y = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[8,8]) tuple(%next, %y)
}

condition (arg: (s32[], f32[8,8])) -> pred[] {
  %arg = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %bound = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (start: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %start = (s32[], f32[8,8]) parameter(0)
  ROOT %loop = (s32[], f32[8,8]) while(%start), condition=%condition, body=%body
}
"""
    assert hlo.count(text).flops == 4 * 2 * 8**3


def test_conditionals_cost_their_branch_as_often_as_taken():
    def maybe(x, w, use):
        return jax.lax.cond(use, lambda: jnp.tanh(jnp.sin(x) @ w), lambda: x)

    text = _text(maybe, A, LAYERS[0], True)
    assert hlo.count(text, taken=0.25).flops == 0.25 * 2 * 24 * 40 * 40


def test_bytes_of_a_scan_read_each_layer_once():
    """The stacked weights are an operand of every iteration, but each reads only its slice."""
    wide = jnp.ones((50, 256, 256), jnp.float32)
    moved = hlo.count(_text(_chain, jnp.ones((1, 256)), wide)).bytes
    assert wide.nbytes <= moved < 3 * wide.nbytes + 50 * 20 * 1024


def test_all_reduce_and_all_gather_bytes():
    mesh = make_mesh(8)
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data",), ()))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    reduced = hlo.count(_text(lambda x: x.sum(0), x, out_shardings=whole))
    assert dict(reduced.collectives) == {"all-reduce": 32 * 4}
    gathered = hlo.count(_text(lambda x: x + 1, x, out_shardings=whole))
    assert dict(gathered.collectives) == {"all-gather": 64 * 32 * 4}
    assert dict(gathered.collective_calls) == {"all-gather": 1}


@pytest.mark.parametrize("spread", [1, 2])
def test_convolution_counts_no_padding(spread):
    """Of 3 taps over 8 inputs, 2 fall into the padding; taps on the holes of a spread input do not count either."""
    x, kernel = jnp.ones((4, 8, 8)), jnp.ones((3, 8, 6))

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), [(1, 1)], lhs_dilation=(spread,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    text = _text(convolve, x, kernel)
    assert " convolution(" in text
    assert hlo.count(text).flops == 2 * 4 * 8 * 6 * 22


def test_shape_bytes():
    assert shape_bytes("(bf16[2,3]{1,0:T(8,128)(2,1)}, s32[], pred[7]{0})") == 12 + 4 + 7
    assert np.isclose(shape_bytes("f8e4m3fn[16]{0}"), 16)
