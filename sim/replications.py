"""Replications until a rate is known well enough: independent runs of one policy, each with a seed of its own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.errors import BadInput, require_count, require_number
from sim.streams import replication_seeds

RELATIVE_HALF_WIDTH = 0.02
MINIMUM = 16  # below it the spread of so few runs says little about its own size
CEILING = 4096
GROWTH = 4  # runs are at most so many times more after each look at them
MARGIN = 1.1  # more runs than the spread seen asks for, so that few further looks are needed

FloatArray = NDArray[np.float64]
RunSeeds = Callable[[Sequence[int]], tuple[ArrayLike, ArrayLike]]  # tokens and seconds of a run with each seed


class CeilingReached(UserWarning):
    """A rate is less sure than was asked for, because replications had reached their ceiling."""


@dataclass(frozen=True)
class Rate:
    """Tokens per second over independent replications, totals over totals.

    `half_width` is that of the 95 % interval for the mean over seeds, on the same texts: what more replications would
    make smaller. It is infinite with one replication. `reached_ceiling` says that replications ended before the half
    width asked for was reached. `totals` (2, num_replications) are tokens and seconds of each, in the order of the
    seeds: policies under one seed meet the same luck, and are compared replication by replication.
    """

    tokens_per_s: float
    half_width: float
    num_replications: int
    reached_ceiling: bool = False
    totals: FloatArray | None = field(default=None, compare=False, repr=False)

    @property
    def relative_half_width(self) -> float:
        return self.half_width / self.tokens_per_s if self.tokens_per_s else self.half_width

    @property
    def standard_error(self) -> float:
        """Of tokens/s; infinite with one replication."""
        if self.num_replications < 2:
            return math.inf
        return self.half_width / student_quantile(self.num_replications - 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: an infinite half width is None."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "half_width": self.half_width if math.isfinite(self.half_width) else None,
            "num_replications": self.num_replications,
            "reached_ceiling": self.reached_ceiling,
        }


def rate_of(tokens: ArrayLike, seconds: ArrayLike) -> Rate:
    """Ratio estimate of tokens/s with its half width by the delta method; (num_replications,) tokens and seconds.

    With R = sum(tokens) / sum(seconds), its variance is that of tokens - R seconds over n times the squared mean of
    seconds, and Student's t has n - 1 degrees of freedom. Raises `BadInput` on what is no total: NaN, infinite, < 0.
    """
    tokens, seconds = _totals("tokens", tokens), _totals("seconds", seconds)
    n = len(tokens)
    if len(seconds) != n:
        raise BadInput("seconds", f"must be as many as the tokens, {n}", len(seconds))
    if not seconds.sum() > 0:
        return Rate(0.0, 0.0 if n > 1 else math.inf, n)
    totals = np.stack([tokens, seconds])
    rate = float(tokens.sum() / seconds.sum())
    if n < 2:
        return Rate(rate, math.inf, n, totals=totals)
    error = float(np.std(tokens - rate * seconds, ddof=1)) / math.sqrt(n) / float(seconds.mean())
    return Rate(rate, student_quantile(n - 1) * error, n, totals=totals)


def _totals(name: str, given: ArrayLike) -> FloatArray:
    totals = np.asarray(given, dtype=float)
    wrong = totals[~(np.isfinite(totals) & (totals >= 0))]
    if wrong.size:
        raise BadInput(f"{name} of a replication", "must be a finite number >= 0", float(wrong[0]))
    return totals


def until(
    run: RunSeeds,
    *,
    seed: int,
    relative_half_width: float = RELATIVE_HALF_WIDTH,
    minimum: int = MINIMUM,
    ceiling: int = CEILING,
) -> Rate:
    """Call `run` with further seeds of the row that belongs to `seed` until the rate's relative half width is small
    enough, or `ceiling` replications are done, which is a warning (`CeilingReached`).

    At least `minimum` replications are made (fewer only under a lower ceiling), however sure they seem. The seeds are
    the first n of the row in order, whatever the portions in which they are run.
    """
    require_number("relative_half_width", relative_half_width, 0, above=True)
    minimum, ceiling = require_count("minimum", minimum, 1), require_count("ceiling", ceiling, 1)
    tokens, seconds = np.zeros(0), np.zeros(0)
    wanted = min(minimum, ceiling)
    while True:
        ran = run(replication_seeds(seed, wanted - len(tokens), first=len(tokens)))
        tokens, seconds = np.append(tokens, ran[0]), np.append(seconds, ran[1])
        rate = rate_of(tokens, seconds)
        if rate.relative_half_width <= relative_half_width:
            return rate
        if len(tokens) >= ceiling:
            return _stopped_by_ceiling(rate, relative_half_width)
        wanted = min(ceiling, _next_number(rate, relative_half_width))


def _next_number(rate: Rate, relative_half_width: float) -> int:
    n = rate.num_replications
    ratio = min(GROWTH, MARGIN * (rate.relative_half_width / relative_half_width) ** 2)
    return max(n + 1, math.ceil(n * ratio))


def _stopped_by_ceiling(rate: Rate, relative_half_width: float) -> Rate:
    warnings.warn(
        f"tokens/s known to {rate.relative_half_width:.1%} after {rate.num_replications} replications, the ceiling; "
        f"{relative_half_width:.1%} was asked for",
        CeilingReached,
        stacklevel=3,
    )
    return replace(rate, reached_ceiling=True)


def student_quantile(degrees_of_freedom: int, tail: float = 0.025) -> float:
    """The value that Student's t exceeds with probability `tail`."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, 1 - tail))
