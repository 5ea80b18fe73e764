"""A published pair as a system of the simulator: step times, acceptance and fan-out that explain its throughputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit

from experiments.numbers import step_latency
from experiments.step_times import TimesConfig
from sim.errors import BadInput
from sim.parametric import HitCurve, ParametricAgreement
from sim.placement import Placement
from sim.policy import Fallback, Policy, Speculative, SpeculativeSpeculative, uniform_fan_out
from sim.replay import SOURCES
from sim.simulate import Prediction, predict
from sim.system import HostTerm, System
from sim.theory import expected_tokens_per_round, stationary_hit_rate
from sim.trace import Lane
from sim.workload import Workload

Curves = tuple[HitCurve, HitCurve]  # after a hit, after a miss

WIDEST_SHIFT = 3.0  # of acceptances on the logit scale
PROMPT_TOKENS, NEW_TOKENS = 128, 512  # the length of the prompts has no effect: context does not change the times here


@dataclass(frozen=True)
class Settings:
    """What the paper does not state: K of SD, K of SSD, and the fan-out of SSD, the same for every accept count."""

    sd_length: int
    ssd_length: int
    fan_out: int

    @property
    def budget(self) -> int:
        return self.fan_out * (self.ssd_length + 1)

    @property
    def sd(self) -> Speculative:
        return Speculative(self.sd_length)

    def ssd(self, fallback: Fallback, fan_out: Sequence[int] | None = None) -> SpeculativeSpeculative:
        """With the uniform fan-out, or another one; `none` stands for a fast backup, whose tokens are not accepted."""
        after_hit = tuple(fan_out or uniform_fan_out(self.ssd_length, self.budget))
        after_miss = after_hit[:1] if fallback is Fallback.NONE else after_hit
        return SpeculativeSpeculative(self.ssd_length, after_hit, after_miss, fallback)


@dataclass(frozen=True)
class Times:
    """Milliseconds of steps at one batch size. A verification takes `verify_ms`, however many tokens; a round of SSD
    takes `late_ms` longer: the build that sticks out, or the hand-over."""

    ar_ms: float
    verify_ms: float
    draft_step_ms: float
    late_ms: float

    def scaled(self, ar_ms: float, growth: float) -> Times:
        """Every step but the autoregressive one takes `growth` times as long."""
        return Times(ar_ms, growth * self.verify_ms, growth * self.draft_step_ms, growth * self.late_ms)


@dataclass(frozen=True)
class PairModel:
    """A pair with its settings: what least squares makes of the published numbers.

    `acceptances` is the probability that a tested draft token is accepted, by data set. `curves` are of the mean data
    set: misses of another one are more or less frequent, by its rejections over their mean to the power `miss_scaling`.
    """

    pair: str
    settings: Settings
    times: Times
    acceptances: Mapping[str, float]
    curves: Curves
    miss_scaling: float
    chi2: float

    def curves_of(self, data_set: str) -> Curves:
        """After a hit and after a miss."""
        scales = miss_scales(list(self.acceptances.values()), self.miss_scaling)
        scale = scales[list(self.acceptances).index(data_set)]
        after_hit, after_miss = (HitCurve(scale * curve.prefactor, curve.exponent) for curve in self.curves)
        return after_hit, after_miss

    def mean_tokens(self, length: int) -> float:
        """Tokens per round with so many draft tokens, the mean of the data sets."""
        return float(np.mean([expected_tokens_per_round(a, length) for a in self.acceptances.values()]))

    def shifted(self, shift: float) -> PairModel:
        """The same with every acceptance moved by `shift` on the logit scale."""
        moved = {name: float(expit(logit(a) + shift)) for name, a in self.acceptances.items()}
        return replace(self, acceptances=moved)

    def matched(self, sd_tokens_per_s: float) -> PairModel:
        """The shifted one whose SD has these tokens/s, the mean over the data sets. Raises `BadInput` if no acceptance
        gives them."""

        def excess(shift: float) -> float:
            moved = self.shifted(shift)
            return moved.mean_tokens_per_s(self.settings.sd) - sd_tokens_per_s

        if not excess(-WIDEST_SHIFT) <= 0 <= excess(WIDEST_SHIFT):
            raise BadInput("tokens/s of SD", f"must be within reach of K = {self.settings.sd_length}", sd_tokens_per_s)
        return self.shifted(float(brentq(excess, -WIDEST_SHIFT, WIDEST_SHIFT, xtol=1e-4)))

    def predictions(self, policy: Policy, batch_size: int = 1) -> list[Prediction[Policy]]:
        """By the simulator's exact engine, one of each data set."""
        found = []
        for name, acceptance in self.acceptances.items():
            workload, system = system_of(self.times, acceptance, self.curves_of(name), policy, batch_size)
            found.append(predict(policy, workload, system))
        return found

    def mean_tokens_per_s(self, policy: Policy, batch_size: int = 1) -> float:
        """Of each sequence; the mean over the data sets, as the paper averages."""
        rates = [prediction.tokens_per_s.value for prediction in self.predictions(policy, batch_size)]
        return float(np.mean(rates)) / batch_size


