"""Mean times of rounds: waiting for a speculation, verifying it, and the delay by a build that is late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.latency import sum_of_independent
from sim.policy import LateBuild, Policy, SpeculativeSpeculative
from sim.system import System, host_term
from sim.trace import Lane, Operation, Source

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

ValuesAt = Callable[[IntArray, IntArray], FloatArray]

VERIFY, GLUE = (Lane.TARGET, Operation.VERIFY), (Lane.DRAFT, Operation.GLUE)
TREE_STEP, DRAFT_STEP = (Lane.DRAFT, Operation.TREE_STEP), (Lane.DRAFT, Operation.DRAFT_STEP)

TOLERANCE = 1e-5  # error of an interpolated time, as a share of the time of a verification
LARGEST_STEP = 1e-3  # of a time that may jump: it is interpolated only over intervals in which it changes by less


# ----------------------------------------------------------------------------------------------------------- contexts


class Refinement:
    """Times at some contexts, and linear between them, with more contexts wherever that would be wrong.

    `at(rows, places)` gives (components, pairs) values of rows of a table at `contexts[places]`; `scale` (components,
    rows, contexts) makes them shares of the time of a round. An interval between two contexts is halved unless its
    middle lies on the line between its ends, or until nothing stands between them.

    Error, as a share of `scale` in the middle of an interval: where a component is convex between neighbouring
    `corners` (contexts, by row), at most `TOLERANCE`, as a convex function departs from a chord by less than its
    departure at one point times the length of the chord over the distance of that point to the nearer end. Components
    after the first may jump; where such a one is monotone between corners, each is off by at most `LARGEST_STEP`, and
    exact if it changes by larger steps only. Anywhere else something may hide between points that lie on one line.
    """

    def __init__(self, contexts: IntArray, corners: Sequence[Sequence[float]], scale: FloatArray, at: ValuesAt) -> None:
        self.contexts, self.scale, self.at = contexts, scale, at
        self.values = np.zeros(scale.shape)
        self.known = np.stack([_knots(contexts, np.asarray(row, dtype=float)) for row in corners])

    def everywhere(self) -> FloatArray:
        """(components, rows, contexts)."""
        row, place = np.nonzero(self.known)
        self._evaluate(row, place)
        same = row[1:] == row[:-1]
        row, left, right = row[1:][same], place[:-1][same], place[1:][same]
        while (wide := right - left > 1).any():
            row, left, right = self._halved(row[wide], left[wide], right[wide])
        return self._interpolated()

    def _evaluate(self, row: IntArray, place: IntArray) -> None:
        self.known[row, place] = True
        self.values[:, row, place] = self.at(row, place)

    def _halved(self, row: IntArray, left: IntArray, right: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Halves of the intervals that are not yet linear."""
        middle = np.searchsorted(self.contexts, (self.contexts[left] + self.contexts[right]) / 2)
        middle = np.clip(middle, left + 1, right - 1)
        self._evaluate(row, middle)
        before, here, after = (self.values[:, row, place] for place in (left, middle, right))
        share = (self.contexts[middle] - self.contexts[left]) / (self.contexts[right] - self.contexts[left])
        scale = self.scale[:, row, middle]
        wrong = scale * abs((1 - share) * before + share * after - here) > TOLERANCE * np.minimum(share, 1 - share)
        wrong[1:] |= scale[1:] * abs(after - before)[1:] > LARGEST_STEP
        open_ = wrong.any(0)
        row, left, middle, right = row[open_], left[open_], middle[open_], right[open_]
        return np.tile(row, 2), np.concatenate([left, middle]), np.concatenate([middle, right])

    def _interpolated(self) -> FloatArray:
        place, last = np.arange(len(self.contexts)), len(self.contexts) - 1
        left = np.maximum.accumulate(np.where(self.known, place, 0), axis=1)
        right = np.minimum.accumulate(np.where(self.known, place, last)[:, ::-1], axis=1)[:, ::-1]
        gap = np.maximum(1, self.contexts[right] - self.contexts[left])
        share = (self.contexts - self.contexts[left]) / gap
        row = np.arange(len(self.known))[:, None]
        return (1 - share) * self.values[:, row, left] + share * self.values[:, row, right]


