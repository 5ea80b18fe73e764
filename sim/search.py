"""Policy search: the candidates of a space predicted, ranked, and told apart as far as the data can."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from sim.errors import BadInput, require_number
from sim.objective import Objective, tpot_s
from sim.parametric import ParametricAgreement
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative
from sim.replications import CEILING, RELATIVE_HALF_WIDTH
from sim.search_space import SearchSpace, candidates
from sim.simulate import Prediction, predict, predict_all
from sim.streams import replication_seeds
from sim.system import System
from sim.ties import Contrast, contrasts, simplicity
from sim.workers import HERE, Workers
from sim.workload import Workload

Predictions = list[Prediction[Policy]]
Refused = list[tuple[Policy, str]]  # each with the reason
Screened = tuple[Predictions, Refused]

KINDS: dict[str, type] = {"ar": Autoregressive, "sd": Speculative, "ssd": SpeculativeSpeculative}
NUM_FINALISTS = 8  # of a sampled search: run again, with other numbers than those that brought them to the top
SAMPLED_TOGETHER = 8  # policies of a sampled engine that one worker predicts before it is given others
LARGEST_ENUMERATED = 5000  # combinations of a space; of larger ones Optuna chooses which are evaluated
ALL_EVALUATED = "every policy of the space was evaluated"


@dataclass(frozen=True)
class SearchResult:
    """All predictions, best first; equal ones stand as `sim.ties.simplicity` has them.

    `ties` are the policies that are not significantly worse than the first, and `recommended` is the simplest of them:
    where there is no significant difference, that is the answer. `contrasts` set every policy beside the first.
    `infeasible` are candidates that cannot run, cannot be predicted or are too slow, each with the reason. Of
    `num_combinations` in the space those of `ranked` and `infeasible` were evaluated, and `stopped` says why no others.

    Figures of a sampled engine: the first of many is also the luckiest, so its finalists (`search`) were run again with
    other numbers, and only these figures are reported of them. A rate that was not confirmed so never goes before one
    that was, and is not recommended.
    """

    ranked: Predictions
    infeasible: Refused
    contrasts: dict[Policy, Contrast]
    recommended: Prediction[Policy]
    batch_size: int
    objective: Objective
    num_combinations: int
    stopped: str = ALL_EVALUATED
    confirmed: frozenset[Policy] = field(default=frozenset())  # those of a sampled engine that ran again

    @property
    def num_policies(self) -> int:
        return len(self.ranked) + len(self.infeasible)

    @property
    def fastest(self) -> Prediction[Policy]:
        return self.ranked[0]

    @property
    def ties(self) -> Predictions:
        """Those no worse than the first as far as the data can tell, the first among them."""
        return [prediction for prediction in self.ranked if self.contrasts[prediction.policy].is_tie]

    def best_of_each_length(self) -> Predictions:
        """The fastest of each kind and speculation length, and the recommended policy, best first."""
        first: dict[tuple[type, int], Prediction[Policy]] = {}
        for prediction in self.ranked:
            first.setdefault((type(prediction.policy), prediction.policy.speculation_length), prediction)
        chosen = {prediction.policy for prediction in [*first.values(), self.recommended]}
        return [prediction for prediction in self.ranked if prediction.policy in chosen]

    def best(self, kind: str) -> Prediction[Policy]:
        """Of a kind, `ar`, `sd` or `ssd`: the recommended policy if it is one, else the fastest. Raises `BadInput` if
        none is left, with a reason."""
        if kind not in KINDS:
            raise BadInput("kind", f"must be one of {', '.join(KINDS)}", kind)
        found = self.best_if_any(kind)
        if found is None:
            reasons = (f"{policy.name}: {why}" for policy, why in self.infeasible if isinstance(policy, KINDS[kind]))
            raise BadInput(f"policies of kind {kind}", f"none can be chosen; {next(reasons, 'the space has none')}")
        return found

    def best_if_any(self, kind: str) -> Prediction[Policy] | None:
        """As `best`, and None where none of the kind is left."""
        return next((p for p in [self.recommended, *self.ranked] if isinstance(p.policy, KINDS[kind])), None)

    def in_words(self) -> str:
        """The answer in a sentence, and how much it leaves."""
        policy, ties = self.recommended.policy, self.ties
        if len(ties) == 1:
            has_noise = any(contrast.num_samples for contrast in self.contrasts.values())
            how = "significantly so" if has_noise else "by rates that are exact for what was stated"
            return f"{policy.name} is the best of {self.num_policies} policies, {how}"
        contrast = self.contrasts[policy]
        shortfall = f"{100 * (1 - contrast.ratio):.1f} %"
        if policy == self.fastest.policy:
            return (
                f"{policy.name} is the fastest and the simplest of {len(ties)} policies without significant difference"
            )
        if contrast.num_samples == 1:
            return f"no significant difference can be shown from one prompt or batch: {policy.name} is the simplest"
        return (
            f"no significant difference between {len(ties)} policies: {policy.name} is the simplest of them,"
            f" {shortfall} behind the first, {self.fastest.policy.name}"
        )


def search(
    space: SearchSpace,
    workload: Workload,
    system: System,
    *,
    engine: str = "exact",
    seed: int = 0,
    objective: Objective = Objective.TOKENS_PER_S,
    slo_tpot_s: float = math.inf,
    workers: Workers = HERE,
    largest_enumerated: int = LARGEST_ENUMERATED,
) -> SearchResult:
    """Predict every candidate of the space that can run, rank by the objective, and find out which are as good as the
    first; by the exact engine unless told otherwise.

    With a sampled engine the `NUM_FINALISTS` best and the best of every kind run again, with fresh seeds and until
    tokens/s is known to half the usual half width; so does a simpler policy that ties with them. All policies meet the
    same luck: they have common seeds and prompts, over which they are compared in pairs.

    Of spaces with more than `largest_enumerated` combinations Optuna chooses which are evaluated (`sim.trials`).

    A candidate that the engine refuses is infeasible, and one whose rows take more than `slo_tpot_s` per token. What
    refuses AR, which asks for least, refuses all: this raises `BadInput`, as do devices without room for AR, and a
    promise that no policy keeps.
    """
    judge = _Judge(workload, system, engine, seed, Objective(objective), workers)
    slo_tpot_s = require_number("slo_tpot_s", slo_tpot_s, 0, math.inf, above=True)
    if space.num_combinations > largest_enumerated:
        from sim.trials import chosen_by_trials

        predictions, infeasible, stopped = chosen_by_trials(space, judge.screen, judge.merit, system.agreement, seed)
    else:
        (predictions, infeasible), stopped = judge.screen(candidates(space, system.agreement)), ALL_EVALUATED
    in_time, too_slow = _by_promise(predictions, workload.batch_size, slo_tpot_s)
    ranking = judge.judged(in_time)
    return SearchResult(
        ranked=ranking.ranked,
        infeasible=infeasible + too_slow,
        contrasts=ranking.contrasts,
        recommended=ranking.recommended,
        batch_size=workload.batch_size,
        objective=judge.objective,
        num_combinations=space.num_combinations,
        stopped=stopped,
        confirmed=frozenset(ranking.confirmed),
    )


def _by_promise(predictions: Predictions, batch_size: int, slo_tpot_s: float) -> Screened:
    """Those that are quick enough for every row, and the others."""
    in_time, too_slow = [], []
    for prediction in predictions:
        if tpot_s(prediction, batch_size) <= slo_tpot_s:
            in_time.append(prediction)
        else:
            took = f"{1e3 * tpot_s(prediction, batch_size):.3g} ms per token, {1e3 * slo_tpot_s:.3g} are promised"
            too_slow.append((prediction.policy, took))
    if not in_time:
        quickest = min(tpot_s(prediction, batch_size) for prediction in predictions)
        rule = f"is kept by no policy; the quickest takes {quickest:.4g} s per token"
        raise BadInput("slo_tpot_s", rule, slo_tpot_s)
    return in_time, too_slow


@dataclass(frozen=True)
class _Ranking:
    ranked: Predictions
    contrasts: dict[Policy, Contrast]
    recommended: Prediction[Policy]
    confirmed: dict[Policy, Prediction[Policy]]


@dataclass(frozen=True)
class _Judge:
    """How candidates are predicted, compared and run again."""

    workload: Workload
    system: System
    engine: str
    seed: int
    objective: Objective
    workers: Workers

    @property
    def is_sampled(self) -> bool:
        return self.engine != "exact"

    def weight(self, policy: Policy) -> float:
        return self.objective.weight(policy, self.system, self.workload.batch_size)

    def merit(self, prediction: Prediction[Policy]) -> float:
        """What is maximised."""
        return prediction.tokens_per_s.value * self.weight(prediction.policy)

    # ------------------------------------------------------------------------------------------------------ screening

    def screen(self, policies: list[Policy]) -> Screened:
        """Predictions of those that fit and that the engine knows, and the others. AR first: it is refused for all."""
        feasible, infeasible = self._by_feasibility(policies)
        if not feasible:
            raise BadInput("memory", f"no policy fits; {infeasible[0][0].name}", infeasible[0][1])
        run = partial(_run, self.workload, self.system, self.engine, self.seed)
        first = [run(feasible[:1])] if isinstance(feasible[0], Autoregressive) else []
        parts = self.workers.map(partial(_screened, run=run), self._pieces(feasible[len(first) :]))
        predictions = list(chain.from_iterable([*first, *(part[0] for part in parts)]))
        index = {policy: number for number, policy in enumerate(feasible)}
        predictions.sort(key=lambda prediction: index[prediction.policy])
        return predictions, infeasible + list(chain.from_iterable(part[1] for part in parts))

    def _pieces(self, policies: list[Policy]) -> list[list[Policy]]:
        """Whatever the number of workers: policies of one length share their laws, the longest take longest; those of a
        sampled engine share nothing."""
        by_length: dict[int, list[Policy]] = {}
        for policy in policies:
            by_length.setdefault(policy.speculation_length, []).append(policy)
        pieces = [by_length[K] for K in sorted(by_length, reverse=True)]
        if not self.is_sampled:
            return pieces
        size = SAMPLED_TOGETHER
        return [piece[start : start + size] for piece in pieces for start in range(0, len(piece), size)]

    def _by_feasibility(self, policies: list[Policy]) -> tuple[list[Policy], Refused]:
        system, workload = self.system, self.workload
        longest = int(system.agreement.prompt_length.max()) + workload.max_new_tokens
        sampled = workload.temperature > 0
        feasible: list[Policy] = []
        infeasible: Refused = []
        for policy in policies:
            reason = system.memory.why_infeasible(
                policy, workload.batch_size, longest, system.placement, sampled=sampled
            )
            if reason is None:
                feasible.append(policy)
            else:
                infeasible.append((policy, reason))
        return feasible, infeasible

    # ------------------------------------------------------------------------------------------------------- judgement

    def judged(self, screened: Predictions) -> _Ranking:
        """Rank, confirm the finalists of a sampled engine, and recommend the simplest of the best."""
        first_figures = {prediction.policy: prediction for prediction in screened}
        confirmed = self._again(_finalists(self._ranked(screened))) if self.is_sampled else dict(first_figures)
        while True:
            others = [prediction for prediction in screened if prediction.policy not in confirmed]
            ranked = self._ranked(list(confirmed.values()), others)
            beside = self._contrasts(ranked, first_figures, confirmed)
            simplest = min((p for p in ranked if beside[p.policy].is_tie), key=lambda p: simplicity(p.policy))
            if simplest.policy in confirmed:
                return _Ranking(ranked, beside, simplest, confirmed if self.is_sampled else {})
            confirmed |= self._again([simplest.policy])

    def _again(self, policies: list[Policy]) -> dict[Policy, Prediction[Policy]]:
        """With seeds that no run before can have come to, twice as sure."""
        (fresh,) = replication_seeds(self.seed, 1, first=CEILING)
        run = partial(_run_again, self.workload, self.system, self.engine, fresh)
        return dict(zip(policies, self.workers.map(run, policies), strict=True))

    def _contrasts(
        self,
        ranked: Predictions,
        first_figures: dict[Policy, Prediction[Policy]],
        confirmed: dict[Policy, Prediction[Policy]],
    ) -> dict[Policy, Contrast]:
        """Confirmed policies by their confirmed figures, the others by those of the first run, in which they and the
        fastest met the same luck."""
        fastest = ranked[0].policy
        found: dict[Policy, Contrast] = {}
        for figures in (first_figures, confirmed):
            group = [figures[p.policy] for p in ranked if (p.policy in confirmed) == (figures is confirmed)]
            weights = [self.weight(prediction.policy) for prediction in [*group, figures[fastest]]]
            beside = contrasts(
                group,
                figures[fastest],
                weights,
                num_comparisons=len(ranked) - 1,
                texts_are_alike=isinstance(self.system.agreement, ParametricAgreement),
            )
            found |= {prediction.policy: contrast for prediction, contrast in zip(group, beside, strict=True)}
        return found

    def _ranked(self, predictions: Predictions, unconfirmed: Sequence[Prediction[Policy]] = ()) -> Predictions:
        """Best first. Rates that differ by rounding are equal, and the simplest goes first. None that is unconfirmed
        goes before the best that is confirmed."""
        best = max(self.merit(prediction) for prediction in predictions)

        def key(prediction: Prediction[Policy], is_confirmed: bool) -> tuple:
            share = self.merit(prediction) / max(best, 1e-300)
            return -round(min(1.0, share), 9), not is_confirmed, simplicity(prediction.policy)

        keyed = [(key(p, True), p) for p in predictions] + [(key(p, False), p) for p in unconfirmed]
        return [prediction for _, prediction in sorted(keyed, key=lambda entry: entry[0])]


# ------------------------------------------------------------------------------------------------------ pieces of work


def _run(workload: Workload, system: System, engine: str, seed: int, policies: list[Policy]) -> Predictions:
    return predict_all(policies, workload, system, engine=engine, seed=seed)


def _run_again(workload: Workload, system: System, engine: str, seed: int, policy: Policy) -> Prediction[Policy]:
    half_width = RELATIVE_HALF_WIDTH / 2
    return predict(policy, workload, system, engine=engine, seed=seed, relative_half_width=half_width)


def _screened(policies: list[Policy], run: Callable[[list[Policy]], Predictions]) -> Screened:
    """Predictions together where that can be, since policies share work; apart where one of them is refused."""
    try:
        return run(policies), []
    except BadInput as error:
        if len(policies) == 1:
            return [], [(policies[0], str(error))]
    parts = [_screened(part, run) for part in _parts(policies)]
    return list(chain.from_iterable(part[0] for part in parts)), list(chain.from_iterable(part[1] for part in parts))


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
    """The best, and the best of every kind."""
    best_of_kind = {type(prediction.policy): prediction for prediction in reversed(ranked)}
    return list(dict.fromkeys(p.policy for p in (*ranked[:NUM_FINALISTS], *best_of_kind.values())))
