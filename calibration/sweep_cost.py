"""What running every policy of a search would have cost, beside the profile that predicts them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sim.search import SearchResult


@dataclass(frozen=True)
class SweepCost:
    """`seconds` of decoding `num_prompts` texts by each of `num_policies` in each of `num_repeats`, as predicted:
    prefills and warming up are left out."""

    num_policies: int
    num_prompts: int
    num_repeats: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep_cost(found: SearchResult, num_prompts: int, num_repeats: int) -> SweepCost:
    """Of the policies that can be predicted; texts are as those of the agreement, on the mean."""
    seconds_per_prompt = sum(float(prediction.expectation.seconds.mean()) for prediction in found.ranked)
    return SweepCost(len(found.ranked), num_prompts, num_repeats, seconds_per_prompt * num_prompts * num_repeats)
