"""Least squares for a pair: which K, fan-out, step times and acceptances explain Table B.3 and what else was fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import expit, logit
from scipy.stats import chi2 as chi2_law

from experiments.paper.miss_curves import near_curves
from experiments.paper.pair import (
    Curves,
    PairModel,
    Settings,
    Times,
    hit_rate_of_all,
    mean_hit_rate,
    mean_tokens_per_s,
    miss_scales,
)
from experiments.paper.published import PAIRS, Published
from sim.policy import Fallback
from sim.theory import expected_tokens_per_round, sd_speedup, ssd_speedup

FloatArray = NDArray[np.float64]
LENGTHS = tuple(range(4, 9))  # the public engine runs 6 and 7
FAN_OUTS = tuple(range(1, 8))
MISS_SCALING = 1.0  # misses are as frequent as rejections; 0: on all data sets the same
NOT_WORSE = float(chi2_law.ppf(0.95, 3))  # what three free numbers gain by chance
MOST_STEPS = 200  # of least squares
NUM_CORRECTIONS = 2  # what is left is well below a thousandth of the numbers
WITHOUT_HIT_RATE = "the hit rate is left out"  # an assumption by its name
START_ACCEPTANCE, START_DRAFT_MS, START_LATE_MS = 0.8, 1.5, 0.5


@dataclass(frozen=True)
class Evidence:
    """The numbers that a pair is fitted to: tokens/s of SD and SSD by data set (Table B.3), the mean tokens/s of SSD
    with a fast backup (batch 1), and the hit rate at temperature 0. All are known to the share `error` of themselves.

    `left_out` are the names of numbers that have no part in the fit.
    """

    pair: str
    ar_tokens_per_s: float
    sd: dict[str, float]
    ssd: dict[str, float]
    fast: float
    hit_rate: float
    curves: Curves
    error: float
    miss_scaling: float = MISS_SCALING
    verify_over_ar: float = 1.0
    left_out: frozenset[str] = frozenset()

    @property
    def ar_ms(self) -> float:
        return 1e3 / self.ar_tokens_per_s

    @property
    def verify_ms(self) -> float:
        return self.verify_over_ar * self.ar_ms

    @property
    def data_sets(self) -> tuple[str, ...]:
        return tuple(self.sd)

    @property
    def names(self) -> tuple[str, ...]:
        sets = self.data_sets
        return (*(f"sd {name}" for name in sets), *(f"ssd {name}" for name in sets), "fast", "hit rate")

    @property
    def values(self) -> FloatArray:
        """In the order of `names`."""
        return np.array([*self.sd.values(), *self.ssd.values(), self.fast, self.hit_rate])

    @property
    def is_used(self) -> NDArray[np.bool_]:
        return np.array([name not in self.left_out for name in self.names])

    def without(self, *names: str) -> Evidence:
        return replace(self, left_out=self.left_out | set(names))


def evidence_of(published: Published, pair: str) -> Evidence:
    """What is fitted of a pair."""
    rows = published.decoders[pair]
    return Evidence(
        pair=pair,
        ar_tokens_per_s=published.averages[pair].ar,
        sd={name: row.sd for name, row in rows.items()},
        ssd={name: row.ssd for name, row in rows.items()},
        fast=published.batches.pairs[pair].fast[0],
        hit_rate=published.temperatures.pairs[pair].hit_rate.uniform[0],
        curves=near_curves(published, PAIRS[pair], 0.0),
        error=repeat_error(published),
    )


def same_settings(published: Published) -> dict[str, list[float]]:
    """Tokens/s of a pair and decoder, greedy, batch 1, mean of the data sets: table, batch and temperature figure."""
    shown = {}
    for pair in PAIRS:
        average, batch = published.averages[pair], published.batches.pairs[pair]
        speeds = published.temperatures.pairs[pair].tokens_per_s
        shown[f"{pair} sd"] = [average.sd, batch.sd[0], speeds.sd[0]]
        shown[f"{pair} ssd"] = [average.ssd, batch.draft[0], speeds.geometric[0]]
    return shown


def repeat_error(published: Published) -> float:
    """Relative standard deviation of published tokens/s of the same setting between tables and figures, pooled."""
    logs = [np.log(row) for row in same_settings(published).values()]
    squares = sum(float(((row - row.mean()) ** 2).sum()) for row in logs)
    return math.sqrt(squares / sum(len(row) - 1 for row in logs))


# ---------------------------------------------------------------------------------------------------------- the model


def closed_form(evidence: Evidence, settings: Settings, x: FloatArray) -> FloatArray:
    """The numbers of `Evidence.names` by Theorem 7 in the steady state. `x` as `_decoded` reads it."""
    acceptances, draft_ms, late_ms = _decoded(x)
    verify_ms = evidence.verify_ms
    per_s, late = 1e3 / verify_ms, late_ms / verify_ms  # in units of a verification, as the theorem has it
    scales = miss_scales(acceptances, evidence.miss_scaling)
    hits = [hit_rate_of_all(evidence.curves, settings.fan_out, scale) for scale in scales]
    step = draft_ms / verify_ms
    sd = [sd_speedup(expected_tokens_per_round(a, settings.sd_length), settings.sd_length * step) for a in acceptances]
    tokens = [expected_tokens_per_round(a, settings.ssd_length) for a in acceptances]
    backup = late + settings.ssd_length * step
    rounds = list(zip(hits, tokens, strict=True))
    ssd = [ssd_speedup(p, e, e, 1 + late, backup) for p, e in rounds]
    fast = sum(ssd_speedup(p, e, 1.0, 1 + late, late) for p, e in rounds) / len(rounds)
    return np.array([*(per_s * s for s in (*sd, *ssd, fast)), sum(hits) / len(hits)])


def simulated(evidence: Evidence, model: PairModel) -> FloatArray:
    """The same numbers by the simulator, on texts of the published length."""
    sd = model.predictions(model.settings.sd)
    ssd, fast = (model.predictions(model.settings.ssd(fallback)) for fallback in (Fallback.DRAFT, Fallback.NONE))
    rates = [prediction.tokens_per_s.value for prediction in (*sd, *ssd)]
    return np.array([*rates, mean_tokens_per_s(fast), mean_hit_rate(ssd)])


def _decoded(x: FloatArray) -> tuple[list[float], float, float]:
    """Acceptances, milliseconds of a draft step and by which a round of SSD is late, of unbounded numbers."""
    return expit(x[:-2]).tolist(), math.exp(x[-2]), float(x[-1]) ** 2


def _encoded(acceptances: Sequence[float], draft_ms: float, late_ms: float) -> FloatArray:
    return np.array([*logit(np.asarray(acceptances)), math.log(draft_ms), math.sqrt(late_ms)])


# ------------------------------------------------------------------------------------------------------------ fitting


def fit_at(evidence: Evidence, settings: Settings, correction: FloatArray | float = 1.0) -> PairModel:
    """The best step times and acceptances at given K and fan-out; `correction` multiplies the closed form."""
    values, used = evidence.values, evidence.is_used
    start = _encoded([START_ACCEPTANCE] * len(evidence.data_sets), START_DRAFT_MS, START_LATE_MS)

    def misfit(x: FloatArray) -> Any:
        return (((closed_form(evidence, settings, x) * correction) / values - 1) / evidence.error)[used]

    found = least_squares(misfit, start, method="lm", x_scale=0.1, max_nfev=MOST_STEPS)
    acceptances, draft_ms, late_ms = _decoded(found.x)
    return PairModel(
        pair=evidence.pair,
        settings=settings,
        times=Times(evidence.ar_ms, evidence.verify_ms, draft_ms, late_ms),
        acceptances=dict(zip(evidence.data_sets, acceptances, strict=True)),
        curves=evidence.curves,
        miss_scaling=evidence.miss_scaling,
        chi2=2 * float(found.cost),
    )


def fit_by_simulation(evidence: Evidence, settings: Settings) -> PairModel:
    """As `fit_at`, to what the simulator makes of texts of a finite length: the closed form is corrected by the ratio
    of the two at the last fit."""
    model = fit_at(evidence, settings)
    for _ in range(NUM_CORRECTIONS):
        x = _encoded(list(model.acceptances.values()), model.times.draft_step_ms, model.times.late_ms)
        model = fit_at(evidence, settings, simulated(evidence, model) / closed_form(evidence, settings, x))
    return model


@dataclass(frozen=True)
class Search:
    """Fits of a pair at every K and fan-out, by the closed form."""

    models: tuple[PairModel, ...]

    @property
    def best(self) -> PairModel:
        return min(self.models, key=lambda model: model.chi2)

    @property
    def not_worse(self) -> tuple[PairModel, ...]:
        """Those whose misfit exceeds the best one's by no more than chance lets three free numbers gain (95 %)."""
        return tuple(model for model in self.models if model.chi2 <= self.best.chi2 + NOT_WORSE)

    def profile(self, name: str) -> dict[int, float]:
        """Lowest misfit by the value of one of the settings."""
        values = sorted({getattr(model.settings, name) for model in self.models})
        return {v: min(m.chi2 for m in self.models if getattr(m.settings, name) == v) for v in values}


