"""Masks of a step against matrices written by hand. Rows are queries: real tokens, then placeholders."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from helpers.decoding import settings

from mars_jax.decoding import plan as plans
from mars_jax.decoding.drafts import Drafts
from mars_jax.decoding.layout import step_layout
from mars_jax.decoding.settings import Vocabulary
from mars_jax.decoding.state import RUNNING, empty_state
from mars_jax.objective.visibility import public, visible

M = 9  # the id of [MASK]
VOCABULARY = Vocabulary(jnp.ones(10, bool), jnp.int32(M))


def layout(plan, *, length, cursor, drafts=(), found=None):
    """The layout of one row that holds the tokens 1 … length, and its masks over 6 cache slots and its own tokens."""
    state = empty_state(plan, (), 1, 8, 10)
    state = state._replace(
        tokens=jnp.arange(1, 9)[None],
        length=jnp.array([length]),
        cursor=jnp.array([cursor]),
        drafts=Drafts(
            jnp.array([[*drafts, *[0] * (plan.drafts - len(drafts))]], jnp.int32), jnp.array([len(drafts)]), None, found
        ),
        finish=jnp.array([RUNNING]),
    )
    found = step_layout(plan, VOCABULARY, settings(plan, [[1]], 8), state)
    slots = jnp.arange(6)[None]
    cached = public((slots < cursor).astype(jnp.int32), slots)
    own = visible(found.visibility, found.visibility)[0].astype(int)
    return found, np.array(visible(found.visibility, cached)[0].astype(int)), np.array(own)


def test_window_with_two_pending_tokens():
    found, cached, own = layout(plans.window(2), length=5, cursor=3)
    assert found.tokens[0, [0, 1, 3, 4]].tolist() == [4, 5, M, M]
    assert found.visibility.position[0].tolist() == [3, 4, 5, 5, 6]
    prefix = [1, 1, 1, 0, 0, 0]
    assert cached.tolist() == [prefix, prefix, [0] * 6, prefix, prefix]  # the third token is padding
    assert own.tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_chain_puts_its_placeholders_after_the_last_draft():
    found, cached, own = layout(plans.verify(2, branched=False), length=3, cursor=2, drafts=[7, 8])
    assert found.tokens[0].tolist() == [3, 7, 8, M, M]
    assert found.visibility.position[0].tolist() == [2, 3, 4, 5, 6]
    assert cached.tolist() == [[1, 1, 0, 0, 0, 0]] * 5
    assert own.tolist() == np.tri(5, dtype=int).tolist()


def test_a_cold_chain_puts_them_after_the_root():
    found, _, own = layout(plans.verify(2, branched=False), length=3, cursor=2)
    assert found.visibility.position[0, 3:].tolist() == [3, 4]
    assert own.tolist() == [
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]


def test_tree_has_a_group_after_every_stop():
    found, cached, own = layout(plans.verify(2, branched=True), length=3, cursor=2, drafts=[7, 8])
    assert found.tokens[0].tolist() == [3, 7, 8, M, M, M, M, M, M]
    assert found.visibility.position[0].tolist() == [2, 3, 4, 3, 4, 4, 5, 5, 6]
    assert cached.tolist() == [[1, 1, 0, 0, 0, 0]] * 9
    assert own.tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],  # root
        [1, 1, 0, 0, 0, 0, 0, 0, 0],  # d_1
        [1, 1, 1, 0, 0, 0, 0, 0, 0],  # d_2
        [1, 0, 0, 1, 0, 0, 0, 0, 0],  # after root
        [1, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 0],  # after d_1
        [1, 1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 1, 0],  # after d_2
        [1, 1, 1, 0, 0, 0, 0, 1, 1],
    ]


def test_a_tree_without_drafts_has_one_group():
    _, _, own = layout(plans.verify(2, branched=True), length=3, cursor=2)
    assert own[3:5].tolist() == [[1, 0, 0, 1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0, 0, 0, 0]]
    assert not own[5:].any()
    assert not own[:, 5:].any()


def test_what_lookup_found_is_a_branch_of_its_own():
    plan = replace(plans.verify(1, branched=False), found=True)
    for count, rows in ((1, [[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]), (0, [[0] * 5] * 2)):
        found = Drafts(jnp.array([[8]]), jnp.array([count]), None)
        layout_found, cached, own = layout(plan, length=3, cursor=2, drafts=[7], found=found)
        assert layout_found.tokens[0].tolist() == [3, 7, M, 8, M]
        assert layout_found.visibility.position[0, : 3 + 2 * count].tolist() == [2, 3, 4, 3, 4][: 3 + 2 * count]
        assert cached[:3].tolist() == [[1, 1, 0, 0, 0, 0]] * 3 and (cached[3:, :2] == count).all()
        assert own.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], *rows]
