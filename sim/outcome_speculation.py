"""Speculation on the outcome of any slow step: work for its likely outcomes is prepared beside it and used on a hit.

The mechanism of SSD (arXiv 2603.03251) without its language models. A verification becomes a slow step, the bonus token
its outcome, a branch of the speculation cache the work prepared for one outcome. Draft devices prepare, and the record
is a `Trace` of one emitted token a round, the number of the outcome: `sim.metrics` and Perfetto read it. Rounds are
independent. Given are a closed form and the same rounds on SimPy clocks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import Event

from sim.draft_devices import Answer, Build, DraftDevice, Place, Process, Recorder, ask
from sim.durations import Residuals, Step, Task
from sim.errors import LARGEST, BadInput, require_count, require_number
from sim.metrics import Estimate, ratio_of_totals
from sim.placement import Placement
from sim.policy import NEGLIGIBLE, LateBuild
from sim.streams import seed_sequence
from sim.target import Arrival
from sim.trace import Lane, Operation, Round, Source, Trace
from sim.trace import Sequence as PlayedSequence

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

NOT_YET = -1  # stands for the outcome before the first step


@dataclass(frozen=True)
class PossibleOutcome:
    """What may come of a step, with a probability, and what the work that follows it costs.

    `prepare_s` is its preparation beside the step, infinite where it cannot be prepared. `on_miss_s` is what it costs
    in the open when nothing is prepared: the preparation itself, or a makeshift with all that is lost by it.
    """

    probability: float
    prepare_s: float
    on_miss_s: float


@dataclass(frozen=True)
class SlowStep:
    """A step whose duration is one of `durations_s`, all equally likely, and independent of its outcome.

    The probabilities of the outcomes add up to 1; what nobody foresees is one that cannot be prepared. Each worker
    predicts for `predict_s` before it prepares. Any preparation makes the step `slowdown` times as long. Raises
    `BadInput` naming the field that breaks a rule.
    """

    durations_s: tuple[float, ...]
    outcomes: tuple[PossibleOutcome, ...]
    num_workers: int = 1
    predict_s: float = 0.0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        require_count("num_workers", self.num_workers, 1)
        require_number("predict_s", self.predict_s, 0)
        require_number("slowdown", self.slowdown, 1)
        require_count("number of durations_s", len(self.durations_s), 1)
        for seconds in self.durations_s:
            require_number("durations_s", seconds, 0, above=True)
        for number, outcome in enumerate(self.outcomes):
            for name, value in asdict(outcome).items():
                require_number(f"outcomes[{number}].{name}", value, 0, math.inf if name == "prepare_s" else LARGEST)
        if abs(sum(self.probabilities) - 1) > 1e-9:
            raise BadInput("probabilities of the outcomes", "must add up to 1", sum(self.probabilities))

    @property
    def probabilities(self) -> list[float]:
        """In the order of the outcomes."""
        return [outcome.probability for outcome in self.outcomes]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: a preparation that cannot be is None."""
        outcomes = [asdict(o) | ({} if math.isfinite(o.prepare_s) else {"prepare_s": None}) for o in self.outcomes]
        return asdict(self) | {"durations_s": list(self.durations_s), "outcomes": outcomes}

    def worth_preparing(self, budget: int) -> tuple[int, ...]:
        """The outcomes, at most `budget`, whose preparation saves most for each second that it takes, those first; none
        that saves nothing. Where all take as long, no other choice of as many saves more (Theorem 18)."""
        saved_s = [o.probability * o.on_miss_s for o in self.outcomes]
        per_s = [saving_s / max(o.prepare_s, NEGLIGIBLE) for saving_s, o in zip(saved_s, self.outcomes, strict=True)]
        order = sorted((number for number, gain in enumerate(per_s) if gain), key=lambda number: -per_s[number])
        return tuple(order[: require_count("budget", budget, 0)])


@dataclass(frozen=True)
class Preparation:
    """The outcomes that are prepared, dealt in this order to the workers in turn, and what becomes of unfinished ones
    when the outcome is known.

    WAIT: all are finished before anything else. ABANDON: they are cut short, but for that of the outcome itself: where
    it is under way, the outcome is a hit and waits for it.
    """

    order: tuple[int, ...] = ()
    on_late: LateBuild = LateBuild.ABANDON

    def __post_init__(self) -> None:
        if self.on_late not in list(LateBuild):
            raise BadInput("on_late", f"must be one of {', '.join(LateBuild)}", self.on_late)
        object.__setattr__(self, "on_late", LateBuild(self.on_late))

    def tasks(self, step: SlowStep) -> tuple[Task, ...]:
        """The prediction and the preparations of every worker that has any. Raises `BadInput` on an outcome that
        cannot be prepared, or is there twice."""
        possible = {number for number, outcome in enumerate(step.outcomes) if math.isfinite(outcome.prepare_s)}
        if len(set(self.order)) < len(self.order) or not set(self.order) <= possible:
            raise BadInput("outcomes to prepare", f"must be distinct ones of {sorted(possible)}", self.order)
        num_workers = len(Placement(step.num_workers).shares_of_build(len(self.order), 1)) if self.order else 0
        shares = [self.order[worker::num_workers] for worker in range(num_workers)]
        predict = Step(Operation.GLUE, 1, len(self.order), 0, step.predict_s)
        prepare = [Step(Operation.TREE_STEP, 1, 1, 0, outcome.prepare_s) for outcome in step.outcomes]
        return tuple(Task.of([predict, *(prepare[number] for number in share)]) for share in shares)

    def slowdown(self, step: SlowStep) -> float:
        """Of the step beside what is prepared."""
        return step.slowdown if self.order else 1.0

    def places(self, num_workers: int) -> dict[int, tuple[int, int]]:
        """Worker that prepares each outcome, and as which of its operations; its first, 0, is the prediction."""
        turns = [divmod(turn, num_workers) for turn in range(len(self.order))]
        return {number: (worker, 1 + round_) for number, (round_, worker) in zip(self.order, turns, strict=True)}


