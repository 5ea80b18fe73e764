"""How far an answer from numbers moves where the numbers are only known to lie in ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.numbers import Numbers, Range
from sim.policy import Policy
from sim.simulate import Prediction, predict_all
from sim.system import System

FloatArray = NDArray[np.float64]
SHARE_INSIDE = 0.9  # of the draws, inside the interval that is shown


@dataclass(frozen=True)
class Sensitivity:
    """What becomes of the answer if one number is at either end of its range and all others are as stated.

    `tokens_per_s` are those of the policy that is best at the stated numbers, at the lower and at the upper end; `best`
    the best policies there and `lost` the shares of their tokens/s that the former leaves.
    """

    range: Range
    tokens_per_s: tuple[float, float]
    best: tuple[Policy, Policy]
    lost: tuple[float, float]

    @property
    def gained(self) -> tuple[float, float]:
        """By what share the best policy at either end is faster there."""
        low, high = self.lost
        return low / (1 - low), high / (1 - high)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        entry = self.range
        return {
            "key": entry.key,
            "value": entry.value,
            "low": entry.low,
            "high": entry.high,
            "because": entry.because or None,
            "tokens_per_s": list(self.tokens_per_s),
            "best": [policy.name for policy in self.best],
            "lost": list(self.lost),
        }


@dataclass(frozen=True)
class Uncertainty:
    """Tokens/s of some policies in draws of all ranges at once, each number uniform in its range and independent of the
    others. `policies` begin with the one that is recommended at the stated numbers."""

    policies: tuple[Policy, ...]
    tokens_per_s: FloatArray  # (num_draws, num_policies)
    sensitivities: tuple[Sensitivity, ...]  # one per range
    seed: int

    @property
    def num_draws(self) -> int:
        return len(self.tokens_per_s)

    @property
    def intervals(self) -> FloatArray:
        """(num_policies, 2) between which tokens/s lie in `SHARE_INSIDE` of the draws."""
        tail = (1 - SHARE_INSIDE) / 2
        return np.quantile(self.tokens_per_s, (tail, 1 - tail), axis=0).T

    @property
    def best_shares(self) -> FloatArray:
        """(num_policies,) share of the draws in which the policy is the fastest; of equal ones the first counts."""
        fastest = np.argmax(np.round(self._shares_of_fastest, 9), axis=1)
        return np.bincount(fastest, minlength=len(self.policies)) / self.num_draws

    @property
    def mean_losses(self) -> FloatArray:
        """(num_policies,) share of tokens/s that a policy leaves to the fastest of each draw, on average."""
        return (1 - self._shares_of_fastest).mean(0)

    @property
    def worst_losses(self) -> FloatArray:
        """(num_policies,) the same in the worst draw."""
        return (1 - self._shares_of_fastest).max(0)

    @property
    def _shares_of_fastest(self) -> FloatArray:
        return self.tokens_per_s / self.tokens_per_s.max(1, keepdims=True)

    @property
    def surest(self) -> Policy:
        """The policy that leaves least to the fastest of each draw, on average."""
        return self.policies[int(np.argmin(np.round(self.mean_losses, 9)))]

    def in_words(self) -> str:
        """Whether the recommendation stands."""
        share = f"{100 * self.best_shares[0]:.0f} % of {self.num_draws} draws (seed {self.seed})"
        words = f"{self._losses_in_words(0)}; it is the best of these in {share}"
        surest = self.policies.index(self.surest)
        return words if surest == 0 else f"{words}. {self._losses_in_words(surest)}, the least of all"

    def _losses_in_words(self, index: int) -> str:
        mean, worst = self.mean_losses[index], self.worst_losses[index]
        return (
            f"{self.policies[index].name} leaves {100 * mean:.1f} % of tokens/s to the best of each draw on average,"
            f" {100 * worst:.1f} % at worst"
        )

    def ratio_interval(self, policy: Policy, other: Policy) -> tuple[float, float]:
        """Between which the ratio of two policies' tokens/s lies in `SHARE_INSIDE` of the draws."""
        tail = (1 - SHARE_INSIDE) / 2
        fast, slow = (self.tokens_per_s[:, self.policies.index(p)] for p in (policy, other))
        low, high = np.quantile(fast / slow, (tail, 1 - tail))
        return float(low), float(high)

    def ranges_in_words(self) -> str:
        """Which range by itself makes another policy the best."""
        ends = [
            f"{entry.range.key} = {end:g} ({best.name} then, {100 * gained:.1f} % faster)"
            for entry in self.sensitivities
            for end, best, gained in zip((entry.range.low, entry.range.high), entry.best, entry.gained, strict=True)
            if gained > 1e-9
        ]
        if not ends:
            return f"No range by itself makes another policy the best, of {len(self.sensitivities)}"
        return f"By itself, of {len(self.sensitivities)} ranges, this makes another policy the best: {'; '.join(ends)}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        columns = zip(self.policies, self.intervals, self.best_shares, self.mean_losses, self.worst_losses, strict=True)
        return {
            "num_draws": self.num_draws,
            "seed": self.seed,
            "share_inside": SHARE_INSIDE,
            "surest": self.surest.name,
            "policies": [
                {
                    "name": policy.name,
                    "tokens_per_s": {"low": float(low), "high": float(high)},
                    "best_in_share_of_draws": float(best),
                    "mean_loss": float(mean),
                    "worst_loss": float(worst),
                }
                for policy, (low, high), best, mean, worst in columns
            ],
            "sensitivities": [entry.to_dict() for entry in self.sensitivities],
        }


