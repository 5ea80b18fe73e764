"""The event engine: targets and draft devices as SimPy processes. The reference for time.

Outcomes follow the replay law of the agreement (`sim.round_law`); durations are drawn operation by operation
(`sim.durations`). Acceptance and hits are decided by random numbers of their (prompt, position), noise by a stream of
each device and operation: two policies under one seed meet the same text and the same luck. Who waits for whom is
decided by events, never by comparing times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import simpy
from numpy.typing import NDArray

from sim.decider import Decider
from sim.draft_devices import DraftDevice, Meter, Recorder
from sim.durations import Durations, Noise
from sim.errors import BadInput
from sim.expectation import Expectation
from sim.policy import Drafting
from sim.replay import Replay
from sim.round_law import RoundLaw
from sim.rows import OutcomeTables, Row
from sim.streams import Streams, outcome_uniforms
from sim.system import System
from sim.target import StaticBatches, Target
from sim.trace import Sequence as DecodedSequence
from sim.trace import Trace
from sim.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_TABLES = 64  # draftings whose rounds are kept as tables; bounds memory where a controller tries ever new ones


@dataclass(frozen=True)
class Totals:
    """One run without its rounds: arrays are (num_prompts,), or (2, num_prompts) by source of the round that ends with
    the look-up: after a hit, after a miss.

    Of each request: when it arrived, when its first token was there and decoding began, when it ended. `shared_s` are
    equal shares of the time in which the batch of a prompt was decoded: they sum to the time that targets decoded,
    while the rows' own `seconds` count a second once for each row. `batch` is the number of a prompt's batch.
    """

    num_tokens: FloatArray
    num_rounds: FloatArray
    num_lookups: FloatArray
    num_hits: FloatArray
    arrival_s: FloatArray
    first_token_s: FloatArray
    end_s: FloatArray
    shared_s: FloatArray
    batch: IntArray
    doubt: float = 0.0  # largest half-width of a mean hit probability that the agreement record leaves open

    @property
    def seconds(self) -> FloatArray:
        """(num_prompts,) from the first token to the last."""
        return self.end_s - self.first_token_s


def mean_of(runs: Sequence[Totals]) -> Expectation:
    """Means over runs, the time of a batch shared by its prompts: tokens over seconds is the throughput of a target."""
    return Expectation(
        num_tokens=np.mean([run.num_tokens for run in runs], axis=0),
        num_rounds=np.mean([run.num_rounds for run in runs], axis=0),
        seconds=np.mean([run.shared_s for run in runs], axis=0),
        num_lookups=np.mean([run.num_lookups for run in runs], axis=0),
        num_hits=np.mean([run.num_hits for run in runs], axis=0),
        doubt=max(run.doubt for run in runs),
        batch=runs[0].batch,
    )


def replicate(policy: Decider, workload: Workload, system: System, seeds: Iterable[int]) -> list[Trace]:
    """One trace per seed."""
    traces = []
    for seed, timeline in _timelines(policy, workload, system, seeds, record=True):
        timeline.run()
        timeline.trace.meta = {"producer": "simulator", "engine": "des", "seed": seed, "identity": system.identity}
        traces.append(timeline.trace)
    return traces


def totals(policy: Decider, workload: Workload, system: System, seeds: Iterable[int]) -> list[Totals]:
    """The totals of one run per seed: rounds and times are those of `replicate`, nothing of them is kept."""
    return [timeline.run() for _, timeline in _timelines(policy, workload, system, seeds, record=False)]


def _timelines(
    policy: Decider, workload: Workload, system: System, seeds: Iterable[int], *, record: bool
) -> Iterator[tuple[int, Timeline]]:
    stage = Stage(workload, system)
    for seed in seeds:
        yield seed, Timeline(policy, workload, system, seed, record=record, stage=stage)


def _check(system: System) -> None:
    """Raises `BadInput` for times that no clock can run on, and for targets that would have to take turns."""
    placement = system.placement
    times = {f"host_s.{term.value}": seconds for term, seconds in system.host_s.items()}
    times["time of a message"] = placement.speculation_s(1, sampled=True)
    for name, seconds in times.items():
        if not 0 <= seconds < math.inf:
            raise BadInput(name, "must be a finite number >= 0", seconds)
    if placement.num_targets > 1 and not system.overlaps:
        rule = "must be 1 where target and draft do not work at the same time"
        raise BadInput("placement.num_targets", rule, placement.num_targets)


class Stage:
    """What runs of different seeds share: texts, laws of rounds, locations of durations."""

    def __init__(self, workload: Workload, system: System) -> None:
        _check(system)
        self.replay = Replay(system.agreement, workload)
        self.durations = Durations(system)
        self.doubt = 0.0  # the largest of the laws met so far
        self._laws: dict[Drafting, RoundLaw] = {}

    def law(self, drafting: Drafting) -> RoundLaw:
        """The law of the rounds of a drafting."""
        if drafting not in self._laws:
            if len(self._laws) >= MAX_TABLES:
                self._laws.clear()
            self._laws[drafting] = RoundLaw(self.replay, drafting)
            self.doubt = max(self.doubt, self._laws[drafting].doubt)
        return self._laws[drafting]


class Run:
    """One policy under one seed: a clock, devices, and what the rounds of every text do. Its subclasses say what there
    is to decode and give the targets their admissions.

    A policy table or a controller is asked before every round. With `record` every round and every operation goes into
    `trace`; without, operations that nothing can interrupt pass as one event. The outcomes and, up to rounding, the
    times are the same.
    """

    def __init__(
        self,
        policy: Decider,
        workload: Workload,
        system: System,
        seed: int,
        *,
        record: bool,
        stage: Stage | None = None,
        num_variants: int = 1,
        meter: Meter | None = None,
    ) -> None:
        """Each prompt has `num_variants` lucks; the first is the one that it has where every prompt is decoded once."""
        self.policy, self.workload, self.system, self.record = policy, workload, system, record
        self.stage = stage or Stage(workload, system)
        streams = Streams.of(seed)
        self.noise = Noise(streams.noise)
        self.env = simpy.Environment()
        self.trace = Trace(policy=policy.to_dict(), workload=workload.identity())
        self.recorder = Recorder(self.env, self.trace.spans if record else None, meter)
        variants = [outcome_uniforms(self.stage.replay, streams.outcomes) for _ in range(num_variants)]
        self._uniforms = np.stack(variants, axis=1)
        self._tables: dict[Drafting, OutcomeTables] = {}
        self.draft_devices: list[DraftDevice] = []
        for _ in range(system.placement.num_draft_devices):
            self.draft_devices.append(DraftDevice(self.draft_devices, self.recorder))
        self.targets: list[Target] = []

    def _play(self) -> None:
        """Let the clock run until every target has ended; once."""
        for device in self.draft_devices:
            self.env.process(device.run())
        self.env.run(self.env.all_of([self.env.process(target.run()) for target in self.targets]))
        self._let_go()
        self.trace.sequences.sort(key=lambda sequence: sequence.index)

    def _let_go(self) -> None:
        """The parts of a run refer to one another; cut that, so that its tables are freed with it."""
        for device in self.draft_devices:
            device.stop()
        self.env.run()
        self.draft_devices.clear()
        self.targets.clear()

    def outcomes(self, drafting: Drafting) -> OutcomeTables:
        """What every round of a drafting does under this seed."""
        if drafting not in self._tables:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            sampled = drafting.is_sampled(self.workload.temperature)
            bytes_per_token = self.system.placement.speculation_bytes(1, sampled=sampled)
            self._tables[drafting] = OutcomeTables(self.stage.law(drafting), self._uniforms, bytes_per_token)
        return self._tables[drafting]

    def finish(self, row: Row) -> None:
        """A sequence has ended now."""
        row.end_s = self.env.now
        if self.record:
            self.trace.sequences.append(self._sequence(row))

    def _sequence(self, row: Row) -> DecodedSequence:
        agreement = self.system.agreement
        prompt = row.luck % agreement.num_prompts
        is_whole = row.length == int(agreement.lengths[prompt])
        tokens = agreement.text(prompt)[: row.length]
        stopped = is_whole and bool(agreement.stopped[prompt])
        return DecodedSequence(
            index=row.index,
            prompt_length=int(agreement.prompt_length[prompt]),
            tokens=tokens,
            prefill_start_s=row.admitted_s,
            decode_start_s=row.first_token_s,
            end_s=row.end_s,
            stopped=stopped,
            arrival_s=row.arrival_s,
            stopped_by_string=stopped and tokens[-1] not in agreement.identity["stop_ids"],
        )


class Timeline(Run):
    """Every prompt of the system's agreement once, dealt to the targets in turn and decoded in static batches."""

    def __init__(
        self,
        policy: Decider,
        workload: Workload,
        system: System,
        seed: int,
        *,
        record: bool = True,
        stage: Stage | None = None,
    ) -> None:
        super().__init__(policy, workload, system, seed, record=record, stage=stage)
        replay = self.stage.replay
        lengths = zip(replay.prompt_length.tolist(), replay.lengths.tolist(), strict=True)
        self.rows = [Row(index, *of_prompt, cap=replay.cap, luck=index) for index, of_prompt in enumerate(lengths)]
        num_targets = system.placement.num_targets
        for index in range(num_targets):
            batches = StaticBatches(self.rows[index::num_targets], workload.batch_size)
            self.targets.append(Target(self, index, batches))

    def run(self) -> Totals:
        """Decode everything; once."""
        self._play()
        return self._totals()

    def _batches(self) -> IntArray:
        """(num_prompts,) number of the batch of every prompt, in the order of their first prompts."""
        num_targets = self.system.placement.num_targets
        turn, target = np.divmod(np.arange(len(self.rows)), num_targets)
        return turn // self.workload.batch_size * num_targets + target

    def _totals(self) -> Totals:
        def of_rows(name: str) -> FloatArray:
            return np.array([getattr(row, name) for row in self.rows], dtype=float)

        return Totals(
            num_tokens=self.stage.replay.num_tokens(),
            num_rounds=of_rows("num_rounds"),
            num_lookups=of_rows("lookups").T,
            num_hits=of_rows("hits").T,
            arrival_s=of_rows("arrival_s"),
            first_token_s=of_rows("first_token_s"),
            end_s=of_rows("end_s"),
            shared_s=of_rows("shared_s"),
            batch=self._batches(),
            doubt=self.stage.doubt,
        )
