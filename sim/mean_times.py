"""Mean times of rounds: waiting for a speculation, verifying it, and the delay by a build that is late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.latency import sum_of_independent
from sim.policy import LateBuild, Policy, SpeculativeSpeculative
from sim.system import System, host_term
from sim.trace import Lane, Operation, Source

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

NUM_CONTEXT_KNOTS = 5  # contexts at which delays by builds are evaluated; they are nearly linear between them


def context_knots(contexts: IntArray) -> IntArray:
    """Distinct contexts, at most `NUM_CONTEXT_KNOTS`, from the smallest to the largest of those given."""
    return np.unique(np.linspace(contexts.min(), contexts.max(), NUM_CONTEXT_KNOTS).astype(int))


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


def build_delays_s(
    system: System,
    build: Build,
    num_branches: Sequence[float],
    contexts: IntArray,
    outcomes_s: FloatArray,
    *,
    abandons: bool,
) -> FloatArray:
    """(2, branches, contexts) mean delay of the next round by an unfinished build that is waited for, and by one that
    ends with the operation in progress (only if `abandons`; else equal to the first). 0 without branches.

    `outcomes_s` (contexts, m) are equally likely durations from the build's start until the draft knows the outcome V.
    With e_1 the end of the glue pass, which is always finished, and e_i that of tree step i - 1 of duration s_i, the
    second is sum E[(e_i - V) 1(e_{i-1} < V <= e_i)] = E(e_{K+1} - V)+ - sum_{i>1} E[s_i] P(e_{i-1} >= V): a step is
    saved iff the outcome is known when it would begin. Where nothing overlaps both are the whole build.
    """
    delays = np.zeros((2, len(num_branches), len(contexts)))
    shares = [system.placement.shares_of_build(n, build.batch_size) if n else [] for n in num_branches]
    alone = [index for index, share in enumerate(shares) if len(share) == 1]
    if alone:
        per_row = [shares[index][0][1] for index in alone]
        delays[:, alone] = _delays_of_one_device(system, build, per_row, contexts, outcomes_s, abandons=abandons)
    for index, share in enumerate(shares):
        if len(share) > 1:
            if abandons and system.overlaps:
                rule = "must be wait for the exact engine where several draft devices build; use engine vectorized or"
                raise BadInput("on_late_build", f"{rule} des", LateBuild.ABANDON.value)
            delays[:, index] = _delay_of_several_devices(system, build, num_branches[index], contexts, outcomes_s)
    return delays


def _delays_of_one_device(
    system: System,
    build: Build,
    num_branches: Sequence[float],
    contexts: IntArray,
    outcomes_s: FloatArray,
    *,
    abandons: bool,
) -> FloatArray:
    width, rows = build.num_drafted + 1, build.batch_size
    operation = (Lane.DRAFT, Operation.GLUE)
    glue_s = [system.samples_s(*operation, width, context, beside=True, batch_size=rows) for context in contexts]
    steps = _TreeSteps(system, build, num_branches, contexts)
    if not system.overlaps:
        whole_s = np.array([samples_s.mean() for samples_s in glue_s]) + steps.mean_s.sum(-1)
        return np.stack([whole_s, whole_s])
    waited_s, saved_s = np.zeros((2, len(num_branches), len(contexts)))
    for index, first_s in enumerate(glue_s):
        lateness = Lateness(outcomes_s[index], first_s)
        waited_s[:, index] = lateness.mean_s(steps.samples_s(index, build.num_steps))
        for done in range(build.num_steps) if abandons else ():
            saved_s[:, index] += steps.mean_s[:, index, done] * lateness.chance(steps.samples_s(index, done))
    return np.stack([waited_s, np.maximum(0.0, waited_s - saved_s)])


class _TreeSteps:
    """Tree steps of builds with several numbers of branches; `mean_s` is (branches, contexts, num_steps)."""

    def __init__(self, system: System, build: Build, num_branches: Sequence[float], contexts: IntArray) -> None:
        table = system.latency[Lane.DRAFT, Operation.TREE_STEP]
        slots = contexts[:, None] + build.num_drafted + 1
        step = np.arange(build.num_steps)
        self.location_s = system.slowdown(Lane.DRAFT, beside=True) * np.stack(
            [table.location_s(branches, slots + branches * step, build.batch_size) for branches in num_branches]
        )
        self.mean_s = self.location_s * table.mean_residual
        self._sums = [_sum_of_residuals(table.residuals, num) for num in range(build.num_steps + 1)]

    def samples_s(self, context: int, num_steps: int) -> FloatArray:
        """(branches, <= NUM_OF_SUM) equally likely durations of the first steps together."""
        location_s = self.location_s[:, context, :num_steps].sum(-1) / max(1, num_steps)
        return np.multiply.outer(location_s, self._sums[num_steps])


@lru_cache(maxsize=256)
def _sum_of_residuals(residuals: tuple[float, ...], num: int) -> FloatArray:
    return sum_of_independent([np.asarray(residuals)] * num)


def _delay_of_several_devices(
    system: System, build: Build, num_branches: float, contexts: IntArray, outcomes_s: FloatArray
) -> FloatArray:
    """The slowest of them decides."""
    delays = []
    for context, outcome_s in zip(contexts.tolist(), outcomes_s, strict=True):
        samples_s = system.build_samples_s(build.num_drafted, num_branches, build.num_steps, context, build.batch_size)
        late_s = Lateness(outcome_s, np.zeros(1)).mean_s(samples_s) if system.overlaps else samples_s.mean()
        delays.append(float(late_s))
    return np.array(delays)


class BuildDelays:
    """`build_delays_s` of one row on one system; every number of branches is evaluated once."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._known: dict[tuple, FloatArray] = {}

    def at(
        self, build: Build, num_branches: Sequence[int], contexts: IntArray, message_s: float, *, abandons: bool
    ) -> FloatArray:
        """(2, branches, contexts); `message_s` is the time of the messages before and after the verification."""
        place = (build, tuple(contexts.tolist()), message_s, abandons)
        missing = [branches for branches in num_branches if (*place, branches) not in self._known]
        if missing:
            operation = (Lane.TARGET, Operation.VERIFY)
            verify_s = [self.system.samples_s(*operation, build.num_drafted + 1, at, beside=True) for at in contexts]
            outcomes_s = np.stack(verify_s) + message_s
            found = build_delays_s(self.system, build, missing, contexts, outcomes_s, abandons=abandons)
            self._known.update({(*place, branches): found[:, index] for index, branches in enumerate(missing)})
        return np.stack([self._known[(*place, branches)] for branches in num_branches], axis=1)


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
        return self.system.mean_s(Lane.TARGET, Operation.VERIFY, num_drafted + 1, contexts, beside=beside)

    def _delays_s(self, num_drafted: int, num_branches: Sequence[int], contexts: IntArray) -> FloatArray:
        """(2, branches, contexts) mean delay by a build before a round that hits, and before one that does not."""
        if not any(num_branches):
            return np.zeros((2, len(num_branches), len(contexts)))
        assert isinstance(self.policy, SpeculativeSpeculative)
        abandons = self.policy.on_late_build is LateBuild.ABANDON
        knots = context_knots(contexts)
        build = Build(num_drafted, self.policy.speculation_length)
        message_s = self._speculation_s(num_drafted) + self._outcome_s()
        found = self.delays.at(build, num_branches, knots, message_s, abandons=abandons)
        return interpolated(found, knots, contexts)


