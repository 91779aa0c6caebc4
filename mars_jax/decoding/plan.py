"""What is fixed at compile time: the shape of a decoding step.

Modes differ in how many real tokens a step forwards, where its placeholders stand and when keys and values are kept.
Everything else about a mode is a traced per-row setting (`decoding.settings`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Shape of a step: `real` tokens, then `stops` groups of `masks` placeholders.

    real:   room for a row's pending tokens (committed, no keys and values yet) followed by its drafts.
    drafts: most drafts a row can have checked.
    masks:  placeholders per group (W or K).
    branched: a group after every possible stop (tree) instead of one after the last real token (chain).
    sources: where rows' drafts come from, of `decoding.drafts.SOURCES`; ("diffusion",) fills blocks instead
            (`decoding.diffusion`).
    found:  as many drafts of lookup are checked beside a row's others, as a branch of their own.
    cache:  "cursor": keep what was committed at every step. "block": keep whole blocks of `real - 1` tokens, when all
            rows are there (the paper's block cache). "recompute": keep nothing; every step forwards the whole prefix.
    logprobs: record log-probabilities of committed tokens and of this many likeliest ids; None records nothing.
    sampled, adjusted: whether any row draws tokens, or has its logits changed (`decoding.sampling`, `.penalties`).
    """

    real: int
    drafts: int = 0
    masks: int = 0
    branched: bool = False
    sources: tuple[str, ...] = ("masks",)
    found: bool = False
    cache: str = "cursor"
    sampled: bool = False
    adjusted: bool = False
    logprobs: int | None = None

    @property
    def stops(self) -> int:
        return self.drafts + 1 if self.branched else 1

    @property
    def tokens(self) -> int:
        """Tokens that a row forwards in a step."""
        return self.real + self.stops * self.masks + self.found * (self.drafts + self.masks)

    @property
    def run(self) -> int:
        """Most tokens one forward can commit."""
        return self.drafts + 1 + self.masks


def autoregressive() -> Plan:
    return Plan(real=1)


def window(width: int) -> Plan:
    """Window decoding with cursors: up to `width + 1` tokens were committed last time and are pending."""
    return Plan(real=width + 1, masks=width)


def verify(draft: int, *, branched: bool) -> Plan:
    """Exact decoding: one pending token and up to `draft` drafts; accepted drafts leave nothing pending."""
    return Plan(real=draft + 1, drafts=draft, masks=draft, branched=branched)


def lookup(draft: int) -> Plan:
    """Exact decoding of drafts found in the row's own text; no placeholders."""
    return Plan(real=draft + 1, drafts=draft, sources=("lookup",))


def jacobi(draft: int) -> Plan:
    """Fixed-point decoding: a window of `draft` guesses is corrected until the model agrees."""
    return Plan(real=draft + 1, drafts=draft, sources=("jacobi",))


def diffusion(size: int) -> Plan:
    """Block diffusion: a block's tokens are filled in in any order, then pending; meanwhile nothing is."""
    return Plan(real=size, masks=size, sources=("diffusion",))


def block(size: int, width: int) -> Plan:
    """The paper's block cache: a block's `size` tokens, and one before it, stay pending until all rows have them."""
    return Plan(real=size + 1, masks=width, cache="block")


def recompute(capacity: int, width: int) -> Plan:
    """No cache: all of up to `capacity` tokens are pending at every step."""
    return Plan(real=capacity, masks=width, cache="recompute")
