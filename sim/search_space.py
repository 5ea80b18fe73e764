"""The policies of a search: every combination of what is listed, with fan-out lists made from the agreement record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput, require_count, require_number
from sim.policy import (
    Autoregressive,
    Drafting,
    Fallback,
    LateBuild,
    Policy,
    Proposer,
    Speculative,
    SpeculativeSpeculative,
    exact_fan_out,
    geometric_fan_out,
    uniform_fan_out,
)
from sim.recursion import outcome_hit_mass
from sim.replay import SOURCES
from sim.trace import Source

FanOut = tuple[int, ...]

WIDEST_FITTED = 128  # fan-outs beyond it do not enter the fitted exponent
FAN_OUT_RULES = ("uniform", "geometric", "exact")
FIRST_DRAFT = Drafting(Proposer.DRAFT_MODEL, 1, (), Source.HIT)
COMPLETE = Drafting(Proposer.DRAFT_MODEL, 0, (), Source.HIT)


@dataclass(frozen=True)
class SearchSpace:
    """Every combination is a candidate; AR, and SD at every K, are added. A budget is the sum of a fan-out list.

    Fan-out rules: `uniform` spreads the budget evenly, `geometric` is Theorem 12 with one acceptance and one exponent
    of the record. `exact` is the list that makes the look-up after a round succeed most often (Theorem 18 with measured
    curves, greedy): of rounds that start anywhere in the texts alike, for each source with the curves of whoever drafts
    its rounds, the draft model after a hit and the fallback after a miss. It is the best for one look-up and not for
    tokens/s: where rounds of a source start depends on the policy, and a branch costs time. Where the draft is
    down-weighted, what is prepared changes what is drafted: candidates are the lists of plain sampling and those of
    curves whose point F has F prepared everywhere, neither of them surely the best.

    A single value stands for a list of one. Raises `BadInput` on an empty list and on a value outside its domain.
    """

    speculation_lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    fan_out_rules: tuple[str, ...] = FAN_OUT_RULES
    fallbacks: tuple[Fallback, ...] = (Fallback.DRAFT, Fallback.NONE)
    downweights: tuple[float, ...] = (1.0,)
    on_late_builds: tuple[LateBuild, ...] = (LateBuild.WAIT,)

    def __post_init__(self) -> None:
        for name, converted in _CONVERTED.items():
            given = getattr(self, name)
            values = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
            object.__setattr__(self, name, tuple(dict.fromkeys(converted(name, value) for value in values)))
            if not getattr(self, name):
                raise BadInput(name, "must have at least one entry")

    @property
    def positive_lengths(self) -> list[int]:
        """The speculation lengths of SD and SSD, ascending."""
        return [K for K in sorted(self.speculation_lengths) if K > 0]

    @property
    def axes(self) -> tuple[tuple[Any, ...], ...]:
        """What each field of a `Setting` may be, in their order."""
        lengths, budgets = tuple(self.positive_lengths), tuple(sorted(self.budgets))
        return lengths, budgets, self.fan_out_rules, self.fallbacks, self.downweights, self.on_late_builds

    @property
    def num_combinations(self) -> int:
        """AR, every SD and every combination of SSD; some of these may be one and the same policy."""
        return 1 + len(self.positive_lengths) + prod(len(axis) for axis in self.axes)

    def settings(self) -> Iterator[Setting]:
        """Every combination, by speculation length and budget."""
        return (Setting(*values) for values in product(*self.axes))


@dataclass(frozen=True)
class Setting:
    """One combination of a search space: an SSD policy but for its lists, which a rule makes from the budget."""

    speculation_length: int
    budget: int
    fan_out_rule: str
    fallback: Fallback
    downweight: float
    on_late_build: LateBuild


def _count(name: str, value: object) -> int:
    return require_count(name, value, 0)


def _one_of(words: Iterable[str]) -> Callable[[str, object], str]:
    known = {str(word): word for word in words}

    def converted(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in known:
            raise BadInput(name, f"must be among {', '.join(known)}", value)
        return known[value]

    return converted


_CONVERTED: dict[str, Callable[[str, object], object]] = {
    "speculation_lengths": _count,
    "budgets": _count,
    "fan_out_rules": _one_of(FAN_OUT_RULES),
    "fallbacks": _one_of(Fallback),
    "downweights": lambda name, value: require_number(name, value, 0, 1, above=True),
    "on_late_builds": _one_of(LateBuild),
}


# --------------------------------------------------------------------------------------------------------- candidates


def candidates(space: SearchSpace, agreement: Agreement) -> list[Policy]:
    """Distinct policies of the space: AR, SD by K, then SSD by K and budget."""
    policies = synchronous_candidates(space)
    fan_outs = FanOutLists(agreement, max(space.budgets))
    for setting in space.settings():
        policies.extend(fan_outs.policies(setting))
    return list(dict.fromkeys(policies))


def synchronous_candidates(space: SearchSpace) -> list[Policy]:
    """AR and every SD, which take part in every search."""
    return [Autoregressive(), *(Speculative(K) for K in space.positive_lengths)]


class FanOutLists:
    """Fan-out lists after a hit and after a miss, by rule and budget, for a record."""

    def __init__(self, agreement: Agreement, widest: int) -> None:
        self.agreement, self.widest = agreement, widest
        self.acceptance, self.exponent = mean_acceptance(agreement), miss_exponent(agreement)
        self._curves: dict[Drafting, list[list[float]]] = {}

    def policies(self, setting: Setting) -> list[SpeculativeSpeculative]:
        """One policy, or two where the down-weighted draft has exact lists of its own beside the plain ones."""
        K, misses = setting.speculation_length, 0 if setting.fallback is Fallback.NONE else setting.speculation_length
        chosen = (setting.fallback, setting.downweight, setting.on_late_build)
        plain = SpeculativeSpeculative(K, (0,) * (K + 1), (0,) * (misses + 1), *chosen)
        return [
            replace(plain, fan_out_after_hit=after_hit, fan_out_after_miss=after_miss)
            for after_hit, after_miss in self._pairs(setting.fan_out_rule, setting.budget, plain)
        ]

    def _pairs(self, rule: str, budget: int, policy: SpeculativeSpeculative) -> list[tuple[FanOut, FanOut]]:
        """For the sources of a policy, whatever its own lists are."""
        hit, miss = (replace(policy.drafting(source), fan_out=()) for source in SOURCES)
        pairs = [(self._of(rule, budget, hit), self._of(rule, budget, miss))]
        if rule == "exact" and policy.downweight != 1:
            plain = [replace(drafting, downweight=1.0) for drafting in (hit, miss)]
            pairs.insert(0, (self._of(rule, budget, plain[0]), self._of(rule, budget, plain[1])))
        most = self._most(policy.downweight)
        return [(_clipped(after_hit, most), _clipped(after_miss, most)) for after_hit, after_miss in pairs]

    def _of(self, rule: str, budget: int, drafting: Drafting) -> FanOut:
        if rule == "uniform":
            return uniform_fan_out(drafting.num_drafted, budget)
        if rule == "geometric":
            return geometric_fan_out(drafting.num_drafted, budget, self.acceptance, self.exponent)
        return exact_fan_out(self._curves_of(drafting), budget)

    def _curves_of(self, drafting: Drafting) -> list[list[float]]:
        if drafting not in self._curves:
            try:
                self._curves[drafting] = self._measured(drafting)
            except BadInput:  # nobody knows how its tokens fare: the engine will refuse the candidate and say why
                self._curves[drafting] = self._measured(
                    replace(drafting, proposer=Proposer.DRAFT_MODEL, downweight=1.0)
                )
        return self._curves[drafting]

    def _measured(self, drafting: Drafting) -> list[list[float]]:
        return outcome_hit_mass(
            self.agreement,
            drafting.num_drafted,
            min(self.widest, self._most(drafting.downweight)),
            drafting.source,
            downweight=drafting.downweight,
            proposer=drafting.proposer,
        ).tolist()

    def _most(self, downweight: float) -> int:
        """The largest fan-out that the record can say something about; down-weighting looks at one candidate more."""
        return self.agreement.num_candidates - (downweight != 1)


def _clipped(fan_out: FanOut, most: int) -> FanOut:
    return tuple(min(entry, most) for entry in fan_out)


def mean_acceptance(agreement: Agreement) -> float:
    """Mean acceptance of a first draft token over all positions that rounds can test."""
    return float(agreement.acceptance_table(0, FIRST_DRAFT)[testable_positions(agreement)].mean())


def miss_exponent(agreement: Agreement) -> float:
    """r of the best line through log miss(F) = log c - r log F over F = 1, 2, 4, ...; the misses are those of a bonus
    token drawn from p after full acceptance. At least .01, so that Theorem 12 keeps its meaning."""
    inside = testable_positions(agreement)
    fan_outs = 2 ** np.arange(int(np.log2(min(agreement.num_candidates, WIDEST_FITTED))) + 1)
    misses = np.array([1 - agreement.hit_table(int(f), 0, COMPLETE, rejected=False)[inside].mean() for f in fan_outs])
    seen = misses > 1e-12
    if seen.sum() < 2:
        return 1.0
    slope = np.polyfit(np.log(fan_outs[seen]), np.log(misses[seen]), 1)[0]
    return max(0.01, float(-slope))


def testable_positions(agreement: Agreement) -> NDArray[np.bool_]:
    """(num_prompts, longest) positions inside the texts but the first, which the prefill emits."""
    position = np.arange(int(agreement.lengths.max(initial=0)))
    return (position > 0) & (position < agreement.lengths[:, None])
