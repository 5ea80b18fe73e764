"""Predictions of many held-out configurations against their measurement: the error split by cause, beside the noise.

Everything is resampled over prompts: test prompts in the blocks in which they were measured, calibration prompts in
groups of the same size, both drawn anew 2000 times, the same draw for all configurations. Intervals of signed errors
are 95 % percentiles. Means of absolute errors grow when their terms are drawn with more noise, so theirs are reflected
at the value (basic bootstrap).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from calibration.replayed_times import replayed_seconds
from calibration.validate import interval
from sim import metrics
from sim.errors import BadInput
from sim.metrics import Estimate
from sim.policy import Policy
from sim.simulate import Prediction
from sim.system import System
from sim.trace import Source, Trace

FloatArray = NDArray[np.float64]
SCHEMA = 1
NUM_DRAWS = 2000
SEED_OF_TEST, SEED_OF_CALIBRATION = 1, 2
SIDES = ("after_hit", "after_miss")


@dataclass(frozen=True)
class Totals:
    """Sums over each block of prompts, all (num_blocks,): what decoding took and what came of it. `lookups` and `hits`
    are (2, num_blocks) by the source of the round that ended with the look-up: a hit, a miss."""

    tokens: FloatArray
    seconds: FloatArray
    rounds: FloatArray
    lookups: FloatArray
    hits: FloatArray

    def rate(self, weights: FloatArray) -> FloatArray:
        """(draws, num_blocks) weights -> (draws,) tokens/s."""
        return (weights @ self.tokens) / (weights @ self.seconds)

    def tokens_per_round(self, weights: FloatArray) -> FloatArray:
        return (weights @ self.tokens) / (weights @ self.rounds)

    def hit_rate(self, weights: FloatArray, side: int | None = None) -> FloatArray:
        """Of the look-ups of one side, or of all; NaN where there was none."""
        hits, lookups = (t.sum(0) if side is None else t[side] for t in (self.hits, self.lookups))
        with np.errstate(invalid="ignore"):
            return (weights @ hits) / (weights @ lookups)


def predicted_totals(prediction: Prediction[Policy], block: int) -> Totals:
    """By groups of `block` calibration prompts that follow one another."""
    e = prediction.expectation
    starts = np.arange(0, len(e.num_tokens), block)

    def sums(values: FloatArray) -> FloatArray:
        return np.add.reduceat(np.asarray(values, dtype=float), starts, axis=-1)

    return Totals(*map(sums, (e.num_tokens, e.seconds, e.num_rounds, e.num_lookups, e.num_hits)))


def measured_totals(trace: Trace, block: int) -> Totals:
    """By blocks of `block` test prompts, whose batches do not go beyond them."""
    num_blocks = -(-len(trace.sequences) // block)
    by_block: dict[str, FloatArray] = {name: np.zeros(num_blocks) for name in ("tokens", "seconds", "rounds")}
    by_side = {name: np.zeros((2, num_blocks)) for name in ("lookups", "hits")}
    for name, amounts in (("tokens", metrics.decoded(trace)), ("seconds", metrics.decoding_s(trace))):
        for sequence, amount in amounts.items():
            by_block[name][sequence // block] += amount
    before = None
    for r in sorted(trace.rounds, key=lambda r: (r.sequence, r.index)):
        by_block["rounds"][r.sequence // block] += 1
        if before is not None and before.sequence == r.sequence and r.source in metrics.LOOKUPS:
            side = 0 if before.source is Source.HIT else 1
            by_side["lookups"][side, r.sequence // block] += 1
            by_side["hits"][side, r.sequence // block] += r.source in metrics.HITS
        before = r
    return Totals(**by_block, **by_side)


def _added(parts: Sequence[Totals]) -> Totals:
    names = ("tokens", "seconds", "rounds", "lookups", "hits")
    return Totals(*(np.sum([getattr(part, name) for part in parts], axis=0) for name in names))


def replayed_by_block(trace: Trace, policy: Policy, system: System, block: int) -> FloatArray:
    """(num_blocks,) expected decode seconds of the rounds that were measured."""
    of_batch = replayed_seconds(trace, policy, system)
    total = np.zeros(-(-len(trace.sequences) // block))
    first: dict[int, int] = {}
    for sequence, batch in metrics.batch_numbers([trace]).items():
        first[batch] = min(sequence, first.get(batch, sequence))
    for batch, seconds in of_batch.items():
        total[first[batch] // block] += seconds
    return total


@dataclass(frozen=True)
class Result:
    """One configuration: what was predicted, with the profile alone (`forecast`) and at the speed that the machine had
    during the run, and the repeats of its measurement. `replayed_s` is what `prediction`'s system says that the
    measured rounds take, all repeats together, by block."""

    batch_size: int
    block: int
    forecast: Prediction[Policy]
    prediction: Prediction[Policy]
    repeats: tuple[Totals, ...]
    replayed_s: FloatArray

    @classmethod
    def of(
        cls,
        batch_size: int,
        block: int,
        forecast: Prediction[Policy],
        prediction: Prediction[Policy],
        traces: Sequence[Trace],
        system: System,
    ) -> Result:
        """Raises `BadInput` if a trace is of another policy or of forced accept counts."""
        policy = prediction.policy
        for trace in traces:
            trace.require_generation()
            if trace.policy != policy.to_dict():
                raise BadInput("trace.policy", f"must be {policy.name}, which was predicted", trace.policy)
        replayed_s = np.sum([replayed_by_block(trace, policy, system, block) for trace in traces], axis=0)
        repeats = tuple(measured_totals(trace, block) for trace in traces)
        return cls(batch_size, block, forecast, prediction, repeats, replayed_s)

    @property
    def policy(self) -> Policy:
        return self.prediction.policy

    @property
    def kind(self) -> str:
        return str(self.policy.to_dict()["kind"])

    @cached_property
    def measured(self) -> Totals:
        """All repeats together."""
        return _added(self.repeats)

    @cached_property
    def predicted(self) -> Totals:
        return predicted_totals(self.prediction, self.block)

    @cached_property
    def forecasted(self) -> Totals:
        return predicted_totals(self.forecast, self.block)

    def of_repeats(self, weights: FloatArray) -> FloatArray:
        """(repeats, draws) tokens/s."""
        return np.stack([repeat.rate(weights) for repeat in self.repeats])


@dataclass(frozen=True)
class Draws:
    """(draws, blocks) how often each block of test prompts, and each group of calibration prompts, was drawn. The first
    draw is the data as they are."""

    test: FloatArray
    calibration: FloatArray

    @classmethod
    def of(cls, num_blocks: int, num_groups: int) -> Draws:
        return cls(_weights(num_blocks, SEED_OF_TEST), _weights(num_groups, SEED_OF_CALIBRATION))


def _weights(num: int, seed: int) -> FloatArray:
    rng = np.random.default_rng([metrics.BOOTSTRAP_SEED, seed])
    picks = rng.integers(0, num, size=(NUM_DRAWS, num))
    weights = np.ones((1 + NUM_DRAWS, num))
    weights[1:] = 0.0
    np.add.at(weights, (1 + np.arange(NUM_DRAWS)[:, None], picks), 1.0)
    return weights


def _signed(values: FloatArray, n: int) -> Estimate:
    """The value is that of the data; the interval holds 95 % of the draws."""
    if n < 2 or np.isnan(values[0]):
        return Estimate(float(values[0]), -np.inf, np.inf, n)
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return Estimate(float(values[0]), float(low), float(high), n)


def _reflected(values: FloatArray, n: int, least: float, most: float) -> Estimate:
    """The same by the basic bootstrap, inside the statistic's domain."""
    plain = _signed(values, n)
    low, high = (min(most, max(least, 2 * plain.value - bound)) for bound in (plain.high, plain.low))
    return Estimate(plain.value, min(low, plain.value), max(high, plain.value), n)


