"""Rounds of speculative decoding as engines count them, and what a plan learns from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from calibration.importers.imported import Assumed
from sim.errors import BadInput, require_count, require_number
from sim.parametric import conditional_from_cumulative
from sim.theory import acceptance_of_tokens_per_round

SPREAD_OF_PROMPTS = Assumed(
    "acceptance.shift", 0.0, -0.05, 0.05, "totals do not tell how much prompts differ, nor how other texts fare"
)
SHORTER = 0.99  # of the speculation length: drafts that are shorter on average are worth a word
DIGITS = 6


@dataclass(frozen=True)
class Speculation:
    """Rounds of one speculation length: tokens per round with the bonus token, and where it is known the share of all
    rounds that accept each position and everything before it."""

    speculation_length: int
    tokens_per_round: float
    cumulative: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_count("speculation length", self.speculation_length, 1)
        require_number("tokens per round (bonus included)", self.tokens_per_round, 1, self.speculation_length + 1)
        if self.cumulative:
            conditional_from_cumulative(self.cumulative)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Of the tokens tested, the share accepted: by position, or one rate that leads to the tokens per round."""
        if self.cumulative:
            return conditional_from_cumulative(self.cumulative)
        return (acceptance_of_tokens_per_round(self.tokens_per_round, self.speculation_length),)

    def learned(self) -> dict[str, Any]:
        """Keys of a file of numbers."""
        if self.cumulative:
            return {"acceptance.cumulative": [round(share, DIGITS) for share in self.cumulative]}
        return {
            "acceptance.mean_acceptance_length": round(self.tokens_per_round, DIGITS),
            "acceptance.speculation_length": self.speculation_length,
        }

    def in_words(self) -> str:
        """What it says of acceptance."""
        by = "by position" if self.cumulative else "one rate for all positions, independent of each other"
        rates = ", ".join(f"{rate:.4g}" for rate in self.conditional)
        return (
            f"conditional acceptance {rates} ({by}), from {self.tokens_per_round:.4g} tokens per round with the bonus"
            f" token at speculation length {self.speculation_length}"
        )


@dataclass(frozen=True)
class DraftCounts:
    """Counters of an engine: rounds with a draft, their draft tokens, accepted ones, and accepted ones by position."""

    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    accepted_per_position: tuple[float, ...]

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        """What was counted since. Raises `BadInput` if positions differ or a counter went back."""
        pairs = list(zip(self.accepted_per_position, earlier.accepted_per_position, strict=False))
        difference = DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(later - before for later, before in pairs),
        )
        lowest = min(difference.num_drafts, difference.num_accepted_tokens, *difference.accepted_per_position, 0)
        if lowest < 0 or len(self.accepted_per_position) != len(earlier.accepted_per_position):
            raise BadInput("counters", "must not go back between two snapshots: give the earlier one first")
        return difference

    def speculation(self, name: str) -> Speculation:
        """Raises `BadInput` if nothing was drafted or the counters of `name` contradict each other."""
        if self.num_drafts <= 0 or not self.accepted_per_position:
            raise BadInput(name, "must count drafts, and accepted tokens per position")
        counts = (self.num_drafts, *self.accepted_per_position)
        if any(after > before for before, after in pairwise(counts)):
            raise BadInput(
                f"{name}: accepted per position", "must not rise and not exceed the drafts", list(counts[1:])
            )
        if abs(sum(self.accepted_per_position) - self.num_accepted_tokens) > 0.001 * self.num_accepted_tokens + 0.5:
            rule = f"must add up to the accepted tokens, {self.num_accepted_tokens:g}"
            raise BadInput(f"{name}: accepted per position", rule, sum(self.accepted_per_position))
        cumulative = tuple(count / self.num_drafts for count in self.accepted_per_position)
        return Speculation(len(cumulative), 1 + sum(cumulative), cumulative)

    def caveats(self) -> tuple[str, ...]:
        """What the counters hide."""
        share = self.num_draft_tokens / (self.num_drafts * len(self.accepted_per_position))
        if share >= SHORTER:
            return ()
        return (f"drafts have {100 * share:.0f} % of the full length on average: late positions count them as refused",)


def whose_acceptance(temperature: float | None) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The temperature as a key of a file of numbers, and what is to be said if it was not told."""
    if temperature is not None:
        return {"text.temperature": float(temperature)}, ()
    said = "the temperature and the sampling settings: temperature 0 is taken, and acceptance holds for one only"
    return {"text.temperature": 0.0}, (said,)
