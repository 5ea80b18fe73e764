"""Step times of a pair from what engines measure: plain decoding, rounds of speculative decoding, verifications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibration.importers.imported import Assumed
from sim.errors import BadInput

VERIFY_OVER_AR = (1.1, 1.0, 1.5)  # value, lower and upper end: K + 1 tokens verified, in autoregressive steps
DRAFT_OVER_AR = (0.1, 0.02, 0.3)  # a draft step, in autoregressive steps
LEFT_TO_DRAFTING = 0.999  # of a round, the most that its verification can take
DIGITS = 6


@dataclass(frozen=True)
class StepTimes:
    """Numbers of a plan's `times`: learned, assumed, and what was not learned."""

    learned: Mapping[str, Any]
    how: tuple[str, ...]
    not_learned: tuple[str, ...]
    assumed: tuple[Assumed, ...]


def step_times(ar_s: float | None, round_s: float | None, speculation_length: int | None) -> StepTimes:
    """From an autoregressive step, a whole round of speculative decoding with `speculation_length`, both or none.

    A round is the draft steps and the verification, which these times do not tell apart. Raises `BadInput` if a round
    is shorter than an autoregressive step.
    """
    learned: dict[str, Any] = {}
    how, not_learned, assumed = [], ["how long the verification takes by itself"], []
    verify, low, high = VERIFY_OVER_AR
    if ar_s is not None:
        learned["times.ar_ms"] = _ms(ar_s)
        how.append(f"an autoregressive step takes {1e3 * ar_s:.4g} ms")
    if round_s is not None:
        learned |= {"times.sd_round_ms": _ms(round_s), "times.sd_speculation_length": speculation_length}
        how.append(f"a round with {speculation_length} draft tokens takes {1e3 * round_s:.4g} ms")
    if ar_s is not None and round_s is not None:
        if round_s * LEFT_TO_DRAFTING < ar_s:
            rule = f"must be longer than an autoregressive step of {1e3 * ar_s:.4g} ms of the same engine and batch"
            raise BadInput("round of speculative decoding, ms", rule, _ms(round_s))
        high = min(high, round_s * LEFT_TO_DRAFTING / ar_s)
    else:
        not_learned.append("how long a draft step takes")
        assumed.append(Assumed("times.draft_over_ar", *DRAFT_OVER_AR, "a draft step was not timed"))
    if ar_s is None and round_s is None:
        learned["times.ar_ms"] = 1.0
        not_learned.append("any time: an autoregressive step counts as 1 ms, so 1000 tokens/s are those of AR")
    reason = "the verification of K + 1 tokens was not timed by itself"
    assumed.append(Assumed("times.verify_over_ar", min(verify, high), low, high, reason))
    return StepTimes(learned, tuple(how), tuple(not_learned), tuple(assumed))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, DIGITS)
