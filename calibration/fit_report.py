"""What a fit rests on: intervals of its parameters, drift of the machine, steps of the latencies, and what to doubt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, theilslopes

from calibration.fit import IN_SITU, unexplained
from calibration.profile import Profile
from sim.agreement import AgreementRecord
from sim.latency import LatencyModel, LatencySample
from sim.metrics import BOOTSTRAP_SEED, Estimate, ratio_of_totals
from sim.system import HostTerm, System
from sim.trace import Lane, Operation

FloatArray = NDArray[np.float64]
Cell = tuple[Lane, Operation, int, int, int]  # rows, tokens of each, context

FEWEST_PROMPTS = 5  # for an interval over prompts to mean anything
FEWEST_BLOCKS = 5  # for a trend over them
NUM_DRAWS = 400  # of blocks, for the slow-down
SMALLEST_STEP = 1.1  # a jump that is not worth a line is smaller
STEP_ERRORS = 4.0  # standard errors that a step must stand above what its neighbours grow by


@dataclass(frozen=True)
class Step:
    """An operation takes `ratio` times as long with `to_tokens` tokens of each row as with `from_tokens`: far more than
    between its other neighbouring widths, which is what an edge of a matrix tile or a kernel looks like."""

    lane: Lane
    operation: Operation
    batch_size: int
    from_tokens: int
    to_tokens: int
    ratio: float


@dataclass(frozen=True)
class FitReport:
    """`drift` is the relative change of a lane's speed from the first interleaved block of the profile to the last;
    `largest_location_error` the widest relative half width of a fitted location (order statistics of its samples);
    `design_effect` how many times the variance of the acceptance over prompts exceeds that of independent positions.
    Intervals are 95 %."""

    drift: dict[Lane, Estimate]
    steps: tuple[Step, ...]
    largest_location_error: float
    contention: dict[Lane, Estimate]
    host_s: dict[HostTerm, Estimate]
    acceptance: Estimate
    design_effect: float
    profile_s: float
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "drift": {lane.value: estimate.to_dict() for lane, estimate in self.drift.items()},
            "steps": [
                {
                    "lane": step.lane.value,
                    "operation": step.operation.value,
                    "batch_size": step.batch_size,
                    "from_tokens": step.from_tokens,
                    "to_tokens": step.to_tokens,
                    "ratio": step.ratio,
                }
                for step in self.steps
            ],
            "largest_location_error": self.largest_location_error,
            "contention": {lane.value: estimate.to_dict() for lane, estimate in self.contention.items()},
            "host_s": {term.value: estimate.to_dict() for term, estimate in self.host_s.items()},
            "acceptance": self.acceptance.to_dict(),
            "design_effect": self.design_effect,
            "profile_s": self.profile_s,
            "notes": list(self.notes),
        }


def report_fit(profile: Profile, system: System) -> FitReport:
    """Of `calibration.fit.fit(profile)`."""
    drifts = drift(profile.latency)
    acceptance, design_effect = acceptance_of(profile.agreement)
    return FitReport(
        drift=drifts,
        steps=tuple(steps(profile.latency)),
        largest_location_error=max(_location_errors(profile.latency), default=0.0),
        contention={lane: slowdown(profile.latency, system.latency, lane) for lane in Lane},
        host_s=_host_times(profile, system),
        acceptance=acceptance,
        design_effect=design_effect,
        profile_s=float(sum(profile.manifest.get("durations_s", {}).values())),
        notes=(*doubts_about(profile.agreement), *_doubts_about_drift(drifts)),
    )


def doubts_about(record: AgreementRecord) -> list[str]:
    """What a reader of anything planned from a record must know first."""
    found = []
    dataset = str(record.identity.get("dataset", ""))
    if record.num_prompts < FEWEST_PROMPTS:
        found.append(f"acceptance is known from {record.num_prompts} prompts: their spread cannot be told")
    if "random" in dataset.lower():
        found.append(f"acceptance was measured on {dataset}: random prompts say nothing about real ones")
    if not record.identity.get("stop_ids") and not record.stop_strings:
        found.append("texts were decoded past their end: acceptance behind it means nothing")
    return found


def _doubts_about_drift(drifts: Mapping[Lane, Estimate]) -> list[str]:
    return [
        f"the {lane.value} became {100 * abs(e.value):.0f} % {'slower' if e.value > 0 else 'faster'} during the profile"
        for lane, e in drifts.items()
        if not e.low <= 0 <= e.high
    ]


# ------------------------------------------------------------------------------------------------------------ latency


def _idle_cells(samples: Iterable[LatencySample]) -> dict[Cell, list[LatencySample]]:
    cells: dict[Cell, list[LatencySample]] = defaultdict(list)
    for s in samples:
        if not s.busy:
            cells[s.lane, s.operation, s.batch_size, s.num_tokens, s.context].append(s)
    return cells


def drift(samples: Sequence[LatencySample]) -> dict[Lane, Estimate]:
    """Of the lanes whose samples are of `FEWEST_BLOCKS` blocks at least: Theil and Sen's slope through the blocks'
    median ratios to the cells' medians, over all blocks. n is the number of blocks."""
    ratios: dict[Lane, dict[int, list[float]]] = {lane: defaultdict(list) for lane in Lane}
    for (lane, *_), own in _idle_cells(samples).items():
        location_s = np.median([s.duration_s for s in own])
        for s in own:
            ratios[lane][s.block].append(s.duration_s / location_s)
    found = {}
    for lane, by_block in ratios.items():
        if len(by_block) >= FEWEST_BLOCKS:
            blocks = sorted(by_block)
            fitted = theilslopes([np.median(by_block[block]) for block in blocks], blocks)
            span = blocks[-1] - blocks[0]
            value, low, high = (float(slope) * span for slope in (fitted[0], fitted[2], fitted[3]))
            found[lane] = Estimate(value, low, high, len(blocks))
    return found


