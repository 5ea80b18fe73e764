"""Predicted against measured: errors beside the noise of the measurement, regret, and token-for-token equality."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim import metrics
from sim.errors import BadInput
from sim.metrics import Estimate
from sim.policy import Policy
from sim.simulate import Prediction
from sim.trace import Trace

SCHEMA = 1
# fp32 logits of one text fed as a block or token by token differ by up to 1.4e-4 on the models measured so far; a flip
# of the argmax needs a gap between the two best tokens of at most twice that, and some room for deeper models.
NEAR_TIE_LOGIT_GAP = 1e-3


@dataclass(frozen=True)
class Comparison:
    """One policy's prediction beside its measurement.

    `forecast` was made from the profile alone, before the run; `prediction` knows how fast the machine was during the
    run, from reference policies that decoded calibration prompts in between. `repeat_spread` is half the range of the
    repeats' tokens/s over their mean.
    """

    forecast: Prediction[Policy]
    prediction: Prediction[Policy]
    tokens_per_s: Estimate
    hit_rate: Estimate | None
    mean_acceptance_length: Estimate | None
    repeats: int
    repeat_spread: float

    @property
    def name(self) -> str:
        return self.prediction.policy.name

    @property
    def error(self) -> float:
        """Signed relative error of the predicted tokens/s: positive if the prediction was too fast."""
        return self.prediction.tokens_per_s.value / self.tokens_per_s.value - 1

    def error_interval(self) -> list[float] | None:
        """95 % interval of the error from the spread of the prompts, as if all were drawn independently.

        None if one of the two has no interval. If it holds 0, the error is compatible with that spread alone.
        """
        parts = (self.prediction.tokens_per_s, self.tokens_per_s)
        half_widths = [(part.high - part.low) / 2 / part.value for part in parts]
        half_width = (1 + self.error) * math.hypot(*half_widths)
        return [self.error - half_width, self.error + half_width] if math.isfinite(half_width) else None

    @property
    def forecast_error(self) -> float:
        """The same of the forecast: what the machine's drift since the profile adds is in it."""
        return self.forecast.tokens_per_s.value / self.tokens_per_s.value - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "policy": self.prediction.policy.to_dict(),
            "forecast": {"tokens_per_s": interval(self.forecast.tokens_per_s)},
            "predicted": _figures(self.prediction),
            "measured": _figures(self) | {"repeats": self.repeats, "repeat_spread": self.repeat_spread},
            "error": {
                "tokens_per_s": self.error,
                "forecast_tokens_per_s": self.forecast_error,
                "tokens_per_s_interval": self.error_interval(),
            },
        }


def compare(forecast: Prediction[Policy], prediction: Prediction[Policy], traces: Sequence[Trace]) -> Comparison:
    """Set both predictions beside the repeats of the same policy.

    Raises `BadInput` if one is of another policy or of forced accept counts, if a trace holds no round, for then
    nothing was decoded that has a rate, and if the draft of a run failed and the target ended it alone.
    """
    if forecast.policy != prediction.policy:
        raise BadInput("forecast.policy", f"must be {prediction.policy.name}, as predicted", forecast.policy.name)
    for trace in traces:
        trace.require_generation()
        if trace.policy != prediction.policy.to_dict():
            raise BadInput("trace.policy", f"must be {prediction.policy.name}, which was predicted", trace.policy)
        if trace.meta.get("draft_failure"):
            raise BadInput("trace", "must be of a run whose draft did not fail", trace.meta["draft_failure"])
        if not trace.rounds:
            raise BadInput("workload", "must decode more than the first token of some prompt, or there is no rate")
    rates = [metrics.tokens_per_s([trace]).value for trace in traces]
    return Comparison(
        forecast=forecast,
        prediction=prediction,
        tokens_per_s=metrics.tokens_per_s(traces),
        hit_rate=metrics.hit_rate(traces),
        mean_acceptance_length=metrics.mean_acceptance_length(traces),
        repeats=len(traces),
        repeat_spread=(max(rates) - min(rates)) / 2 / float(np.mean(rates)),
    )