def search(evidence: Evidence, lengths: Sequence[int] = LENGTHS, fan_outs: Sequence[int] = FAN_OUTS) -> Search:
    """Every K of SD, K of SSD and fan-out."""
    grid = [Settings(*values) for values in product(lengths, lengths, fan_outs)]
    return Search(tuple(fit_at(evidence, settings) for settings in grid))


@dataclass(frozen=True)
class Study:
    """A pair: what it is fitted to, the search and those under other assumptions, by what they assume, the model that
    is used from there on, and others that explain the numbers about as well."""

    evidence: Evidence
    search: Search
    otherwise: Mapping[str, Search]
    model: PairModel
    alternatives: tuple[PairModel, ...]

    @property
    def pair(self) -> str:
        return self.evidence.pair

    def misfit_of(self, settings: Settings) -> float:
        """With other settings, over that of the best ones searched."""
        return fit_at(self.evidence, settings).chi2 - self.search.best.chi2


def study(
    published: Published, pair: str, lengths: Sequence[int] = LENGTHS, fan_outs: Sequence[int] = FAN_OUTS
) -> Study:
    """Search a pair, and under other assumptions; the models are refitted to what the simulator says."""
    evidence = evidence_of(published, pair)
    found = search(evidence, lengths, fan_outs)
    chosen = found.best.settings
    return Study(
        evidence=evidence,
        search=found,
        otherwise={name: search(other, lengths, fan_outs) for name, other in _other_assumptions(evidence).items()},
        model=fit_by_simulation(evidence, chosen),
        alternatives=tuple(fit_by_simulation(evidence, settings) for settings in _alternatives(found, chosen)),
    )


def _other_assumptions(evidence: Evidence) -> dict[str, Evidence]:
    return {
        "misses are the same on all data sets": replace(evidence, miss_scaling=0.0),
        "a verification takes 1.1 AR steps": replace(evidence, verify_over_ar=1.1),
        WITHOUT_HIT_RATE: evidence.without("hit rate"),
    }


def _alternatives(found: Search, chosen: Settings) -> list[Settings]:
    """The best of the shortest and of the longest K of SSD, and of every fan-out, that are not significantly worse."""
    models = found.not_worse
    lengths = {m.settings.ssd_length for m in models}
    ends = [[m for m in models if m.settings.ssd_length == length] for length in (min(lengths), max(lengths))]
    fan_outs = {m.settings.fan_out for m in models}
    groups = [*ends, *([m for m in models if m.settings.fan_out == f] for f in sorted(fan_outs))]
    best = [min(group, key=lambda model: model.chi2).settings for group in groups]
    return [settings for settings in dict.fromkeys(best) if settings != chosen]
