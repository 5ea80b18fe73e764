"""Policy search: candidates of a space from the agreement record, without those that cannot run, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

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
from sim.replications import CEILING, RELATIVE_HALF_WIDTH
from sim.simulate import Prediction, predict, predict_all
from sim.streams import replication_seeds
from sim.system import System
from sim.trace import Source
from sim.workload import Workload

FanOut = tuple[int, ...]
Predictions = list[Prediction[Policy]]
Refused = list[tuple[Policy, str]]  # each with the reason

WIDEST_FITTED = 128  # fan-outs beyond it do not enter the fitted exponent
FAN_OUT_RULES = ("uniform", "geometric", "exact")
FIRST_DRAFT = Drafting(Proposer.DRAFT_MODEL, 1, (), Source.HIT)
COMPLETE = Drafting(Proposer.DRAFT_MODEL, 0, (), Source.HIT)
KINDS: dict[str, type] = {"ar": Autoregressive, "sd": Speculative, "ssd": SpeculativeSpeculative}
NUM_FINALISTS = 8  # of a sampled search: run again, with other numbers than those that brought them to the top


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


@dataclass(frozen=True)
class SearchResult:
    """All predictions, fastest first; equal ones keep the order AR, SD, SSD by K and budget.

    Figures of a sampled engine: the first of many is also the luckiest, so its finalists (`search`) were run again with
    other numbers, and only these figures are reported of them. A rate that was not confirmed so never goes before the
    recommended one. `infeasible` are candidates that cannot run or cannot be predicted, each with the reason.
    """

    ranked: Predictions
    infeasible: Refused = field(default_factory=list)

    @property
    def num_policies(self) -> int:
        return len(self.ranked) + len(self.infeasible)

    @property
    def recommended(self) -> Prediction[Policy]:
        return self.ranked[0]

    def best_of_each_length(self) -> Predictions:
        """The fastest of each kind and speculation length, fastest first."""
        first: dict[tuple[type, int], Prediction[Policy]] = {}
        for prediction in self.ranked:
            first.setdefault((type(prediction.policy), prediction.policy.speculation_length), prediction)
        return list(first.values())

    def best(self, kind: str) -> Prediction[Policy]:
        """Fastest prediction of a kind: `ar`, `sd` or `ssd`. Raises `BadInput` if none is left, with a reason."""
        if kind not in KINDS:
            raise BadInput("kind", f"must be one of {', '.join(KINDS)}", kind)
        found = next((p for p in self.ranked if isinstance(p.policy, KINDS[kind])), None)
        if found is None:
            reasons = (f"{policy.name}: {why}" for policy, why in self.infeasible if isinstance(policy, KINDS[kind]))
            raise BadInput(f"policies of kind {kind}", f"none can be chosen; {next(reasons, 'the space has none')}")
        return found


def search(
    space: SearchSpace, workload: Workload, system: System, *, engine: str = "exact", seed: int = 0
) -> SearchResult:
    """Predict every candidate of the space that can run, and rank by tokens/s; by the exact engine unless told
    otherwise.

    With a sampled engine the `NUM_FINALISTS` fastest and the fastest of every kind run again, with fresh seeds and
    until tokens/s is known to half the usual half width.

    A candidate that the engine refuses is infeasible. What refuses AR, which asks for least, refuses all: this raises
    `BadInput`, as do devices without room for AR.
    """
    policies = candidates(space, system.agreement)
    feasible, infeasible = _by_feasibility(policies, workload, system)
    if not feasible:
        raise BadInput("memory", f"no policy fits; {infeasible[0][0].name}", infeasible[0][1])
    if engine == "exact":
        ranked, refused = _search_exactly(feasible, workload, system)
    else:
        ranked, refused = _search_by_samples(feasible, workload, system, engine, seed)
    return SearchResult(ranked, infeasible + refused)


def _search_exactly(policies: list[Policy], workload: Workload, system: System) -> tuple[Predictions, Refused]:
    def run(some: list[Policy]) -> Predictions:
        return predict_all(some, workload, system)

    ar = run(policies[:1])
    others, refused = _predicted(policies[1:], run)
    return _ranked([*ar, *others], policies), refused


def _search_by_samples(
    policies: list[Policy], workload: Workload, system: System, engine: str, seed: int
) -> tuple[Predictions, Refused]:
    def run(some: list[Policy]) -> Predictions:
        return [predict(policy, workload, system, engine=engine, seed=seed) for policy in some]

    def run_again(policy: Policy) -> Prediction[Policy]:
        half_width = RELATIVE_HALF_WIDTH / 2
        return predict(policy, workload, system, engine=engine, seed=fresh, relative_half_width=half_width)

    (fresh,) = replication_seeds(seed, 1, first=CEILING)  # no run before can have come to it
    predictions, refused = run(policies[:1]), []
    for policy in policies[1:]:
        of_one, reasons = _predicted([policy], run)
        predictions += of_one
        refused += reasons
    ranked = _ranked(predictions, policies)
    finalists = _finalists(ranked)
    others = [prediction for prediction in ranked if prediction.policy not in finalists]
    return _ranked([run_again(policy) for policy in finalists], policies, unconfirmed=others), refused


def _predicted(policies: list[Policy], run: Callable[[list[Policy]], Predictions]) -> tuple[Predictions, Refused]:
    """Predictions together where that can be, since policies share work; apart where one of them is refused."""
    if not policies:
        return [], []
    try:
        return run(policies), []
    except BadInput as error:
        if len(policies) == 1:
            return [], [(policies[0], str(error))]
    predictions, refused = zip(*(_predicted(part, run) for part in _parts(policies)), strict=True)
    return list(chain.from_iterable(predictions)), list(chain.from_iterable(refused))


def _parts(policies: list[Policy]) -> list[list[Policy]]:
    """Those that an engine would refuse for the same reason apart from the others; else two halves."""
    by_kind: dict[object, list[Policy]] = {}
    for policy in policies:
        by_kind.setdefault(_kind_of(policy), []).append(policy)
    middle = len(policies) // 2
    return list(by_kind.values()) if len(by_kind) > 1 else [policies[:middle], policies[middle:]]


def _kind_of(policy: Policy) -> object:
    if isinstance(policy, SpeculativeSpeculative):
        return policy.fallback, policy.downweight, policy.on_late_build
    return type(policy)


def _finalists(ranked: Predictions) -> list[Policy]:
    """The fastest, and the fastest of every kind."""
    best_of_kind = {type(prediction.policy): prediction for prediction in reversed(ranked)}
    return list(dict.fromkeys(p.policy for p in (*ranked[:NUM_FINALISTS], *best_of_kind.values())))


def _ranked(
    predictions: Predictions, order: list[Policy], unconfirmed: Sequence[Prediction[Policy]] = ()
) -> Predictions:
    """Fastest first. Rates that differ by rounding are equal; `order`, simplest first, then decides. None that is
    unconfirmed goes before the fastest that is confirmed."""
    fastest = max(p.tokens_per_s.value for p in predictions)
    index = {policy: number for number, policy in enumerate(order)}

    def key(prediction: Prediction[Policy], is_confirmed: bool) -> tuple[float, bool, int]:
        share = prediction.tokens_per_s.value / max(fastest, 1e-300)
        return -round(min(1.0, share), 9), not is_confirmed, index[prediction.policy]

    keyed = [(key(p, True), p) for p in predictions] + [(key(p, False), p) for p in unconfirmed]
    return [prediction for _, prediction in sorted(keyed, key=lambda entry: entry[0])]


def _by_feasibility(policies: list[Policy], workload: Workload, system: System) -> tuple[list[Policy], Refused]:
    longest = int(system.agreement.prompt_length.max()) + workload.max_new_tokens
    feasible: list[Policy] = []
    infeasible: Refused = []
    for policy in policies:
        reason = system.memory.why_infeasible(
            policy, workload.batch_size, longest, system.placement, sampled=workload.temperature > 0
        )
        if reason is None:
            feasible.append(policy)
        else:
            infeasible.append((policy, reason))
    return feasible, infeasible


# --------------------------------------------------------------------------------------------------------- candidates


def candidates(space: SearchSpace, agreement: Agreement) -> list[Policy]:
    """Distinct policies of the space: AR, SD by K, then SSD by K and budget."""
    lengths = [K for K in sorted(space.speculation_lengths) if K > 0]
    policies: list[Policy] = [Autoregressive(), *(Speculative(K) for K in lengths)]
    fan_outs = _FanOuts(agreement, max(space.budgets))
    for K in lengths:
        policies.extend(_ssd_candidates(space, K, fan_outs))
    return list(dict.fromkeys(policies))


def _ssd_candidates(space: SearchSpace, K: int, fan_outs: _FanOuts) -> Iterator[SpeculativeSpeculative]:
    for budget, rule in product(sorted(space.budgets), space.fan_out_rules):
        for fallback, downweight, late in product(space.fallbacks, space.downweights, space.on_late_builds):
            misses = 0 if fallback is Fallback.NONE else K
            plain = SpeculativeSpeculative(K, (0,) * (K + 1), (0,) * (misses + 1), fallback, downweight, late)
            for after_hit, after_miss in fan_outs.pairs(rule, budget, plain):
                yield replace(plain, fan_out_after_hit=after_hit, fan_out_after_miss=after_miss)


class _FanOuts:
    """Fan-out lists after a hit and after a miss, by rule and budget, for a record."""

    def __init__(self, agreement: Agreement, widest: int) -> None:
        self.agreement, self.widest = agreement, widest
        self.acceptance, self.exponent = mean_acceptance(agreement), miss_exponent(agreement)
        self._curves: dict[Drafting, list[list[float]]] = {}

    def pairs(self, rule: str, budget: int, policy: SpeculativeSpeculative) -> list[tuple[FanOut, FanOut]]:
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
    return float(agreement.acceptance_table(0, FIRST_DRAFT)[_testable(agreement)].mean())


def miss_exponent(agreement: Agreement) -> float:
    """r of the best line through log miss(F) = log c - r log F over F = 1, 2, 4, ...; the misses are those of a bonus
    token drawn from p after full acceptance. At least .01, so that Theorem 12 keeps its meaning."""
    testable = _testable(agreement)
    fan_outs = 2 ** np.arange(int(np.log2(min(agreement.num_candidates, WIDEST_FITTED))) + 1)
    misses = np.array([1 - agreement.hit_table(int(f), 0, COMPLETE, rejected=False)[testable].mean() for f in fan_outs])
    seen = misses > 1e-12
    if seen.sum() < 2:
        return 1.0
    slope = np.polyfit(np.log(fan_outs[seen]), np.log(misses[seen]), 1)[0]
    return max(0.01, float(-slope))


def _testable(agreement: Agreement) -> NDArray[np.bool_]:
    """(num_prompts, longest) positions inside the texts but the first, which the prefill emits."""
    position = np.arange(int(agreement.lengths.max(initial=0)))
    return (position > 0) & (position < agreement.lengths[:, None])