def steps(samples: Sequence[LatencySample]) -> list[Step]:
    """Jumps between neighbouring widths: `SMALLEST_STEP` times, and `STEP_ERRORS` standard errors, above the median
    growth between the operation's neighbours."""
    by_width: dict[tuple[Lane, Operation, int], dict[int, dict[int, tuple[float, float]]]] = {}
    for (lane, operation, rows, width, context), own in _idle_cells(samples).items():
        logs = np.log([s.duration_s for s in own])
        error = 1.2533 * 1.4826 * float(np.median(np.abs(logs - np.median(logs)))) / np.sqrt(len(logs))
        table = by_width.setdefault((lane, operation, rows), defaultdict(dict))
        table[width][context] = float(np.median(logs)), float(error)
    return [step for key, table in by_width.items() for step in _steps_of(*key, table)]


def _steps_of(
    lane: Lane, operation: Operation, rows: int, table: Mapping[int, Mapping[int, tuple[float, float]]]
) -> Iterable[Step]:
    growth: dict[tuple[int, int], tuple[float, float]] = {}
    for before, after in pairwise(sorted(table)):
        shared = table[before].keys() & table[after].keys()
        if shared:
            logs = [table[after][c][0] - table[before][c][0] for c in shared]
            errors = [np.hypot(table[after][c][1], table[before][c][1]) for c in shared]
            growth[before, after] = float(np.mean(logs)), float(np.sqrt(np.sum(np.square(errors))) / len(shared))
    if len(growth) < 3:
        return
    usual = float(np.median([value for value, _ in growth.values()]))
    for (before, after), (value, error) in growth.items():
        excess = value - usual
        if excess > np.log(SMALLEST_STEP) and excess > STEP_ERRORS * error:
            yield Step(lane, operation, rows, before, after, float(np.exp(value)))