@dataclass(frozen=True)
class Errors:
    """Signed errors of predictions, each (draws, configurations); those of hit rates are NaN where nothing is looked
    up."""

    tokens_per_s: FloatArray
    latency: FloatArray  # of tokens/s, had outcomes been known
    tokens_per_round: FloatArray
    hit_rate: FloatArray  # difference, not ratio

    @property
    def num_configurations(self) -> int:
        return self.tokens_per_s.shape[1]


class Validation:
    """The results of all configurations of a run, none left out."""

    def __init__(self, results: Sequence[Result]) -> None:
        if len(results) < 2:
            raise BadInput("validation", "must have at least two configurations", len(results))
        self.results = tuple(results)
        num_blocks, num_groups = len(results[0].measured.tokens), len(results[0].predicted.tokens)
        self.num_blocks = num_blocks
        self.draws = Draws.of(num_blocks, num_groups)

    # -------------------------------------------------------------------------------------------------------- errors

    @cached_property
    def errors(self) -> Errors:
        """Of the predictions at the speed of the run."""
        return self.errors_of([result.predicted for result in self.results])

    @cached_property
    def forecast_errors(self) -> Errors:
        return self.errors_of([result.forecasted for result in self.results])

    def errors_of(self, predicted: Sequence[Totals]) -> Errors:
        """Of predictions for the configurations in their order."""
        test, calibration = self.draws.test, self.draws.calibration
        columns = []
        for result, own in zip(self.results, predicted, strict=True):
            measured = result.measured
            columns.append(
                (
                    own.rate(calibration) / measured.rate(test) - 1,
                    (test @ measured.seconds) / (test @ result.replayed_s) - 1,
                    own.tokens_per_round(calibration) / measured.tokens_per_round(test) - 1,
                    own.hit_rate(calibration) - measured.hit_rate(test),
                )
            )
        return Errors(*(np.stack(column, axis=1) for column in zip(*columns, strict=True)))

    def noise(self, *, beside_others: bool) -> Estimate:
        """Mean absolute difference between a repeat of a configuration and the mean of its other repeats: what a
        prediction by another real run of the same prompts would be off. `beside_others` takes the mean speed of all
        configurations in a repeat out, which is the machine's drift from repeat to repeat."""
        rates = np.stack([result.of_repeats(self.draws.test) for result in self.results])
        if rates.shape[1] < 2:
            raise BadInput("repeats", "must be at least 2 to know the noise", rates.shape[1])
        if beside_others:
            rates = rates / np.exp(np.log(rates).mean(0))
        others = (rates.sum(1, keepdims=True) - rates) / (rates.shape[1] - 1)
        return _reflected(np.abs(rates / others - 1).mean((0, 1)), self.num_blocks, 0.0, np.inf)

    # -------------------------------------------------------------------------------------------------------- figures

    def mape(self, errors: FloatArray) -> Estimate:
        """Mean over configurations of the absolute error; those without one are left out."""
        return _reflected(np.nanmean(np.abs(errors), axis=1), self.num_blocks, 0.0, np.inf)

    def mean_error(self, errors: FloatArray) -> Estimate:
        """Mean signed error: what all configurations have in common."""
        return _signed(np.nanmean(errors, axis=1), self.num_blocks)

    def worst(self, errors: FloatArray) -> Estimate:
        """Largest absolute error of a configuration."""
        return _reflected(np.nanmax(np.abs(errors), axis=1), self.num_blocks, 0.0, np.inf)

    def rank_correlation(self, predicted: Sequence[Totals], batch_size: int | None = None) -> Estimate | None:
        """Spearman's, between predicted and measured speed-up over AR of the same batch size; of all configurations but
        AR, or those of a batch size. None with fewer than three."""
        pairs = [
            (own.rate(self.draws.calibration) / ar_own, result.measured.rate(self.draws.test) / ar_measured)
            for result, own, ar_own, ar_measured in self._beside_ar(predicted)
            if result.kind != "ar" and batch_size in (None, result.batch_size)
        ]
        if len(pairs) < 3:
            return None
        ranks = [rankdata(np.stack(side, axis=1), axis=1) for side in zip(*pairs, strict=True)]
        centred = [r - r.mean(1, keepdims=True) for r in ranks]
        norm = np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
        return _reflected((centred[0] * centred[1]).sum(1) / np.maximum(norm, 1e-12), self.num_blocks, -1.0, 1.0)

    def _beside_ar(self, predicted: Sequence[Totals]) -> list[tuple[Result, Totals, FloatArray, FloatArray]]:
        ar = {
            result.batch_size: (own.rate(self.draws.calibration), result.measured.rate(self.draws.test))
            for result, own in zip(self.results, predicted, strict=True)
            if result.kind == "ar"
        }
        return [(result, own, *ar[result.batch_size]) for result, own in zip(self.results, predicted, strict=True)]

    def figures(self, predicted: Sequence[Totals]) -> dict[str, Any]:
        """The aggregates of some predictions of all configurations."""
        errors = self.errors_of(predicted)
        return {
            "mape_tokens_per_s": interval(self.mape(errors.tokens_per_s)),
            "mean_error_tokens_per_s": interval(self.mean_error(errors.tokens_per_s)),
            "worst_tokens_per_s": interval(self.worst(errors.tokens_per_s)),
            "hit_rate_mae": interval(self.mape(errors.hit_rate)) if self.has_lookups else None,
            "rank_correlation": interval(self.rank_correlation(predicted)),
        }

    @property
    def has_lookups(self) -> bool:
        return any(result.measured.lookups.any() for result in self.results)

    def causes(self) -> dict[str, Any]:
        """The same errors apart: what each cause alone does, absolute and signed."""
        errors = self.errors
        apart = {
            "latency_and_overlap": errors.latency,
            "acceptance": errors.tokens_per_round,
            "all_together": errors.tokens_per_s,
        }
        if self.has_lookups:
            apart["hits"] = errors.hit_rate
        return {
            name: {"mean_absolute": interval(self.mape(own)), "mean_signed": interval(self.mean_error(own))}
            for name, own in apart.items()
        }

    # ----------------------------------------------------------------------------------------------------------- rows

    def rows(self) -> list[dict[str, Any]]:
        """One per configuration, JSON-safe."""
        return [self._row(number, result) for number, result in enumerate(self.results)]

    def _row(self, number: int, result: Result) -> dict[str, Any]:
        rates = result.of_repeats(np.ones((1, self.num_blocks)))[:, 0]
        error = self._with_noise(_signed(self.errors.tokens_per_s[:, number], self.num_blocks), rates)
        return {
            "name": result.policy.name,
            "policy": result.policy.to_dict(),
            "batch_size": result.batch_size,
            "engine": result.prediction.engine,
            "forecast": {"tokens_per_s": interval(result.forecast.tokens_per_s)},
            "predicted": self._of(result.predicted, self.draws.calibration),
            "measured": self._of(result.measured, self.draws.test) | {"repeats": rates.tolist()},
            "noise": float((rates.max() - rates.min()) / 2 / rates.mean()),
            "error": {
                "tokens_per_s": interval(error),
                "forecast_tokens_per_s": float(self.forecast_errors.tokens_per_s[0, number]),
                "latency_and_overlap": interval(_signed(self.errors.latency[:, number], self.num_blocks)),
                "tokens_per_round": interval(_signed(self.errors.tokens_per_round[:, number], self.num_blocks)),
                "hit_rate": _if_defined(_signed(self.errors.hit_rate[:, number], self.num_blocks)),
            },
            "verdict": _verdict(error),
        }

    def _with_noise(self, error: Estimate, rates: FloatArray) -> Estimate:
        """The interval widened by what the repeats differ by."""
        of_mean = 1.96 * float(rates.std(ddof=1)) / np.sqrt(len(rates)) / float(rates.mean()) if len(rates) > 1 else 0.0
        below, above = (np.hypot(side, of_mean) for side in (error.value - error.low, error.high - error.value))
        return Estimate(error.value, error.value - below, error.value + above, error.n)

    def _of(self, totals: Totals, weights: FloatArray) -> dict[str, Any]:
        n = weights.shape[1]
        rates = {"hit_rate": None, "hit_rate_after_hit": 0, "hit_rate_after_miss": 1}
        return {
            "tokens_per_s": interval(_signed(totals.rate(weights), n)),
            "tokens_per_round": interval(_signed(totals.tokens_per_round(weights), n)),
            **{name: _if_defined(_signed(totals.hit_rate(weights, side), n)) for name, side in rates.items()},
        }


def _if_defined(estimate: Estimate) -> dict[str, Any] | None:
    return None if np.isnan(estimate.value) else interval(estimate)


def _verdict(error: Estimate) -> str:
    if error.low <= 0 <= error.high:
        return "not distinguishable"
    return "predicted too fast" if error.value > 0 else "predicted too slow"


TOLERANCES: Mapping[str, Callable[[float, float], bool]] = {
    "mape_tokens_per_s": lambda value, bound: value <= bound,
    "hit_rate_mae": lambda value, bound: value <= bound,
    "rank_correlation": lambda value, bound: value >= bound,
    "regret": lambda value, bound: value <= bound,
}


def missed(figures: Mapping[str, Any], tolerance: Mapping[str, float]) -> list[str]:
    """What of `tolerance` was not reached, in words; a figure that does not apply is not missed."""
    found = []
    for name, bound in tolerance.items():
        value = figures[name]
        if value is not None and not TOLERANCES[name](value["value"], bound):
            rule = "at least" if name == "rank_correlation" else "at most"
            found.append(f"{name} is {value['value']:.3f}, not {rule} {bound}")
    return found
