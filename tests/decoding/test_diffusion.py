"""Block diffusion against decoding written plainly, on the streams that training builds for it."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import tiny
from helpers.plain_decode import cut, probabilities

from mars_jax.decoding.engine import DecodeEngine
from mars_jax.decoding.requests import DecodeOptions, Request
from mars_jax.errors import UserError
from mars_jax.models import decoder
from mars_jax.objective.losses import dense_attend
from mars_jax.objective.streams import Row, StreamConfig, build_streams, stack

W = 4
LENGTH = 96
STREAMS = StreamConfig(
    recipe="block_diffusion", block_size=W, masks_per_block=W, anchor="response", row_length=LENGTH,
    noisy_length=LENGTH, mask_id=tiny.MASK_ID,
)  # fmt: skip
PROMPTS = [tuple(np.random.default_rng(n).integers(4, tiny.NUM_TOKENS, n).tolist()) for n in (1, 5, 9, 17, 20)]


@jax.jit
def forward(batch):
    hidden = decoder.forward(tiny.params(), tiny.CONFIG, batch.tokens, batch.visibility.position, dense_attend(batch))
    return decoder.unembed(tiny.params(), tiny.CONFIG, hidden)[0]


def block_logits(prompt, out, block):
    """Logits `[W, V]` of the noisy copy of the block after `prompt + out`, as training sees it; None is [MASK]."""
    tokens = np.array([*prompt, *out, *[0] * W])
    n = len(tokens)
    row = Row(tokens, np.ones(n, int), np.arange(n), np.array([[len(prompt), n]]))
    batch = build_streams(row, STREAMS, np.random.default_rng(0))
    places = LENGTH + len(out) + np.arange(W)
    assert batch.visibility.position[places].tolist() == list(range(n - W, n))
    batch.tokens[places] = [tiny.MASK_ID if token is None else token for token in block]
    return np.asarray(forward(stack([batch])))[places]


def plain(prompt, stop_ids, *, tau, max_new_tokens):
    """`(token_ids, accepted, finish_reason)`."""
    out, filled_by, forwards, reason = [], [], 0, None
    while reason is None:
        block, by, run = [None] * W, [None] * W, []
        while reason is None and len(run) < W:
            p = probabilities(block_logits(prompt, out, block), tiny.emit_mask())
            empty = [j for j in range(W) if block[j] is None]
            surest = max(empty, key=lambda j: p[j].max())
            for j in empty:
                if j == surest or (tau < 1 and p[j].max() >= tau):
                    block[j], by[j] = int(p[j].argmax()), forwards
            forwards += 1
            run = block[: block.index(None)] if None in block else block
            run, reason = cut(run, stop_ids, max_new_tokens - len(out))
        out += run
        filled_by += by[: len(run)]
    return out, np.bincount(filled_by).tolist(), reason


def decode(prompts, stop_ids=tiny.STOP_IDS, slots=3, **options):
    engine = DecodeEngine(replace(tiny.model(), stop_ids=tuple(stop_ids)), slots=slots)
    asked = [Request(p, DecodeOptions(mode="diffusion", window=W, **options)) for p in prompts]
    return [(r.token_ids, r.accepted, r.finish_reason) for r in engine.generate(asked)]


@pytest.mark.parametrize("tau", [0.0, 0.8, 1.0])
def test_tokens_and_forwards_are_those_of_plain_decoding(tau):
    """Five prompts through three slots; the limit falls inside a block, and nothing else ends them."""
    expected = [plain(p, (), tau=tau, max_new_tokens=22) for p in PROMPTS]
    assert decode(PROMPTS, (), tau=tau, max_new_tokens=22) == expected
    pace = sum(len(ids) for ids, _, _ in expected) / sum(len(accepted) for _, accepted, _ in expected)
    assert {0.0: pace > 3, 0.8: 1.1 < pace < 3, 1.0: pace == pytest.approx(1, abs=0.1)}[tau], pace


@pytest.mark.parametrize("place", range(W + 1))
def test_an_end_token_ends_wherever_it_falls_in_a_block(place):
    prompt = PROMPTS[3]
    ids, _, _ = plain(prompt, (), tau=1.0, max_new_tokens=16)
    stop = [ids[W + place]]
    expected = plain(prompt, stop, tau=1.0, max_new_tokens=16)
    assert expected[2] == "stop" and stop[0] not in expected[0][:-1]
    assert decode([prompt], stop, tau=1.0, max_new_tokens=16) == [expected]


def test_a_seeded_answer_depends_on_no_neighbour():
    options = {"tau": 0.3, "temperature": 1.0, "max_new_tokens": 12}
    alone = decode(PROMPTS[2:3], seed=5, **options)
    together = decode(PROMPTS, seed=5, **options)
    assert together[2] == alone[0]
    assert decode(PROMPTS[2:3], seed=6, **options) != alone


def test_what_cannot_be_had_in_any_order_is_refused(caplog):
    for options in ({"logprobs": 1}, {"repetition_penalty": 1.1}, {"gate_first": True}):
        with pytest.raises(UserError, match="mode 'diffusion' fills places in any order"):
            DecodeOptions(mode="diffusion", **options)
    decode(PROMPTS[:1], tau=0.0, max_new_tokens=4)
    assert caplog.text.count("not trained with recipe block_diffusion") == 1
