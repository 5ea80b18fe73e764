"""Predictions of many held-out configurations against their measurement: the error split by cause, beside the noise.

Everything is resampled over prompts: test prompts in the blocks in which they were measured, calibration prompts in
groups of the same size, both drawn anew 2000 times, the same draw for all configurations. Intervals of signed errors
are 95 % percentiles. Means of absolute errors grow when their terms are drawn with more noise, so theirs are reflected
at the value (basic bootstrap).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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

    def by_block(amounts: Mapping[int, float]) -> FloatArray:
        total = np.zeros(-(-len(trace.sequences) // block))
        for sequence, amount in amounts.items():
            total[sequence // block] += amount
        return total

    def lookups(results: Collection[Source]) -> FloatArray:
        sides = (metrics.AFTER_HIT, metrics.AFTER_MISS)
        return np.stack([by_block(metrics.lookups_after(trace, side, results)) for side in sides])

    return Totals(
        tokens=by_block(metrics.decoded(trace)),
        seconds=by_block(metrics.decoding_s(trace)),
        rounds=by_block(Counter(r.sequence for r in trace.rounds)),
        lookups=lookups(metrics.LOOKUPS),
        hits=lookups(metrics.HITS),
    )


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
    during the run, and the repeats of its measurement. `replayed_s` is what the prediction's system says that the
    measured rounds take, all repeats together, by block; `forecast_replayed_s` what the forecast's says."""

    batch_size: int
    block: int
    forecast: Prediction[Policy]
    prediction: Prediction[Policy]
    repeats: tuple[Totals, ...]
    replayed_s: FloatArray
    forecast_replayed_s: FloatArray

    @classmethod
    def of(
        cls,
        batch_size: int,
        block: int,
        forecast: Prediction[Policy],
        prediction: Prediction[Policy],
        traces: Sequence[Trace],
        systems: tuple[System, System],
    ) -> Result:
        """`systems` are those of forecast and prediction. Raises `BadInput` if a trace is of another policy or of
        forced accept counts."""
        policy = prediction.policy
        for trace in traces:
            trace.require_generation()
            if trace.policy != policy.to_dict():
                raise BadInput("trace.policy", f"must be {policy.name}, which was predicted", trace.policy)
        before, then = (
            np.sum([replayed_by_block(trace, policy, system, block) for trace in traces], axis=0) for system in systems
        )
        repeats = tuple(measured_totals(trace, block) for trace in traces)
        return cls(batch_size, block, forecast, prediction, repeats, replayed_s=then, forecast_replayed_s=before)

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
    hit_rate_after_hit: FloatArray  # the same of the look-ups at the end of rounds after a hit
    hit_rate_after_miss: FloatArray


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
        return self._errors([(result.predicted, result.replayed_s) for result in self.results])

    @cached_property
    def forecast_errors(self) -> Errors:
        """Of those made from the profile alone."""
        return self._errors([(result.forecasted, result.forecast_replayed_s) for result in self.results])

    def _errors(self, predicted: Sequence[tuple[Totals, FloatArray]]) -> Errors:
        """Of predictions for the configurations in their order, each with what its system says of the measured
        rounds."""
        test, calibration = self.draws.test, self.draws.calibration
        rates, hits = self._errors_of_rates([own for own, _ in predicted])
        columns = []
        for result, (own, replayed_s) in zip(self.results, predicted, strict=True):
            measured = result.measured
            columns.append(
                (
                    (test @ measured.seconds) / (test @ replayed_s) - 1,
                    own.tokens_per_round(calibration) / measured.tokens_per_round(test) - 1,
                    *(own.hit_rate(calibration, side) - measured.hit_rate(test, side) for side in (0, 1)),
                )
            )
        latency, per_round, after_hit, after_miss = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
        return Errors(rates, latency, per_round, hits, after_hit, after_miss)

    def _errors_of_rates(self, predicted: Sequence[Totals]) -> tuple[FloatArray, FloatArray]:
        """(draws, configurations) errors of tokens/s and of hit rates."""
        test, calibration = self.draws.test, self.draws.calibration
        pairs = list(zip((result.measured for result in self.results), predicted, strict=True))
        rates = [own.rate(calibration) / measured.rate(test) - 1 for measured, own in pairs]
        hits = [own.hit_rate(calibration) - measured.hit_rate(test) for measured, own in pairs]
        return np.stack(rates, axis=1), np.stack(hits, axis=1)

    # --------------------------------------------------------------------------------------------------------- noise

    @property
    def noise(self) -> Estimate:
        """Mean absolute difference between a repeat of a configuration and the mean of its other repeats: what a
        prediction by another real run of the same prompts would be off."""
        return self._spread(self._of_repeats)

    @property
    def noise_without_drift(self) -> Estimate:
        """The same of rates over the common speed of all configurations in the same repeat."""
        return self._spread(self._of_repeats / self._common_speed)

    @property
    def drift(self) -> Estimate:
        """The same of the common speed itself: what happened to all configurations alike, for they were interleaved."""
        return self._spread(self._common_speed)

    @cached_property
    def _of_repeats(self) -> FloatArray:
        """(configurations, repeats, draws) tokens/s."""
        numbers = {len(result.repeats) for result in self.results}
        if len(numbers) > 1 or min(numbers) < 2:
            raise BadInput(
                "repeats", "must be as many of each configuration, and at least 2 to know the noise", numbers
            )
        return np.stack([result.of_repeats(self.draws.test) for result in self.results])

    @cached_property
    def _common_speed(self) -> FloatArray:
        """(1, repeats, draws) speed of all configurations in each repeat; its mean over the repeats is 1."""
        speed = np.exp(np.log(self._of_repeats).mean(0, keepdims=True))
        return speed / speed.mean(1, keepdims=True)

    def _spread(self, rates: FloatArray) -> Estimate:
        """(configurations, repeats, draws) -> mean absolute difference between a repeat and the mean of the others."""
        others = (rates.sum(1, keepdims=True) - rates) / (rates.shape[1] - 1)
        return _reflected(np.abs(rates / others - 1).mean((0, 1)), self.num_blocks, 0.0, np.inf)

    @cached_property
    def _noise_of_mean(self) -> float:
        """Relative standard error of a configuration's rate over its repeats. Two or three repeats of one know little
        of their own spread, so all configurations together say it; drift that met all is left out, for the reference
        policies in between met it too."""
        apart = (self._of_repeats / self._common_speed)[..., 0]
        relative = apart / apart.mean(1, keepdims=True)
        return float(np.sqrt(relative.var(1, ddof=1).mean() / relative.shape[1]))

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
        rates, hits = self._errors_of_rates(predicted)
        return {
            "mape_tokens_per_s": interval(self.mape(rates)),
            "mean_error_tokens_per_s": interval(self.mean_error(rates)),
            "worst_tokens_per_s": interval(self.worst(rates)),
            "hit_rate_mae": interval(self.mape(hits)) if self.has_lookups else None,
            "rank_correlation": interval(self.rank_correlation(predicted)),
        }

    @property
    def has_lookups(self) -> bool:
        return any(result.measured.lookups.any() for result in self.results)

    def causes(self, errors: Errors) -> dict[str, Any]:
        """The same errors apart: what each cause alone does, absolute and signed."""
        apart = {"latency_and_overlap": errors.latency, "acceptance": errors.tokens_per_round}
        if self.has_lookups:
            apart["hits"] = errors.hit_rate
            apart |= {f"hits_{side}": getattr(errors, f"hit_rate_{side}") for side in SIDES}
        apart["all_together"] = errors.tokens_per_s
        return {
            name: {"mean_absolute": interval(self.mape(own)), "mean_signed": interval(self.mean_error(own))}
            for name, own in apart.items()
            if not np.isnan(own[0]).all()
        }

    # ----------------------------------------------------------------------------------------------------------- rows

    def rows(self) -> list[dict[str, Any]]:
        """One per configuration, JSON-safe."""
        return [self._row(number, result) for number, result in enumerate(self.results)]

    def _row(self, number: int, result: Result) -> dict[str, Any]:
        rates = result.of_repeats(np.ones((1, self.num_blocks)))[:, 0]
        error = self._with_noise(_signed(self.errors.tokens_per_s[:, number], self.num_blocks))
        return {
            "name": result.policy.name,
            "policy": result.policy.to_dict(),
            "batch_size": result.batch_size,
            "engine": result.prediction.engine,
            "forecast": {"tokens_per_s": interval(result.forecast.tokens_per_s)},
            "predicted": self._of(result.predicted, self.draws.calibration),
            "measured": self._of(result.measured, self.draws.test) | {"repeats": rates.tolist()},
            "noise": float((rates.max() - rates.min()) / 2 / rates.mean()),
            "error": self._apart(self.errors, number),
            "forecast_error": self._apart(self.forecast_errors, number),
            "verdict": _verdict(error),
        }

    def _apart(self, errors: Errors, number: int) -> dict[str, Any]:
        """The errors of one configuration by cause."""

        def of(values: FloatArray) -> Estimate:
            return _signed(values[:, number], self.num_blocks)

        hit_rates = {"hit_rate": errors.hit_rate} | {
            f"hit_rate_{side}": getattr(errors, f"hit_rate_{side}") for side in SIDES
        }
        return {
            "tokens_per_s": interval(self._with_noise(of(errors.tokens_per_s))),
            "latency_and_overlap": interval(self._with_noise(of(errors.latency))),
            "tokens_per_round": interval(of(errors.tokens_per_round)),
            **{name: _if_defined(of(values)) for name, values in hit_rates.items()},
        }

    def _with_noise(self, error: Estimate) -> Estimate:
        """The interval widened by what repeats differ by."""
        of_mean = 1.96 * self._noise_of_mean * (1 + error.value)
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
