"""The short runs of a profile: every kind of decoder over a few prompts, at moments all over the profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from experiments.bench import Bench
from experiments.config import ExperimentConfig
from experiments.ledger import NOWHERE, TRACE, Ledger, piece_name
from experiments.measurement import Warm, batches, join, turns, warm_up
from sim.policy import Policy
from sim.trace import Trace
from sim.workload import Workload

LATENCIES, SHORT_RUNS = "profile: latency of every operation", "profile: short runs"  # stages
PIECES = "short_runs"  # in a ledger
Progress = Callable[[int, int], None]  # blocks of latencies done, in all


class ShortRuns:
    """A batch of prompts is decoded under every policy before the next one, so that each moment meets all policies; the
    moments are spread evenly, for one in which the machine is slow to be one of many (`calibration.slow_moments`)."""

    def __init__(
        self, bench: Bench, policies: Sequence[Policy], workload: Workload, seed: int, ledger: Ledger = NOWHERE
    ) -> None:
        self._execute = Warm(bench.execute, partial(warm_up, bench.execute, policies, workload))
        self._policies, self._seed, self._ledger = policies, seed, ledger
        self._batches = batches(workload)
        self._pieces: list[list[Trace]] = [[] for _ in policies]
        self._num_done = 0
        self.seconds = 0.0  # that they took

    def up_to(self, share: float) -> None:
        """Decode the batches that are due when `share` of the profile is over: the first at 0, the last at 1."""
        start_s = time.perf_counter()
        last = max(1, len(self._batches) - 1)
        while self._num_done < len(self._batches) and self._num_done <= share * last:
            self._decode(self._num_done)
            self._num_done += 1
        self.seconds += time.perf_counter() - start_s

    def _decode(self, index: int) -> None:
        for number in turns(len(self._policies), 0, index):
            piece = partial(self._execute, self._policies[number], self._batches[index], self._seed)
            self._pieces[number].append(self._ledger.once(piece_name(PIECES, 0, index, number), TRACE, piece))

    def traces(self) -> list[Trace]:
        """One of each policy, over all prompts."""
        return [join(parts) for parts in self._pieces]


def in_between(runs: Sequence[ShortRuns], progress: Progress) -> Progress:
    """Decodes the first batches, and after every block of latencies, when it is called, those that are due."""

    def decode_due(done: int, total: int) -> None:
        progress(done, total)
        for own in runs:
            own.up_to(done / total)

    for own in runs:
        own.up_to(0.0)
    return decode_due


def workload_of_short_runs(config: ExperimentConfig, calibration: Workload) -> Workload:
    """Whole batches of the first calibration prompts, two at least."""
    size = calibration.batch_size
    num_batches = max(2, math.ceil(config.profile.trace_prompts / size))
    return calibration.select(range(num_batches * size))
