"""When drafts pay: which of two step shapes that give the same text is the faster one here, for these rows.

A step with drafts costs more than an autoregressive one and commits more tokens. How much more of either depends on the
machine, the batch and the text, so both are observed while decoding, and the other shape is tried again now and then.
Nothing here reads a clock: what was seen comes in as numbers.
"""

import statistics
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

MEASURED_STEPS = 4  # of a call that is timed
SAMPLES = 3  # timed calls a shape is judged by
LEAST_INTERVAL = 64  # steps from one trial of the other shape to the next
BUDGET = 0.02  # most of the time that trials may lose
MARGIN = 0.02  # a shape that is faster by less is not worth the change
HALF_LIFE = 64  # forwards after which what was accepted counts half


class Known(NamedTuple):
    """Seconds of an autoregressive (`narrow`) step and of one with drafts (`wide`), and what the latter commits."""

    narrow: float
    wide: float
    tokens_per_forward: float

    def seconds_per_token(self, wide: bool) -> float:
        return self.wide / self.tokens_per_forward if wide else self.narrow


def drafts_pay(known: Known, wide: bool) -> bool:
    """Whether to go on with drafts; `wide` says whether they are in use now."""
    gain = known.seconds_per_token(False) / known.seconds_per_token(True)
    return gain > (1 - MARGIN if wide else 1 + MARGIN)


def trial_interval(known: Known, wide: bool) -> float:
    """Steps of the shape in use after which trying the other one loses no more than `BUDGET` of the time."""
    own, other = known.seconds_per_token(wide), known.seconds_per_token(not wide)
    step, tokens = (known.wide, 1) if wide else (known.narrow, known.tokens_per_forward)
    lost = MEASURED_STEPS * tokens * (other - own)
    # Coming back, drafts start cold: one step with drafts commits a single token.
    lost += known.wide - own if wide else known.wide - known.narrow
    return max(LEAST_INTERVAL, lost / (BUDGET * step))


class Turn(NamedTuple):
    """The next call. wide: with drafts. steps: at most so many, None for the usual. timed: its seconds are wanted."""

    wide: bool
    steps: int | None = None
    timed: bool = False


class Adaptation:
    """What is known of two shapes, kept for as long as the engine lives, and what to run next.

    Starts with drafts, measures both shapes, then keeps the faster one.
    """

    def __init__(self):
        self.wide = True
        self._seconds = {wide: deque(maxlen=SAMPLES) for wide in (False, True)}  # a step
        self._tokens = self._forwards = 0.0  # of steps with drafts, older ones fading
        self._since_trial = 0
        self._compiled = set()
        self._measuring = deque([True, False])

    @property
    def known(self) -> Known | None:
        """None until both shapes were timed and some drafts were checked."""
        if not all(self._seconds.values()) or self._forwards == 0:
            return None
        narrow, wide = (statistics.median(self._seconds[shape]) for shape in (False, True))
        return Known(narrow, wide, self._tokens / self._forwards)

    def turn(self, sizes: Hashable) -> Turn:
        """What to run next on arrays of these sizes; the first call with new ones compiles."""
        if not self._measuring:
            self._decide()
        wide = self._measuring[0] if self._measuring else self.wide
        if (wide, sizes) not in self._compiled:
            self._compiled.add((wide, sizes))
            return Turn(wide, steps=1)
        if self._measuring:
            return Turn(self._measuring.popleft(), MEASURED_STEPS, timed=True)
        return Turn(wide)

    def _decide(self):
        known = self.known
        if known is None:
            return
        self.wide = drafts_pay(known, self.wide)
        if self._since_trial >= trial_interval(known, self.wide):
            self._measuring.extend((not self.wide, self.wide))
            self._since_trial = 0

    def took(self, wide: bool, steps: int, seconds: float):
        """A timed call did so many steps in so many seconds."""
        if steps:
            self._seconds[wide].append(seconds / steps)

    def saw(self, wide: bool, gained_B: np.ndarray, forwards_B: np.ndarray, cold_B: np.ndarray):
        """What rows gained in how many forwards of one call; a cold row had no drafts to check in its first."""
        self._since_trial += int(forwards_B.max())
        if not wide:
            return
        without = cold_B & (forwards_B > 0)
        forwards = int((forwards_B - without).sum())
        fade = 0.5 ** (forwards / HALF_LIFE)
        self._tokens = fade * self._tokens + int((gained_B - without).sum())
        self._forwards = fade * self._forwards + forwards