def _knots(contexts: IntArray, corners: FloatArray) -> BoolArray:
    """Which contexts are the ends, or next to a corner."""
    knots = np.zeros(len(contexts), dtype=bool)
    inside = corners[(corners > contexts[0]) & (corners < contexts[-1])]
    knots[[0, -1]] = True
    knots[np.searchsorted(contexts, inside)] = True
    knots[np.searchsorted(contexts, inside, side="right") - 1] = True
    return knots


def _by_place(places: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Every distinct place, and where it stands."""
    order = np.argsort(places, kind="stable")
    starts = np.flatnonzero(np.diff(places[order], prepend=-1))
    for where in np.split(order, starts[1:]):
        yield int(places[where[0]]), where


# ------------------------------------------------------------------------------------------------------------- builds


class Lateness:
    """How long after an outcome work ends that began when the round's speculation left.

    `outcome_s` are equally likely durations until the outcome is known, `first_s` until the first operation has ended;
    they are independent of each other and of what follows the first operation.
    """

    def __init__(self, outcome_s: FloatArray, first_s: FloatArray) -> None:
        self.margins_s = np.sort(np.subtract.outer(first_s, outcome_s), axis=None)
        self.from_here_s = np.concatenate([np.cumsum(self.margins_s[::-1])[::-1], [0.0]])

    def mean_s(self, after_s: FloatArray) -> FloatArray:
        """E[(first + after - outcome)+] over the equally likely values of the last axis."""
        early = np.searchsorted(self.margins_s, -after_s)
        num = len(self.margins_s)
        return (self.from_here_s[early] + (num - early) * after_s).mean(-1) / num

    def chance(self, after_s: FloatArray) -> FloatArray:
        """P(first + after >= outcome) over the equally likely values of the last axis."""
        return 1 - np.searchsorted(self.margins_s, -after_s).mean(-1) / len(self.margins_s)


@dataclass(frozen=True)
class Build:
    """A build that starts together with a verification: glue pass over `num_drafted` + 1 tokens, then tree steps.

    Of `batch_size` rows; counts are means where rows differ.
    """

    num_drafted: float
    num_steps: int
    batch_size: int = 1


@dataclass(frozen=True)
class Outcomes:
    """When the draft knows the outcome of a verification, from the start of the build beside it on.

    `samples_s` (contexts, m) are equally likely durations, linear in the context but for the contexts `bends`.
    """

    samples_s: FloatArray
    bends: Sequence[int] = ()

    @classmethod
    def of_verification(
        cls, system: System, num_tokens: float, contexts: IntArray, message_s: float, batch_size: int = 1
    ) -> Outcomes:
        """`message_s` is the time of the messages before and after the verification."""
        samples_s = message_s + _samples_s(system, *VERIFY, num_tokens, contexts, batch_size)
        return cls(samples_s, system.latency[VERIFY].bends(num_tokens, batch_size))


def _samples_s(
    system: System, lane: Lane, operation: Operation, num_tokens: float, contexts: IntArray, batch_size: int
) -> FloatArray:
    """(contexts, num_residuals) equally likely durations beside the other lane's work."""
    table = system.latency[lane, operation]
    location_s = table.location_s(num_tokens, contexts, batch_size)
    return np.multiply.outer(location_s * system.slowdown(lane, beside=True), table.residuals)


def build_delays_s(
    system: System,
    build: Build,
    num_branches: Sequence[float],
    contexts: IntArray,
    outcomes: Outcomes,
    *,
    abandons: bool,
) -> FloatArray:
    """(2, branches, contexts) mean delay of the next round by an unfinished build that is waited for, and by one that
    ends with the operation in progress (only if `abandons`; else equal to the first). 0 without branches.

    `contexts` ascend; V below is the time until the draft knows the outcome. With e_1 the end of the glue pass, which
    is always finished, and e_i that of tree step i - 1 of duration s_i, the second is
    sum E[(e_i - V) 1(e_{i-1} < V <= e_i)] = E(e_{K+1} - V)+ - sum_{i>1} E[s_i] P(e_{i-1} >= V): a step is saved iff the
    outcome is known when it would begin. Where nothing overlaps both are the whole build.

    Errors as in `Refinement`, relative to E[V], with corners where a table bends: the first is convex between them (on
    several devices nearly so), the chances of the second are monotone unless the glue pass and the tree steps change
    with the context in opposite ways.
    """
    delays = np.zeros((2, len(num_branches), len(contexts)))
    shares = [system.placement.shares_of_build(n, build.batch_size) if n else [] for n in num_branches]
    alone = [index for index, share in enumerate(shares) if len(share) == 1]
    if alone:
        per_row = [shares[index][0][1] for index in alone]
        device = _OneDevice(system, build, per_row, contexts, outcomes)
        delays[:, alone] = device.late_s(abandons=abandons) if system.overlaps else device.whole_s()
    for index, share in enumerate(shares):
        if len(share) > 1:
            if abandons and system.overlaps:
                rule = "must be wait for the exact engine where several draft devices build; use engine vectorized or"
                raise BadInput("on_late_build", f"{rule} des", LateBuild.ABANDON.value)
            delays[:, index] = _delay_of_several_devices(system, build, num_branches[index], contexts, outcomes)
    return delays


def _corners(system: System, build: Build, num_branches: float, outcomes: Outcomes) -> list[float]:
    """Contexts where an operation of the build or the verification beside it bends."""
    glue, tree_step = system.latency[GLUE], system.latency[TREE_STEP]
    corners: list[float] = list(outcomes.bends)
    for rows, branches in system.placement.shares_of_build(num_branches, build.batch_size):
        corners += glue.bends(build.num_drafted + 1, rows)
        before = [build.num_drafted + 1 + branches * step for step in range(build.num_steps)]
        corners += [bend - more for bend in tree_step.bends(branches, rows) for more in before]
    return corners


class _OneDevice:
    """Builds with several numbers of branches of a row."""

    def __init__(
        self, system: System, build: Build, num_branches: Sequence[float], contexts: IntArray, outcomes: Outcomes
    ) -> None:
        self.system, self.build, self.num_branches = system, build, num_branches
        self.contexts, self.outcomes = contexts, outcomes
        self.glue_s = _samples_s(system, *GLUE, build.num_drafted + 1, contexts, build.batch_size)
        self.steps = _TreeSteps(system, build, num_branches, contexts)

    def whole_s(self) -> FloatArray:
        """(branches, contexts) mean duration."""
        return self.glue_s.mean(1) + self.steps.mean_s.sum(-1)

    def late_s(self, *, abandons: bool) -> FloatArray:
        """(2, branches, contexts) mean delay by one that is waited for, and by one that is abandoned."""
        steps_s = self.steps.mean_s.transpose(2, 0, 1)[: self.build.num_steps if abandons else 0]
        scale = np.concatenate([np.ones((1, *self.steps.mean_s.shape[:2])), steps_s])
        scale /= self.outcomes.samples_s.mean(1)
        corners = [_corners(self.system, self.build, branches, self.outcomes) for branches in self.num_branches]
        found = Refinement(self.contexts, corners, scale, partial(self._lateness, len(steps_s))).everywhere()
        waited_s, known_by_then = found[0], found[1:]
        return np.stack([waited_s, np.maximum(0.0, waited_s - (steps_s * known_by_then).sum(0))])

    def _lateness(self, num_chances: int, row: IntArray, places: IntArray) -> FloatArray:
        """(1 + chances, pairs) mean delay by the whole build, and chances that the outcome is known before a step."""
        found = np.empty((1 + num_chances, len(row)))
        for place, pairs in _by_place(places):
            lateness = Lateness(self.outcomes.samples_s[place], self.glue_s[place])
            found[0, pairs] = lateness.mean_s(self.steps.samples_s(row[pairs], place, self.build.num_steps))
            for done in range(num_chances):
                found[1 + done, pairs] = lateness.chance(self.steps.samples_s(row[pairs], place, done))
        return found


class _TreeSteps:
    """Tree steps of builds with several numbers of branches; `mean_s` is (branches, contexts, num_steps)."""

    def __init__(self, system: System, build: Build, num_branches: Sequence[float], contexts: IntArray) -> None:
        table = system.latency[TREE_STEP]
        slots = contexts[:, None] + build.num_drafted + 1
        step = np.arange(build.num_steps)
        self.location_s = system.slowdown(Lane.DRAFT, beside=True) * np.stack(
            [table.location_s(branches, slots + branches * step, build.batch_size) for branches in num_branches]
        )
        self.mean_s = self.location_s * table.mean_residual
        self._sums = [_sum_of_residuals(table.residuals, num) for num in range(build.num_steps + 1)]

    def samples_s(self, row: IntArray, place: int, num_steps: int) -> FloatArray:
        """(rows, <= NUM_OF_SUM) equally likely durations of the first steps together of builds."""
        location_s = self.location_s[row, place, :num_steps].sum(-1) / max(1, num_steps)
        return np.multiply.outer(location_s, self._sums[num_steps])


@lru_cache(maxsize=256)
def _sum_of_residuals(residuals: tuple[float, ...], num: int) -> FloatArray:
    return sum_of_independent([np.asarray(residuals)] * num)


def _delay_of_several_devices(
    system: System, build: Build, num_branches: float, contexts: IntArray, outcomes: Outcomes
) -> FloatArray:
    """The slowest of them decides."""

    def at(_row: IntArray, places: IntArray) -> FloatArray:
        return np.array([[delay_s(place) for place in places.tolist()]])

    def delay_s(place: int) -> float:
        context, rows = int(contexts[place]), build.batch_size
        samples_s = system.build_samples_s(build.num_drafted, num_branches, build.num_steps, context, rows)
        if not system.overlaps:
            return float(samples_s.mean())
        return float(Lateness(outcomes.samples_s[place], np.zeros(1)).mean_s(samples_s))

    corners = _corners(system, build, num_branches, outcomes)
    return Refinement(contexts, [corners], 1 / outcomes.samples_s.mean(1)[None, None], at).everywhere()[0, 0]


class BuildDelays:
    """`build_delays_s` of one row on one system; every number of branches is evaluated once."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._known: dict[tuple, dict[int, FloatArray]] = {}

    def at(
        self, build: Build, num_branches: Sequence[int], contexts: IntArray, message_s: float, *, abandons: bool
    ) -> FloatArray:
        """(2, branches, contexts); `message_s` is the time of the messages before and after the verification."""
        known = self._known.setdefault((build, contexts.tobytes(), message_s, abandons), {})
        missing = [branches for branches in num_branches if branches not in known]
        if missing:
            outcomes = Outcomes.of_verification(self.system, build.num_drafted + 1, contexts, message_s)
            found = build_delays_s(self.system, build, missing, contexts, outcomes, abandons=abandons)
            known.update({branches: found[:, index] for index, branches in enumerate(missing)})
        return np.stack([known[branches] for branches in num_branches], axis=1)


# ------------------------------------------------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class RoundSeconds:
    """Mean times of a round, (branches, contexts): `always_s` of every round, `onward_s` what is added if the sequence
    goes on, `hit_s` what is added on top if it goes on with a hit."""

    always_s: FloatArray
    onward_s: FloatArray
    hit_s: FloatArray


class RoundTimes:
    """Mean times of a policy's rounds of one source, at batch 1.

    The message of an outcome and the delay by a late build stand between two rounds; they count with the first of them.
    """

    def __init__(self, policy: Policy, source: Source, delays: BuildDelays, temperature: float) -> None:
        self.policy, self.source, self.delays = policy, source, delays
        self.system = delays.system
        self.has_draft = policy.speculation_length > 0
        self.sampled = policy.drafting(source).is_sampled(temperature)

    def at(self, num_drafted: int, num_branches: Sequence[int], contexts: IntArray) -> RoundSeconds:
        """Rounds of `num_drafted` draft tokens, by the number of branches that are built beside them."""
        before_s = self._waiting_s(num_drafted, contexts) + self._speculation_s(num_drafted)
        verify_s = [self._verify_s(num_drafted, contexts, beside=beside) for beside in (False, True)]
        always_s = np.stack([before_s + verify_s[branches > 0] for branches in num_branches])
        after_hit_s, after_miss_s = self._delays_s(num_drafted, num_branches, contexts)
        if self.system.overlaps:
            return RoundSeconds(always_s, after_miss_s + self._outcome_s(), after_hit_s - after_miss_s)
        nothing = np.zeros_like(always_s)
        return RoundSeconds(always_s + after_hit_s, nothing + self._outcome_s(), nothing)

    def _waiting_s(self, num_drafted: int, contexts: IntArray) -> FloatArray:
        """Host time and the draft steps that the target waits for."""
        host_s = np.full(len(contexts), self.system.host_s[host_term(self.policy, self.source)])
        if not self.policy.waits_for_draft(self.source):
            return host_s
        return host_s + draft_s(self.system, num_drafted, contexts)

    def _speculation_s(self, num_drafted: int) -> float:
        return self.system.placement.speculation_s(num_drafted, sampled=self.sampled) if self.has_draft else 0.0

    def _outcome_s(self) -> float:
        return self.system.placement.outcome_s() if self.has_draft else 0.0

    def _verify_s(self, num_drafted: int, contexts: IntArray, *, beside: bool) -> FloatArray:
        return self.system.mean_s(*VERIFY, num_drafted + 1, contexts, beside=beside)

    def _delays_s(self, num_drafted: int, num_branches: Sequence[int], contexts: IntArray) -> FloatArray:
        """(2, branches, contexts) mean delay by a build before a round that hits, and before one that does not."""
        if not any(num_branches):
            return np.zeros((2, len(num_branches), len(contexts)))
        assert isinstance(self.policy, SpeculativeSpeculative)
        abandons = self.policy.on_late_build is LateBuild.ABANDON
        build = Build(num_drafted, self.policy.speculation_length)
        message_s = self._speculation_s(num_drafted) + self._outcome_s()
        return self.delays.at(build, num_branches, contexts, message_s, abandons=abandons)


def draft_s(system: System, num_drafted: int, contexts: IntArray, batch_size: int = 1) -> FloatArray:
    """Mean time of `num_drafted` draft steps one after another of rows on one device; `contexts` before the first."""
    steps = [
        system.mean_s(*DRAFT_STEP, 1, contexts + step, beside=False, batch_size=batch_size)
        for step in range(num_drafted)
    ]
    return np.sum(steps, axis=0) if steps else np.zeros(len(contexts))


def second_unfed_s(system: System, contexts: IntArray) -> FloatArray:
    """What a first draft step takes longer where the last speculation's last token is still unfed: SD after a full
    acceptance. `contexts` of the step that takes both tokens."""
    two_s, one_s = (system.mean_s(*DRAFT_STEP, unfed, contexts + 2 - unfed, beside=False) for unfed in (2, 1))
    return two_s - one_s
