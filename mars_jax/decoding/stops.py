"""Stop strings: where a text ends that was generated token by token."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Stopped(NamedTuple):
    """tokens: how many were generated until a stop string was complete. text: what precedes it."""

    tokens: int
    text: str


def find_stop(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stops: Sequence[str], least: int = 0
) -> Stopped | None:
    """The first place where a stop string is complete after at least `least` tokens.

    It does not depend on how tokens were grouped into runs. Of several strings completed by one token the one that
    begins first counts.
    """
    if not stops or not any(stop in decode(token_ids) for stop in stops):
        return None
    for count in range(max(1, least), len(token_ids) + 1):
        text = decode(token_ids[:count])
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        if places:
            return Stopped(count, text[: min(places)])
    return None