def uncertainty(
    numbers: Numbers,
    stated: Sequence[Prediction[Policy]],
    num_draws: int,
    seed: int,
    watched: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Uncertainty:
    """Predict the policies of `stated`, the recommended one first, again in `num_draws` draws of the numbers' ranges.

    Draws are predicted by the exact engine; where `stated` is of another one, which knows the ends of batches, they are
    scaled to it. The draws, and then the ranges, are gone through by `watched`, which may tell how far it is. Raises
    `BadInput` if the ranges allow what is impossible.
    """
    policies = [prediction.policy for prediction in stated]
    rate = _Rates(numbers, stated)
    random = np.random.default_rng(seed)
    draws = [{entry.key: _draw(entry, random) for entry in numbers.ranges} for _ in range(num_draws)]
    tokens_per_s = np.array([rate.at(values) for values in watched(draws)])
    sensitivities = [_sensitivity(entry, policies, rate) for entry in watched(numbers.ranges)]
    return Uncertainty(tuple(policies), tokens_per_s, tuple(sensitivities), seed)


class _Rates:
    """Tokens/s of all policies at values of the ranges."""

    def __init__(self, numbers: Numbers, stated: Sequence[Prediction[Policy]]) -> None:
        self.numbers = numbers
        self.policies = [prediction.policy for prediction in stated]
        rates = np.array([prediction.tokens_per_s.value for prediction in stated])
        self.scale = rates / self._exactly(numbers.system)

    def at(self, values: dict[str, float]) -> FloatArray:
        return self._exactly(self.numbers.at(values)) * self.scale

    def _exactly(self, system: System) -> FloatArray:
        predictions = predict_all(self.policies, self.numbers.workload, system)
        return np.array([prediction.tokens_per_s.value for prediction in predictions])


def _draw(entry: Range, random: np.random.Generator) -> float:
    if entry.is_whole:
        return int(random.integers(int(entry.low), int(entry.high), endpoint=True))
    return float(random.uniform(entry.low, entry.high))


def _sensitivity(entry: Range, policies: list[Policy], rate: _Rates) -> Sensitivity:
    ends = [rate.at({entry.key: int(end) if entry.is_whole else end}) for end in (entry.low, entry.high)]
    best = [int(np.argmax(np.round(rates / rates.max(), 9))) for rates in ends]
    low, high = ends
    return Sensitivity(
        range=entry,
        tokens_per_s=(float(low[0]), float(high[0])),
        best=(policies[best[0]], policies[best[1]]),
        lost=(float(1 - low[0] / low.max()), float(1 - high[0] / high.max())),
    )