# ------------------------------------------------------------------------------------------------------- closed form


class Luck(NamedTuple):
    """What each duration of a step leads to with each outcome, (num_durations, num_outcomes): the wait from the step's
    end to the start of the next, whether it is a hit, and how long all workers have worked beside the step."""

    wait_s: FloatArray
    is_hit: BoolArray
    work_s: FloatArray


class Means(NamedTuple):
    """Means over rounds, each from one step's start to the next's."""

    round_s: float
    wait_s: float
    hit_rate: float
    work_s: float


def by_luck(step: SlowStep, preparation: Preparation) -> Luck:
    """Exact: all workers are free when a step begins, so that no round depends on another."""
    tasks = preparation.tasks(step)
    ends_s = [np.cumsum([operation.location_s for operation in task.steps]) for task in tasks]
    whole_s = np.array([of_worker[-1] for of_worker in ends_s])
    known_s = np.array(step.durations_s)[:, None] * preparation.slowdown(step)
    begin_s, ready_s = np.full((2, len(step.outcomes)), np.inf)
    for number, (worker, operation) in preparation.places(len(tasks)).items():
        begin_s[number], ready_s[number] = ends_s[worker][operation - 1 : operation + 1]
    if preparation.on_late is LateBuild.WAIT:
        is_hit = np.isfinite(begin_s)
        late_s = np.maximum(0.0, whole_s.max(initial=0.0) - known_s)
        work_s = whole_s.sum()
    else:
        is_hit = begin_s < known_s
        late_s = np.where(is_hit, np.maximum(0.0, ready_s - known_s), 0.0)
        work_s = np.minimum(whole_s, known_s).sum(1, keepdims=True) + late_s
    on_miss_s = np.array([outcome.on_miss_s for outcome in step.outcomes])
    return Luck(*np.broadcast_arrays(late_s + np.where(is_hit, 0.0, on_miss_s), is_hit, work_s))


def means(step: SlowStep, preparation: Preparation) -> Means:
    """The closed form: expectations of `by_luck`."""
    step_s = float(np.mean(step.durations_s)) * preparation.slowdown(step)
    wait_s, hit_rate, work_s = (
        float((of_luck.mean(0) * step.probabilities).sum()) for of_luck in by_luck(step, preparation)
    )
    return Means(step_s + wait_s, wait_s, hit_rate, work_s)


def best_budget(step: SlowStep, on_late: LateBuild = LateBuild.ABANDON, price: float = 0.0) -> int:
    """How many of the outcomes worth preparing to prepare: the fewest of equals, 0 where none pays.

    Least is the mean time of a round, and the work in it where a second of work is worth `price` seconds of a round.
    """
    found = [means(step, Preparation(step.worth_preparing(b), on_late)) for b in range(len(step.outcomes) + 1)]
    costs_s = [of_budget.round_s + price * of_budget.work_s for of_budget in found]
    return next(budget for budget, cost_s in enumerate(costs_s) if cost_s <= min(costs_s) * (1 + NEGLIGIBLE))


# -------------------------------------------------------------------------------------------------- event simulation


def play(step: SlowStep, preparation: Preparation, num_sequences: int, num_rounds: int, seed: int = 0) -> Trace:
    """Sequences of rounds, one after another. Durations and outcomes depend on the seed alone: preparations under one
    seed meet the same luck."""
    require_count("num_sequences", num_sequences, 1)
    return _Stage(step, preparation).play(num_sequences, require_count("num_rounds", num_rounds, 2), seed)


def mean_wait_s(trace: Trace) -> Estimate:
    """Mean time between steps, over all sequences of two or more; what `means` foretells."""
    step_s = {(s.sequence, s.round): s.duration_s for s in trace.spans if s.operation is Operation.VERIFY}
    total_s, num_waits = np.zeros((2, len(trace.sequences)))
    for r in (r for r in trace.rounds if r.index):
        total_s[r.sequence] += r.end_s - r.start_s - step_s[r.sequence, r.index]
        num_waits[r.sequence] += 1
    return ratio_of_totals(total_s, num_waits) or Estimate(0.0, 0.0, 0.0, 0)