def _location_errors(samples: Sequence[LatencySample]) -> Iterable[float]:
    """Relative half widths of the cells' medians."""
    for own in _idle_cells(samples).values():
        low, high = location_interval([s.duration_s for s in own])
        yield (high - low) / 2 / float(np.median([s.duration_s for s in own]))


def location_interval(durations_s: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by order statistics: exact whatever the law of the durations; all of them where they
    are too few for that."""
    ordered = np.sort(durations_s)
    rank = int(binom.ppf(0.025, len(ordered), 0.5))
    return float(ordered[max(0, rank - 1)]), float(ordered[min(len(ordered) - 1, len(ordered) - rank)])


def slowdown(samples: Sequence[LatencySample], latency: LatencyModel, lane: Lane) -> Estimate:
    """Median ratio of a lane's busy samples to its idle cells, as `calibration.fit` has it, drawn over blocks."""
    by_block: dict[int, list[float]] = defaultdict(list)
    for s in samples:
        if s.lane is lane and s.busy and s.operation in IN_SITU:
            location_s = float(latency[lane, s.operation].location_s(s.num_tokens, s.context, s.batch_size))
            by_block[s.block].append(s.duration_s / location_s)
    if not by_block:
        return Estimate(1.0, 1.0, 1.0, 0)
    return _over_blocks(list(by_block.values()), lambda values: max(1.0, float(np.median(values))))


def _over_blocks(blocks: Sequence[Sequence[float]], statistic: Callable[[FloatArray], float]) -> Estimate:
    arrays = [np.asarray(block) for block in blocks]
    value = statistic(np.concatenate(arrays))
    if len(arrays) < 2:
        return Estimate(value, -np.inf, np.inf, len(arrays))
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    picks = rng.integers(0, len(arrays), size=(NUM_DRAWS, len(arrays)))
    drawn = [statistic(np.concatenate([arrays[index] for index in row])) for row in picks]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(value, float(low), float(high), len(arrays))


# --------------------------------------------------------------------------------------------------------- host times


def _host_times(profile: Profile, system: System) -> dict[HostTerm, Estimate]:
    """The fitted means, with intervals over the batches of the short runs."""
    totals: dict[HostTerm, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, trace in enumerate(profile.traces):
        for term, sequence, seconds in unexplained(trace, system.latency, system.in_situ):
            totals[term][number, sequence].append(seconds)
    found = {}
    for term, by_batch in totals.items():
        sums = np.array([float(sum(seconds)) for seconds in by_batch.values()])
        counts = np.array([float(len(seconds)) for seconds in by_batch.values()])
        spread = ratio_of_totals(sums, counts)
        assert spread is not None  # every term here has rounds
        value = system.host_s[term]
        found[term] = Estimate(value, min(value, max(0.0, spread.low)), max(value, spread.high), spread.n)
    return found


# ---------------------------------------------------------------------------------------------------------- agreement


def acceptance_of(record: AgreementRecord) -> tuple[Estimate, float]:
    """Mean acceptance of a first draft token, with its interval over prompts, and the design effect. Prompts that are
    one and the same count as one."""
    inside = record.position > 0
    accepted, prompt = record.acceptance[inside], record.prompt[inside]
    group = np.arange(record.num_prompts)
    for repeated in record.repeated_prompts:
        group[repeated] = repeated[0]
    _, prompt = np.unique(group[prompt], return_inverse=True)
    sums, counts = (np.bincount(prompt, own).astype(float) for own in (accepted, None))
    estimate = ratio_of_totals(sums, counts) or Estimate(0.0, -np.inf, np.inf, 0)
    num = len(sums)
    if num < 2 or not counts.sum():
        return estimate, float("nan")
    mean = estimate.value
    of_prompts = num / (num - 1) * float(((sums - mean * counts) ** 2).sum()) / float(counts.sum()) ** 2
    of_positions = float(accepted.var()) / len(accepted)
    return estimate, of_prompts / of_positions if of_positions > 0 else 1.0