def estimate_regret(measured: Sequence[Sequence[Trace]], recommended: int) -> Estimate:
    """Share of tokens/s lost by running policy number `recommended` and not the best of those measured.

    `measured` holds the repeats of every policy on the same prompts. Each bootstrap sample of prompts, or of batches
    where prompts are decoded together, chooses its own best policy, so the interval includes the luck of the choice; it
    never falls below 0.
    """
    tokens, seconds = (np.stack(totals) for totals in zip(*metrics.decode_totals(*measured), strict=True))

    def lost(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        rates = (tokens @ weights.T) / (seconds @ weights.T)
        return 1 - rates[recommended] / rates.max(0)

    num_batches = tokens.shape[1]
    value = float(lost(np.ones(num_batches)))
    low, high = metrics.bootstrap(lost, num_batches)
    return Estimate(value, low, high, num_batches)


# ------------------------------------------------------------------------------------------------------- losslessness


@dataclass(frozen=True)
class Difference:
    """The first token in which a policy's text departs from AR's.

    `gap` is the target's top-2 logit gap there; infinite if one text merely ended earlier, which no tie explains.
    """

    policy: str
    prompt: int
    position: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= NEAR_TIE_LOGIT_GAP

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: an infinite gap is None."""
        return asdict(self) | {"gap": self.gap if math.isfinite(self.gap) else None}


@dataclass(frozen=True)
class Losslessness:
    """Greedy texts of every policy and repeat against AR's: each prompt is identical, or differs somewhere."""

    num_prompts: int
    differences: tuple[Difference, ...]

    @property
    def num_identical(self) -> int:
        return self.num_prompts - len({difference.prompt for difference in self.differences})

    @property
    def violations(self) -> tuple[Difference, ...]:
        """Differences that rounding cannot explain."""
        return tuple(difference for difference in self.differences if not difference.is_near_tie)

    @property
    def num_near_tie_flips(self) -> int:
        """Prompts that differ only where the target's two best tokens are tied within rounding."""
        violating = {difference.prompt for difference in self.violations}
        return len({difference.prompt for difference in self.differences} - violating)

    def to_dict(self) -> dict[str, int]:
        return {
            "prompts": self.num_prompts,
            "identical": self.num_identical,
            "near_tie_flips": self.num_near_tie_flips,
        }


def check_losslessness(
    reference: Trace,
    others: Mapping[str, Sequence[Trace]],
    top2_gap: Callable[[int, tuple[int, ...]], float],
) -> Losslessness:
    """Compare greedy token ids with those of `reference`, an AR run on the same prompts.

    `others` maps a policy's name to its repeats. `top2_gap(prompt, tokens)` is the target's gap between its two largest
    logits after prompt number `prompt` and the generated `tokens`. Raises `BadInput` if accept counts were forced.
    """
    reference.require_generation()
    differences = []
    for name, traces in others.items():
        for trace in traces:
            trace.require_generation()
            for ours, theirs in zip(reference.sequences, trace.sequences, strict=True):
                if ours.tokens != theirs.tokens:
                    position = first_difference(ours.tokens, theirs.tokens)
                    one_ended = position == min(len(ours.tokens), len(theirs.tokens))
                    gap = math.inf if one_ended else top2_gap(ours.index, ours.tokens[:position])
                    differences.append(Difference(name, ours.index, position, gap))
    return Losslessness(len(reference.sequences), tuple(differences))


def first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Index of the first token that differs; the shorter length if one text is a prefix of the other."""
    shared = min(len(ours), len(theirs))
    return next((i for i in range(shared) if ours[i] != theirs[i]), shared)


# ------------------------------------------------------------------------------------------------------------ summary


def summarize(
    comparisons: Sequence[Comparison],
    recommended: str,
    regret: Estimate,
    lossless: Losslessness | None,
    speedups: Mapping[str, Estimate],
) -> dict[str, Any]:
    """The content of `summary.json`. `lossless` is None at temperature > 0, where only the law of the text is equal."""
    return {
        "schema": SCHEMA,
        "policies": [comparison.to_dict() for comparison in comparisons],
        "recommended": recommended,
        "best_measured": max(comparisons, key=lambda c: c.tokens_per_s.value).name,
        "regret": interval(regret),
        "lossless": lossless.to_dict() if lossless else None,
        "speedups": {name: interval(estimate) for name, estimate in speedups.items()},
    }


def interval(estimate: Estimate | None) -> dict[str, float | int | None] | None:
    """`value`, `low`, `high`, JSON-safe."""
    if estimate is None:
        return None
    return {key: value for key, value in estimate.to_dict().items() if key != "n"}


def _figures(source: Prediction[Policy] | Comparison) -> dict[str, Any]:
    names = ("tokens_per_s", "hit_rate", "mean_acceptance_length")
    return {name: interval(getattr(source, name)) for name in names}