def interpolated(values: FloatArray, knots: IntArray, wanted: IntArray) -> FloatArray:
    """Linear between the knots of the last axis."""
    if len(knots) == 1:
        return np.repeat(values, len(wanted), axis=-1)
    right = np.clip(np.searchsorted(knots, wanted), 1, len(knots) - 1)
    share = (wanted - knots[right - 1]) / (knots[right] - knots[right - 1])
    return (1 - share) * values[..., right - 1] + share * values[..., right]


def draft_s(system: System, num_drafted: int, contexts: IntArray) -> FloatArray:
    """Mean time of `num_drafted` draft steps of one row one after another; `contexts` before the first."""
    steps = [
        system.mean_s(Lane.DRAFT, Operation.DRAFT_STEP, 1, contexts + step, beside=False) for step in range(num_drafted)
    ]
    return np.sum(steps, axis=0) if steps else np.zeros(len(contexts))


def second_unfed_s(system: System, contexts: IntArray) -> FloatArray:
    """What a first draft step takes longer where the last speculation's last token is still unfed: SD after a full
    acceptance. `contexts` of the step that takes both tokens."""
    two_s, one_s = (
        system.mean_s(Lane.DRAFT, Operation.DRAFT_STEP, unfed, contexts + 2 - unfed, beside=False) for unfed in (2, 1)
    )
    return two_s - one_s
