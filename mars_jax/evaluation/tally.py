"""Counts of what decoding did, for one task or all."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Sums over answers. `reached[j]`: forwards whose run took at least j + 1 tokens."""

    answers: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    truncated_prompts: int = 0
    reached: list[int] = field(default_factory=list)

    def add(self, accepted: Sequence[int], *, prompt_tokens: int, seconds: float, truncated: bool) -> None:
        """One answer: the run length of each of its forwards, and its share of the wall-clock seconds."""
        self.answers += 1
        self.prompt_tokens += prompt_tokens
        self.tokens += sum(accepted)
        self.forwards += len(accepted)
        self.seconds += seconds
        self.truncated_prompts += truncated
        longest = max(accepted, default=0)
        self.reached += [0] * (longest - len(self.reached))
        for j in range(longest):
            self.reached[j] += sum(run > j for run in accepted)

    def summary(self) -> dict:
        """For the results file. Acceptance by offset j: the share of forwards that took the token at offset j.

        Prefill's own forward is not counted; its time is. Runs are those after the cut at the end of an answer.
        """
        return {
            "answers": self.answers,
            "prompt_tokens": self.prompt_tokens,
            "truncated_prompts": self.truncated_prompts,
            "tokens": self.tokens,
            "forwards": self.forwards,
            "tokens_per_forward": self.tokens / self.forwards if self.forwards else None,
            "acceptance_by_offset": [n / self.forwards for n in self.reached],
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
        }


def total(tallies: Sequence[Tally]) -> Tally:
    result = Tally()
    for tally in tallies:
        for name in ("answers", "prompt_tokens", "tokens", "forwards", "seconds", "truncated_prompts"):
            setattr(result, name, getattr(result, name) + getattr(tally, name))
        result.reached += [0] * (len(tally.reached) - len(result.reached))
        for j, count in enumerate(tally.reached):
            result.reached[j] += count
    return result