def mean_hit_rate(predictions: Sequence[Prediction[Policy]]) -> float:
    """The mean over data sets of the hit rates of an SSD policy."""
    rates = [prediction.hit_rate for prediction in predictions]
    return float(np.mean([rate.value for rate in rates if rate is not None]))


def mean_tokens_per_s(predictions: Sequence[Prediction[Policy]]) -> float:
    """The mean over data sets, at batch 1."""
    return float(np.mean([prediction.tokens_per_s.value for prediction in predictions]))


def miss_scales(acceptances: Sequence[float], miss_scaling: float) -> list[float]:
    """By how much misses of each data set are more frequent than of the mean one."""
    mean = 1 - sum(acceptances) / len(acceptances)
    return [((1 - a) / mean) ** miss_scaling for a in acceptances]


def hit_rate_of_all(curves: Curves, fan_out: int, miss_scale: float = 1.0) -> float:
    """Equation (1) at a uniform fan-out, with misses so many times as frequent as the curves say."""
    after_hit, after_miss = (1 - min(1.0, miss_scale * (1 - curve.hit_rate(fan_out))) for curve in curves)
    return stationary_hit_rate(after_hit, after_miss)


def system_of(
    times: Times,
    acceptance: float,
    curves: Curves,
    policy: Policy,
    batch_size: int = 1,
    *,
    tree_step_ms: float = 0.0,
    tree_ms_per_branch: float = 0.0,
    placement: Placement | None = None,
) -> tuple[Workload, System]:
    """The simulator's system for a policy.

    A tree step takes `tree_step_ms`, and `tree_ms_per_branch` for each branch of all rows beyond K + 1 of each row;
    without these times the build hides behind the verification.
    """
    longest = max(1, policy.speculation_length)
    config = TimesConfig(
        ar_ms=times.ar_ms,
        verify_ms=times.verify_ms,
        draft_step_ms=times.draft_step_ms,
        tree_step_ms=tree_step_ms,
        draft_ms_per_token=tree_ms_per_branch,
        draft_free_tokens=batch_size * (longest + 1),
    )
    widest = max([2, *(sum(policy.fan_out(source)) for source in SOURCES)])
    latency = step_latency(config.resolved(longest, batch_size), longest, widest, PROMPT_TOKENS, batch_size)
    agreement = ParametricAgreement(
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        acceptance=(acceptance,),
        after_hit=(curves[0],),
        after_miss=(curves[1],),
        num_texts=batch_size,
    )
    late_s = dict.fromkeys((HostTerm.HIT, HostTerm.MISS, HostTerm.UNDRAFTED_MISS), times.late_ms / 1e3)
    system = System(
        latency=latency,
        contention=dict.fromkeys(Lane, 1.0),
        host_s=dict.fromkeys(HostTerm, 0.0) | late_s,
        agreement=agreement,
        identity={"source": "published numbers"},
        placement=placement or Placement(),
    )
    prompts = ((0,) * PROMPT_TOKENS,) * batch_size
    return Workload("parametric", prompts, NEW_TOKENS, 0.0, batch_size=batch_size), system
