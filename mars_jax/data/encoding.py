"""Many chats to token ids, and the account of what became of each."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mars_jax.data.chat import Chat, RefusedChatError, encode_chats
from mars_jax.data.packing import cut, fit
from mars_jax.objective.streams import StreamConfig

log = logging.getLogger("mars_jax.data")

CHUNK = 512  # chats a call of the tokenizer
WORTH_A_WARNING = 0.01  # share of the chats


@dataclass(frozen=True)
class DataReport:
    """What became of the chats that were read.

    kept includes truncated. dropped: nothing to train, or nothing left of it. refused: by reason, see `data.chat`.
    """

    source: str
    read: int
    kept: int
    truncated: int
    dropped: int
    refused: dict[str, int]
    tokens: int
    trained_tokens: int
    rows: int
    row_length: int

    @classmethod
    def of(cls, source: str, read: int, kept: Sequence[Chat], counts: Counter, rows: int, row_length: int):
        """The account of `encode_all`'s results once they are packed into `rows` rows."""
        refused = {reason: n for reason, n in counts.items() if reason not in ("truncated", "dropped")}
        tokens = sum(len(chat.tokens) for chat in kept)
        trained = sum(chat.trained for chat in kept)
        return cls(
            source, read, len(kept), counts["truncated"], counts["dropped"], refused, tokens, trained, rows, row_length
        )

    @classmethod
    def total(cls, source: str, parts: Sequence["DataReport"], row_length: int):
        """The account of a data set that was treated in parts."""
        names = ("read", "kept", "truncated", "dropped", "tokens", "trained_tokens", "rows")
        sums = {name: sum(getattr(part, name) for part in parts) for name in names}
        refused = sum((Counter(part.refused) for part in parts), Counter())
        return cls(source=source, refused=dict(refused), row_length=row_length, **sums)

    def __str__(self) -> str:
        refused = "".join(f", {count} refused ({reason})" for reason, count in sorted(self.refused.items()))
        fill = self.tokens / max(1, self.rows * self.row_length)
        return (
            f"data {self.source}: {self.kept} of {self.read} chats kept ({self.truncated} truncated), "
            f"{self.dropped} dropped without anything to train{refused}; "
            f"{self.trained_tokens} of {self.tokens} tokens trained; {self.rows} rows of {self.row_length} ({fill:.0%})"
        )


def encode_all(chats: Sequence[Sequence[Mapping]], stream: StreamConfig, tokenizer) -> tuple[list[Chat], Counter]:
    """The chats that have something to train, cut to a row, and counts: `truncated`, `dropped`, reasons of refusal."""
    kept: list[Chat] = []
    counts = Counter(truncated=0, dropped=0)
    squeezed = 0
    last_log = time.monotonic()
    for start in range(0, len(chats), CHUNK):
        if time.monotonic() - last_log > 10:
            log.info("encoded %d of %d chats", start, len(chats))
            last_log = time.monotonic()
        for chat in encode_chats(chats[start : start + CHUNK], tokenizer):
            if isinstance(chat, RefusedChatError):
                counts[chat.reason] += 1
            elif (fitted := fit(chat, stream)) is None:
                counts["dropped"] += 1
            else:
                if fitted.trained < chat.trained:
                    counts["truncated"] += 1
                    squeezed += fitted.trained < cut(chat, stream.row_length).trained
                kept.append(fitted)
    if squeezed:
        log.log(
            logging.WARNING if squeezed > WORTH_A_WARNING * len(chats) else logging.INFO,
            "%d of %d chats are cut shorter than objective.row_length=%d, for want of room for their placeholders: "
            "raise objective.noisy_length=%d", squeezed, len(chats), stream.row_length, stream.noisy_length,
        )  # fmt: skip
    return kept, counts
