"""The model as decoding sees it: hidden states and keys and values of some tokens, logits of some hidden states."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from mars_jax.models import decoder
from mars_jax.models.attention import cached_attention, dense_attention
from mars_jax.models.config import ModelConfig
from mars_jax.models.parameters import Params
from mars_jax.objective.visibility import Tokens, public, visible


class Network(Protocol):
    """What the decoding loop needs of a model; hashable, for it is a static argument."""

    def init_cache(self, batch: int, slots: int) -> Any: ...

    def forward(self, params, tokens_BT: jax.Array, visibility: Tokens, cache, cursor_B: jax.Array):
        """`(hidden_BTD, kv)` of tokens that see each other and, unless None, the cache's slots below the cursor."""
        ...

    def write(self, cache, kv, cursor_B: jax.Array, count_B: jax.Array):
        """The cache with each row's first `count` entries of `kv` in the slots from its cursor on."""
        ...

    def logits(self, params, hidden: jax.Array) -> jax.Array: ...


@dataclass(frozen=True)
class DecoderNetwork:
    """`models.decoder` with one `(k_BSKE, v_BSKE)` pair per layer as cache."""

    cfg: ModelConfig
    dtype: Any = jnp.float32

    def init_cache(self, batch: int, slots: int):
        shape = (batch, slots, self.cfg.num_kv_heads, self.cfg.head_dim)
        return tuple((jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in range(self.cfg.num_layers))

    def forward(self, params: Params, tokens_BT, visibility: Tokens, cache, cursor_B):
        new_mask_BTT = visible(visibility, visibility)
        if cache is None:

            def attend(q, k, v, _):
                return dense_attention(q, k, v, new_mask_BTT)

        else:
            batch, slots = cache[0][0].shape[:2]
            slot_BS = jnp.broadcast_to(jnp.arange(slots), (batch, slots))
            cached = public((slot_BS < cursor_B[:, None]).astype(jnp.int32), slot_BS)
            cache_mask_BTS = visible(visibility, cached)

            def attend(q, k, v, layer_cache):
                return cached_attention(q, k, v, layer_cache, cache_mask_BTS, new_mask_BTT)

        return decoder.forward_with_kv(
            params, self.cfg, tokens_BT, visibility.position, attend, cache, dtype=self.dtype
        )

    def write(self, cache, kv, cursor_B, count_B):
        batch, width = kv[0][0].shape[:2]
        row_BR = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, width))
        index_BR = jnp.broadcast_to(jnp.arange(width), (batch, width))
        # Entries that are not kept aim past the last slot and are dropped: nothing is clamped onto good slots.
        slot_BR = jnp.where(index_BR < count_B[:, None], cursor_B[:, None] + index_BR, cache[0][0].shape[1])
        return jax.tree.map(lambda old, new: old.at[row_BR, slot_BR].set(new, mode="drop"), cache, kv)

    def logits(self, params: Params, hidden):
        return decoder.unembed(params, self.cfg, hidden)