class _Preparing(Build):
    """A build whose operations can be cut short."""

    __slots__ = ("_cuts",)

    def __init__(
        self, env: simpy.Environment, tasks: tuple[Task, ...], residuals: list[Residuals], place: Place, late: LateBuild
    ) -> None:
        super().__init__(env, tasks, residuals, place, late, in_one=False)
        self._cuts = [Event(env) for _ in tasks]

    def passes(self, device: int, seconds: float) -> Event:
        return super().passes(device, seconds) | self._cuts[device]

    def cut_short(self, spared: int | None) -> None:
        """Nobody needs it any more, but for the operation under way on the worker `spared`."""
        self.is_needed_no_more()
        for device, cut in enumerate(self._cuts):
            if device != spared:
                cut.succeed()


class _Stage:
    """A clock, the workers, and one who takes a step after another."""

    def __init__(self, step: SlowStep, preparation: Preparation) -> None:
        self.step, self.on_late, self.tasks = step, preparation.on_late, preparation.tasks(step)
        self.places, self.slowdown = preparation.places(len(self.tasks)), preparation.slowdown(step)
        self.env = simpy.Environment()
        policy = {"kind": "outcome_speculation", "order": list(preparation.order), "on_late": preparation.on_late.value}
        self.trace = Trace(policy=policy, workload=step.to_dict())
        self.recorder = Recorder(self.env, self.trace.spans)
        self.residuals: list[Residuals] = [dict.fromkeys(Operation, repeat(1.0))] * step.num_workers
        self.workers: list[DraftDevice] = []
        for _ in range(step.num_workers):
            self.workers.append(DraftDevice(self.workers, self.recorder))

    def play(self, num_sequences: int, num_rounds: int, seed: int) -> Trace:
        rng = np.random.default_rng(seed_sequence(seed))
        size = (num_sequences, num_rounds)
        durations_s = rng.choice(self.step.durations_s, size).tolist()
        outcomes = rng.choice(len(self.step.outcomes), size, p=self.step.probabilities).tolist()
        for worker in self.workers:
            self.env.process(worker.run())
        for index, luck in enumerate(zip(durations_s, outcomes, strict=True)):
            self.env.run(self.env.process(self._sequence(index, *luck)))
        self.trace.meta = {"producer": "simulator", "engine": "des", "seed": seed}
        return self.trace

    def _sequence(self, index: int, durations_s: list[float], outcomes: list[int]) -> Process:
        first_s, build = self.env.now, None
        for number, duration_s in enumerate(durations_s):
            asked_s, place, before = self.env.now, (index, number), build
            build = self._preparing(place) if number + 1 < len(durations_s) else None  # nothing follows the last
            source = yield from self._next_work(outcomes[number - 1] if number else None, before, build, place)
            start_s, step_s = self.env.now, duration_s * (1.0 if build is None else self.slowdown)
            yield Arrival(self.env, step_s)
            self.recorder.end(Lane.TARGET, 0, place, Operation.VERIFY, 1, 1, 0, start_s, step_s)
            self.trace.rounds.append(Round(index, number, source, 0, 0, 1, 0, asked_s, self.env.now))
        tokens = (NOT_YET, *outcomes)
        self.trace.sequences.append(PlayedSequence(index, 1, tokens, first_s, first_s, self.env.now, False))

    def _preparing(self, place: Place) -> _Preparing | None:
        return _Preparing(self.env, self.tasks, self.residuals, place, self.on_late) if self.tasks else None

    def _next_work(
        self, outcome: int | None, before: _Preparing | None, build: _Preparing | None, place: Place
    ) -> Process:
        """The outcome of the step before, if there was one, is known. Returns where the work for it came from, when it
        is there and the workers have been given the build beside the next step."""
        is_hit = outcome is not None and before is not None and (yield from self._is_prepared(outcome, before))
        if outcome is None or is_hit:
            if build is not None:
                self.workers[0].start(build)
        else:
            in_the_open = Step(Operation.DRAFT_STEP, 1, 1, 0, self.step.outcomes[outcome].on_miss_s)
            yield ask(self.workers, Answer(self.env, (Task.of([in_the_open]),), self.residuals, place, 0.0, build))
        if not self.tasks:
            return Source.SYNCHRONOUS
        return Source.FIRST if outcome is None else Source.HIT if is_hit else Source.MISS

    def _is_prepared(self, outcome: int, build: _Preparing) -> Process:
        """Whether the outcome is a hit, when that is known and nothing of the build need be waited for."""
        if build.num_open and self.on_late is LateBuild.WAIT:
            yield build.ended()
        if outcome not in self.places:
            build.cut_short(None)
            return False
        worker, operation = self.places[outcome]
        num_done = build.progress[worker]
        build.cut_short(worker if num_done == operation else None)
        if num_done == operation:
            yield build.ended()
        return num_done >= operation
