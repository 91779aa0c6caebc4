"""Which attention a run uses, cut over the mesh: rows over the batch axes, heads over `tensor`.

The fast kernels are loops over tiles, which the compiler cannot partition by itself; `shard_map` runs one per device.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec

from mars_jax.errors import UserError
from mars_jax.models import blockwise, splash
from mars_jax.objective.losses import dense_attend
from mars_jax.parallel.mesh import BATCH_AXES

ROWS = PartitionSpec(BATCH_AXES)
HEADS = PartitionSpec(BATCH_AXES, None, "tensor", None)


def over_mesh(plan_tiles: Callable, attention: Callable, mesh: Mesh) -> Callable:
    """`make_attend` that plans and attends on every device for its own rows and heads.

    plan_tiles: `visibility -> plan`, every leaf with a leading axis that follows the rows.
    attention:  `(q_BTHE, k_BTKE, v_BTKE, plan) -> out_BTHE`.
    """
    # A plan does not vary over `tensor`, which `check_vma` would have the kernels declare.
    plan_rows = jax.shard_map(plan_tiles, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    attend_heads = jax.shard_map(
        attention, mesh=mesh, in_specs=(HEADS, HEADS, HEADS, ROWS), out_specs=HEADS, check_vma=False
    )

    def make_attend(batch):
        plan = plan_rows(batch.visibility)
        return lambda q, k, v: attend_heads(q, k, v, plan)

    return make_attend


def choose_attend(name: str, mesh: Mesh, block_size: int) -> Callable:
    """`make_attend(batch) -> attend` of `objective.attention`; `auto` is splash on TPU and blockwise elsewhere.

    Raises UserError where splash cannot run.
    """
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    if name == "auto":
        name = "splash" if on_tpu and block_size <= splash.MAX_GROUP else "blockwise"
    if name == "dense":
        return dense_attend
    if name == "blockwise":
        return over_mesh(blockwise.plan_tiles, blockwise.blockwise_attention, mesh)
    if not on_tpu:
        raise UserError("objective.attention=splash is a TPU kernel and this run has none: use blockwise or auto")
    if block_size > splash.MAX_GROUP:
        raise UserError(
            f"objective.attention=splash takes blocks of at most {splash.MAX_GROUP} tokens, "
            f"but objective.block_size={block_size}: use blockwise"
        )
    return over_mesh(splash.plan_tiles, splash.splash_attention, mesh)
