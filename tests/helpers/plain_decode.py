"""Decoding written as plainly as possible: one row, Python lists, no cache, everything recomputed at every step.

Shares nothing with `mars_jax.decoding`; masks are filled in cell by cell. A `Model` is a function
`model(tokens, stops, width) -> (token_logits, mask_logits)`: numpy logits `[len(tokens), V]` at every token, and
`[len(stops), width, V]` at the placeholders that stand after the first `stop` tokens, for every stop.
"""

import jax
import numpy as np

from mars_jax.models import decoder
from mars_jax.models.attention import dense_attention

PAD = 64  # lengths are rounded up to this, so that few shapes are traced


def model_of(params, cfg, mask_id):
    """The plain model of some parameters: one dense forward over tokens and placeholders."""

    @jax.jit
    def forward(ids, positions, mask):
        def attend(q, k, v):
            return dense_attention(q, k, v, mask)

        return decoder.unembed(params, cfg, decoder.forward(params, cfg, ids, positions, attend))

    def model(tokens, stops, width):
        n, total = len(tokens), len(tokens) + len(stops) * width
        size = -(-total // PAD) * PAD
        ids, positions = np.zeros((1, size), np.int32), np.zeros((1, size), np.int32)
        mask = np.zeros((1, size, size), bool)
        ids[0, :n], positions[0, :n] = tokens, np.arange(n)
        for i in range(n):
            mask[0, i, : i + 1] = True
        for g, stop in enumerate(stops):
            first = n + g * width
            for j in range(width):
                ids[0, first + j], positions[0, first + j] = mask_id, stop + j
                mask[0, first + j, :stop] = True
                mask[0, first + j, first : first + j + 1] = True
        logits = np.asarray(forward(ids, positions, mask))[0]
        return logits[:n], logits[n:total].reshape(len(stops), width, logits.shape[-1])

    return model


def probabilities(logits, emit_mask):
    """Float32 softmax over the ids that may be emitted."""
    logits = np.where(emit_mask, logits, -np.inf).astype(np.float32)
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def passes(p, token, score, tau):
    """Whether one candidate's score reaches the threshold."""
    if score == "probability":
        return tau < 1 and p[token] >= tau
    if score == "margin":
        top = np.sort(p)[::-1]
        return tau < 1 and top[0] - top[1] >= tau
    return -np.sum(p * np.log(np.maximum(p, 1e-30))) <= tau


def cut(run, stop_ids, room):
    """The run up to its first end token and at most `room` tokens, and the reason to finish, if any."""
    for i, token in enumerate(run[:room]):
        if token in stop_ids:
            return run[: i + 1], "stop"
    return (run[:room], "length") if len(run) >= room else (run, None)


def window(model, prompt, emit_mask, stop_ids, *, window, tau, max_new_tokens, score="probability", gate_first=False):
    """Window decoding; `window=0` is plain autoregression. Returns `(token_ids, accepted, finish_reason)`."""
    out, accepted, reason = [], [], None
    while reason is None:
        tokens = prompt + out
        token_logits, mask_logits = model(tokens, [len(tokens)], window)
        p = probabilities(np.concatenate([token_logits[-1:], mask_logits[0]]), emit_mask)
        candidates = p.argmax(-1).tolist()
        run = candidates[:1]
        if not gate_first or passes(p[0], run[0], score, tau):
            for j in range(1, window + 1):
                if not passes(p[j], candidates[j], score, tau):
                    break
                run.append(candidates[j])
        run, reason = cut(run, stop_ids, max_new_tokens - len(out))
        out += run
        accepted.append(len(run))
    return out, accepted, reason


def verify(model, prompt, emit_mask, stop_ids, *, draft, layout, max_new_tokens):
    """Greedy exact decoding with `draft` placeholders as the drafts' source."""
    out, accepted, drafts, reason = [], [], [], None
    while reason is None:
        known = prompt + out
        stops = [len(known) + i for i in range(len(drafts) + 1)]
        if layout == "chain":
            stops = stops[-1:]
        token_logits, mask_logits = model(known + drafts, stops, draft)
        greedy = probabilities(token_logits, emit_mask).argmax(-1)[len(known) - 1 :].tolist()
        confirmed = 0
        while confirmed < len(drafts) and drafts[confirmed] == greedy[confirmed]:
            confirmed += 1
        run, reason = cut([*drafts[:confirmed], greedy[confirmed]], stop_ids, max_new_tokens - len(out))
        stop = len(known) + confirmed
        drafts = probabilities(mask_logits[stops.index(stop)], emit_mask).argmax(-1).tolist() if stop in stops else []
        out += run
        accepted.append(len(run))
    return out, accepted, reason
