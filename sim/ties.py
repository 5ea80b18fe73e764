"""Which policies are no worse than the fastest as far as the data can tell, and which of them is the simplest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics import bootstrap_weights
from sim.policy import Fallback, LateBuild, Policy, SpeculativeSpeculative
from sim.replications import student_quantile
from sim.simulate import Prediction, totals_by_batch

FloatArray = NDArray[np.float64]
ERROR_RATE = 0.05  # of all comparisons of a search together: how often its ties may lack the policy that is truly best
NEGLIGIBLE = 1e-9  # of a rate: what differs by less is equal


@dataclass(frozen=True)
class Contrast:
    """A policy beside the fastest one: the ratio of what is maximised, with its standard error over the same prompts.

    `num_samples` are the prompts, batches of prompts or replications that the error is over; 0 where both rates are
    exact. With one there is no error to be known: it is infinite.
    """

    ratio: float
    standard_error: float
    num_samples: int
    num_comparisons: int

    @property
    def is_tie(self) -> bool:
        """Not significantly worse: one-sided, Student's t, at `ERROR_RATE` over the number of comparisons
        (Bonferroni). Then the policy that is truly best is among the ties of a search with probability 95 %."""
        return 1 - self.ratio <= self.margin + NEGLIGIBLE

    @property
    def margin(self) -> float:
        """The largest shortfall that would not be significant."""
        if self.standard_error == 0:
            return 0.0
        if self.num_samples < 2:
            return np.inf
        tail = ERROR_RATE / max(1, self.num_comparisons)
        return student_quantile(self.num_samples - 1, tail) * self.standard_error

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: an unknown error is None."""
        known = np.isfinite(self.standard_error)
        return {
            "ratio": self.ratio,
            "standard_error": self.standard_error if known else None,
            "num_samples": self.num_samples,
            "is_tie": self.is_tie,
        }


def contrasts(
    predictions: Sequence[Prediction[Policy]],
    fastest: Prediction[Policy],
    weights: Sequence[float],
    *,
    num_comparisons: int,
    texts_are_alike: bool,
) -> list[Contrast]:
    """Every prediction beside the fastest; `weights`, those of the predictions and then that of the fastest, make what
    is maximised of tokens/s.

    Errors are paired bootstraps: the same prompts are drawn for both policies. Where texts are alike
    (`sim.parametric`), prompts say nothing; of a sampled engine replications under the same seeds take their place.
    """
    everything = [*predictions, fastest]
    rates = np.array([p.tokens_per_s.value for p in everything]) * np.asarray(weights, dtype=float)
    ratios = rates[:-1] / max(rates[-1], 1e-300)
    if not texts_are_alike:
        tokens, seconds = totals_by_batch(everything)
        errors, num = _errors_over_prompts(tokens, seconds, ratios)
        return [Contrast(float(r), float(e), num, num_comparisons) for r, e in zip(ratios, errors, strict=True)]
    return [
        Contrast(float(ratio), *_error_over_replications(prediction, fastest, float(ratio)), num_comparisons)
        for prediction, ratio in zip(predictions, ratios, strict=True)
    ]


def _errors_over_prompts(tokens: FloatArray, seconds: FloatArray, ratios: FloatArray) -> tuple[FloatArray, int]:
    """Of the ratios of all rows to the last one."""
    num = tokens.shape[1]
    is_same = (tokens[:-1] == tokens[-1]).all(1) & (seconds[:-1] == seconds[-1]).all(1)
    if num < 2:
        return np.where(is_same, 0.0, np.inf), num
    drawn = bootstrap_weights(num)
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = (drawn @ tokens.T) / (drawn @ seconds.T)
        drawn_ratios = rates[:, :-1] / rates[:, -1:]
    relative = np.nanstd(drawn_ratios, axis=0) / np.maximum(np.nanmean(drawn_ratios, axis=0), 1e-300)
    return np.where(is_same, 0.0, relative * ratios), num


def _error_over_replications(one: Prediction[Policy], fastest: Prediction[Policy], ratio: float) -> tuple[float, int]:
    """Standard error and number of replications; no error where nothing was sampled."""
    sampled = [p.replications.totals for p in (one, fastest) if p.replications and p.replications.totals is not None]
    if len(sampled) < 2 or one is fastest:
        return 0.0, 0
    num = min(totals.shape[1] for totals in sampled)
    if num < 2:
        return np.inf, num
    rows = [totals[:, :num] / totals[:, :num].mean(1, keepdims=True) for totals in sampled]
    relative = [tokens - seconds for tokens, seconds in rows]
    return float(np.std(relative[0] - relative[1], ddof=1) / np.sqrt(num) * ratio), num


def simplicity(policy: Policy) -> tuple[Any, ...]:
    """Ascending from the simplest: AR, SD, SSD; then the shorter speculation, the smaller build, fallbacks as
    `Fallback` lists them, plain sampling, builds that are waited for."""
    if not isinstance(policy, SpeculativeSpeculative):
        return (min(policy.speculation_length, 1), policy.speculation_length)
    lists = (policy.fan_out_after_hit, policy.fan_out_after_miss)
    return (
        2,
        policy.speculation_length,
        max(map(sum, lists)),
        sum(map(sum, lists)),
        list(Fallback).index(policy.fallback),
        -policy.downweight,
        policy.on_late_build is LateBuild.ABANDON,
        lists,
    )
