"""Agreements that accept or hit more or less often than was measured: what if a measurement is wrong?"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import Drafting, Proposer

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def scaled_agreement(agreement: Agreement, *, acceptance: float = 1.0, hits: float = 1.0) -> Agreement:
    """The agreement whose mean acceptance of the draft model's tokens, and whose hit rates, are so many times as large;
    a probability ends at 1."""
    if not isinstance(agreement, ParametricAgreement):
        return ScaledAgreement(agreement, acceptance, hits)
    accepted = tuple(min(1.0, acceptance * rate) for rate in agreement.acceptance)
    after_hit, after_miss = (
        tuple(ScaledCurve(curve.prefactor, curve.exponent, hits) for curve in curves)
        for curves in (agreement.after_hit, agreement.after_miss)
    )
    return replace(agreement, acceptance=accepted, after_hit=after_hit, after_miss=after_miss)


@dataclass(frozen=True)
class ScaledCurve(HitCurve):
    """A hit curve times a factor, at most 1."""

    factor: float = 1.0

    def hit_rate(self, fan_out: int) -> float:
        return min(1.0, self.factor * super().hit_rate(fan_out))


@dataclass(frozen=True)
class ScaledAgreement(Agreement):
    """A record's tables, scaled in the mean over all places: downwards each by the same factor, upwards each by the
    same share of what it lacks to 1. So places of certainty, which temperature 0 knows only, move as well."""

    record: Agreement
    acceptance_factor: float = 1.0
    hit_factor: float = 1.0

    @property
    def identity(self) -> dict[str, Any]:  # type: ignore[override]
        return self.record.identity

    @property
    def prompt_length(self) -> IntArray:  # type: ignore[override]
        return self.record.prompt_length

    @property
    def stopped(self) -> NDArray[np.bool_]:  # type: ignore[override]
        return self.record.stopped

    @property
    def lengths(self) -> IntArray:
        return self.record.lengths

    @property
    def num_candidates(self) -> int:
        return self.record.num_candidates

    @property
    def repeated_prompts(self) -> list[list[int]]:
        return self.record.repeated_prompts

    @cached_property
    def _inside(self) -> NDArray[np.bool_]:
        return np.arange(int(self.lengths.max(initial=0))) < self.lengths[:, None]

    @cached_property
    def _tables(self) -> dict[Hashable, FloatArray]:
        return {}

    def text(self, prompt: int) -> tuple[int, ...]:
        return self.record.text(prompt)

    def check(self, drafting: Drafting) -> None:
        self.record.check(drafting)

    def num_proposed(self, drafting: Drafting) -> IntArray:
        return self.record.num_proposed(drafting)

    def acceptance_table(self, draft_index: int, drafting: Drafting) -> FloatArray:
        """Tokens of an n-gram or a filler fare as they were recorded."""
        table = self.record.acceptance_table(draft_index, drafting)
        return table if drafting.proposer is not Proposer.DRAFT_MODEL else self._scaled(table, self.acceptance_factor)

    def hit_table(self, fan_out: int, accept_count: int, drafting: Drafting, *, rejected: bool) -> FloatArray:
        table = self.record.hit_table(fan_out, accept_count, drafting, rejected=rejected)
        return self._scaled(table, self.hit_factor)

    def doubt_table(self, fan_out: int, accept_count: int, drafting: Drafting) -> FloatArray:
        return self.record.doubt_table(fan_out, accept_count, drafting)

    def _scaled(self, table: FloatArray, factor: float) -> FloatArray:
        if factor <= 1:
            return factor * table
        mean = float(table[self._inside].mean())
        share = min(1.0, (factor - 1) * mean / (1 - mean)) if mean < 1 else 0.0
        return np.where(self._inside, table + share * (1 - table), table)
