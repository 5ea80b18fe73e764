"""What a fit rests on: intervals of its parameters, drift of the machine, steps of the latencies, and what to doubt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom
from scipy.stats import t as student_t

from calibration.doubts import doubts_about
from calibration.drift import drift
from calibration.host_fit import DRAFT_STEP, RoundHost, SpanRatio, host_of_rounds, ratios_of_spans, usual_ratios
from calibration.latency_fit import IN_SITU, Key, SampledCell, cell_of, idle_cells
from calibration.latency_steps import Step, steps
from calibration.profile import Profile
from calibration.slow_moments import remarks, usual_runs
from sim.agreement import AgreementRecord
from sim.latency import LatencySample
from sim.metrics import BOOTSTRAP_SEED, Estimate, bootstrap, ratio_of_totals
from sim.system import HostTerm, System
from sim.trace import Lane, Trace

FloatArray = NDArray[np.float64]
Text = tuple[int, int]  # trace, sequence
InSituRatios = dict[str, dict[Key, Estimate]]  # by kind of decoder

NUM_DRAWS = 200  # of blocks, for the standard error of a slow-down


@dataclass(frozen=True)
class FitReport:
    """How well the parameters of a fit are known; intervals are 95 %.

    `drift` is the relative change of a lane's durations from the first interleaved block of the profile to the last;
    `locations` are the medians of the cells, in seconds, by order statistics of the blocks' medians. `in_situ` holds
    the mean ratios of operations in runs of a kind of decoder to their tables, with intervals over texts, like those of
    `host_s`. `design_effect` says how many times the variance of the acceptance over prompts exceeds that of
    independent positions. `profile_s` is the time that the profile took.
    """

    drift: dict[Lane, Estimate]
    steps: tuple[Step, ...]
    locations: dict[SampledCell, Estimate]
    contention: dict[Lane, Estimate]
    in_situ: InSituRatios
    host_s: dict[HostTerm, Estimate]
    acceptance: Estimate
    design_effect: float
    profile_s: float
    notes: tuple[str, ...]

    @property
    def largest_location_error(self) -> float:
        """Widest relative half width of a location; 0 without any."""
        return max(((e.high - e.low) / 2 / e.value for e in self.locations.values()), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "drift": {lane.value: estimate.to_dict() for lane, estimate in self.drift.items()},
            "steps": [step.to_dict() for step in self.steps],
            "largest_location_error": self.largest_location_error,
            "locations_s": [
                {
                    "lane": lane.value,
                    "operation": operation.value,
                    "batch_size": rows,
                    "num_tokens": width,
                    "context": context,
                    **estimate.to_dict(),
                }
                for (lane, operation, rows, width, context), estimate in self.locations.items()
            ],
            "contention": {lane.value: estimate.to_dict() for lane, estimate in self.contention.items()},
            "in_situ": {
                kind: {f"{lane.value}.{operation.value}": e.to_dict() for (lane, operation), e in rows.items()}
                for kind, rows in self.in_situ.items()
            },
            "host_s": {term.value: estimate.to_dict() for term, estimate in self.host_s.items()},
            "acceptance": self.acceptance.to_dict(),
            "design_effect": None if np.isnan(self.design_effect) else self.design_effect,
            "profile_s": self.profile_s,
            "notes": list(self.notes),
        }


def report_fit(profile: Profile, system: System) -> FitReport:
    """Of `calibration.fit.fit(profile)`."""
    drifts, found_steps = drift(profile.latency), steps(profile.latency)
    acceptance, design_effect = acceptance_of(profile.agreement)
    runs = usual_runs(profile.traces)
    return FitReport(
        drift=drifts,
        steps=tuple(found_steps),
        locations=locations(profile.latency),
        contention={lane: slowdown_of(profile.latency, system, lane) for lane in Lane},
        in_situ=in_situ_ratios(runs, system),
        host_s=host_times(runs, profile.latency, system),
        acceptance=acceptance,
        design_effect=design_effect,
        profile_s=float(sum(profile.manifest.get("durations_s", {}).values())),
        notes=(
            *doubts_about(profile.agreement),
            *_doubts_about_drift(drifts),
            *remarks(profile.traces),
            *(step.in_words() for step in found_steps if step.is_in_gap),
        ),
    )


def _doubts_about_drift(drifts: Mapping[Lane, Estimate]) -> list[str]:
    return [
        f"the {lane.value} became {100 * abs(e.value):.0f} % {'slower' if e.value > 0 else 'faster'} during the profile"
        for lane, e in drifts.items()
        if not e.low <= 0 <= e.high
    ]


# ------------------------------------------------------------------------------------------------------------ latency


def locations(samples: Sequence[LatencySample]) -> dict[SampledCell, Estimate]:
    """Medians of the idle samples of each cell; n is the number of blocks. The samples of one block share what the
    machine does meanwhile, so that blocks are what an interval is made from."""
    found = {}
    for cell, own in idle_cells(samples).items():
        of_blocks = [float(np.median(durations_s)) for durations_s in _by_block(own).values()]
        value, (low, high) = float(np.median([s.duration_s for s in own])), interval_of_median(of_blocks)
        found[cell] = Estimate(value, min(low, value), max(high, value), len(of_blocks))
    return found


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by order statistics: exact whatever the law of independent values; all of them
    where they are too few for that."""
    ordered = np.sort(values)
    rank = int(binom.ppf(0.025, len(ordered), 0.5))
    return float(ordered[max(0, rank - 1)]), float(ordered[min(len(ordered) - 1, len(ordered) - rank)])


def slowdown_of(samples: Sequence[LatencySample], system: System, lane: Lane) -> Estimate:
    """The fitted slow-down of a lane beside the other. Blocks are drawn with their idle and their busy samples, and the
    interval is Student's with the standard error over draws: blocks are few. n is their number."""
    rounds = [s for s in samples if s.lane is lane and s.operation in IN_SITU]
    blocks = sorted({s.block for s in rounds})
    value = system.contention[lane]
    cells = _paired_cells(rounds, blocks)
    if not cells:
        return Estimate(value, value, value, 0)
    if len(blocks) < 2:
        return Estimate(value, -np.inf, np.inf, len(blocks))
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(blocks), size=(NUM_DRAWS, len(blocks)))
    error = float(np.std([_median_ratio(cells, pick) for pick in picks], ddof=1))
    half_width = float(student_t.ppf(0.975, len(blocks) - 1)) * error * float(np.sqrt(len(blocks) / (len(blocks) - 1)))
    return Estimate(value, max(1.0, value - half_width), value + half_width, len(blocks))


def _paired_cells(samples: Sequence[LatencySample], blocks: Sequence[int]) -> list[tuple[FloatArray, FloatArray]]:
    """Idle and busy samples, each (cells, blocks, samples of a block) with nan for none, of the cells that have both;
    cells with equally many are together."""
    by_cell: dict[SampledCell, dict[bool, list[LatencySample]]] = defaultdict(lambda: {False: [], True: []})
    for s in samples:
        by_cell[cell_of(s)][s.busy].append(s)
    alike: dict[tuple[int, int], list[tuple[FloatArray, FloatArray]]] = defaultdict(list)
    for own in by_cell.values():
        if own[False] and own[True]:
            idle, busy = (_padded(own[is_busy], blocks) for is_busy in (False, True))
            alike[idle.shape[1], busy.shape[1]].append((idle, busy))
    return [(np.stack([idle for idle, _ in pairs]), np.stack([busy for _, busy in pairs])) for pairs in alike.values()]


def _padded(samples: Sequence[LatencySample], blocks: Sequence[int]) -> FloatArray:
    by_block = _by_block(samples)
    table = np.full((len(blocks), max(map(len, by_block.values()))), np.nan)
    for row, block in enumerate(blocks):
        durations_s = by_block.get(block, [])
        table[row, : len(durations_s)] = durations_s
    return table


def _by_block(samples: Iterable[LatencySample]) -> dict[int, list[float]]:
    by_block: dict[int, list[float]] = defaultdict(list)
    for s in samples:
        by_block[s.block].append(s.duration_s)
    return by_block


def _median_ratio(cells: Sequence[tuple[FloatArray, FloatArray]], pick: NDArray[np.int64]) -> float:
    """Median over all busy samples of the drawn blocks of their ratio to the median of their cell's idle ones."""
    drawn = [(idle[:, pick].reshape(len(idle), -1), busy[:, pick].reshape(len(busy), -1)) for idle, busy in cells]
    ratios = [(busy / _medians(idle)[:, None]).ravel() for idle, busy in drawn]
    return float(_medians(np.concatenate(ratios)[None])[0])


def _medians(values: FloatArray) -> FloatArray:
    """(rows,) medians of what is there in each row; nan where nothing is."""
    ordered, num = np.sort(values, axis=1), (~np.isnan(values)).sum(1)
    middle = np.stack([np.maximum(0, num - 1) // 2, np.minimum(num // 2, values.shape[1] - 1)], axis=1)
    return np.take_along_axis(ordered, middle, axis=1).mean(1)


# --------------------------------------------------------------------------------------------------------- short runs


def in_situ_ratios(traces: Sequence[Trace], system: System) -> InSituRatios:
    """Of the operations that have residuals in situ; drawn over texts, or batches of them."""
    slower = {lane: system.slowdown(lane, beside=True) for lane in Lane}
    ratios: dict[tuple[str, Key], dict[tuple[int, int], list[SpanRatio]]] = defaultdict(lambda: defaultdict(list))
    for number, trace in enumerate(traces):
        for found in ratios_of_spans(trace, system.latency, slower):
            ratios[trace.policy["kind"], found.key][number, found.sequence].append(found)
    return {
        kind: {key: _mean_over_texts(ratios[kind, key], float(np.mean(seen))) for key, seen in rows.items()}
        for kind, rows in system.in_situ.items()
    }


def _mean_over_texts(by_text: Mapping[tuple[int, int], Sequence[SpanRatio]], value: float) -> Estimate:
    """With the fitted `value`, whose wildest samples are pulled in."""
    spread = ratio_of_totals(*_seconds_and_locations(by_text.values()))
    assert spread is not None  # what is in situ has samples
    return Estimate(value, min(value, spread.low), max(value, spread.high), spread.n)


def _seconds_and_locations(by_text: Iterable[Iterable[SpanRatio]]) -> tuple[FloatArray, FloatArray]:
    """(texts,) what the operations took, and what the tables say of them."""
    texts = [list(own) for own in by_text]
    taken_s, location_s = (
        [sum(getattr(r, name) for r in own) for own in texts] for name in ("duration_s", "location_s")
    )
    return np.array(taken_s, dtype=float), np.array(location_s, dtype=float)


def host_times(traces: Sequence[Trace], samples: Sequence[LatencySample], system: System) -> dict[HostTerm, Estimate]:
    """The fitted means, drawn over texts or batches, each with its draft steps: how fast these are by themselves is
    what the host's part of the first of a round is told from. Where that step feeds two tokens and those after it one,
    the tables say by how much more it takes, and how well they know it is part of the interval."""
    by_kind: dict[str, list[tuple[int, Trace]]] = defaultdict(list)
    for number, trace in enumerate(traces):
        by_kind[trace.policy["kind"]].append((number, trace))
    of_second = error_of_second_token(samples)
    found = (_host_times_of(kind, own, of_second, system) for kind, own in by_kind.items())
    return {term: estimate for of_kind in found for term, estimate in of_kind.items()}


def error_of_second_token(samples: Sequence[LatencySample]) -> float:
    """Relative half width of how many times as long a draft step of two tokens takes as one of one, over the blocks,
    each with the speed that the machine had in it; 0 where the samples do not tell."""
    cells = {cell: own for cell, own in idle_cells(samples).items() if cell[:2] == DRAFT_STEP}
    ratios: dict[int, list[float]] = defaultdict(list)
    for (lane, operation, rows, width, context), own in cells.items():
        single = cells.get((lane, operation, rows, 1, context))
        if width != 2 or single is None:
            continue
        two, one = ({block: float(np.median(d)) for block, d in _by_block(cell).items()} for cell in (own, single))
        both = {block: two[block] / one[block] for block in two.keys() & one.keys()}
        usual = float(np.median(list(both.values())))
        for block, ratio in both.items():
            ratios[block].append(ratio / usual)
    if not ratios:
        return 0.0
    low, high = interval_of_median([float(np.median(own)) for own in ratios.values()])
    return (high - low) / 2


def _host_times_of(
    kind: str, traces: Sequence[tuple[int, Trace]], of_second: float, system: System
) -> dict[HostTerm, Estimate]:
    """Of the traces of one kind of decoder, each with its number."""
    slower = {lane: system.slowdown(lane, beside=True) for lane in Lane}
    usual = usual_ratios(kind, system.latency, system.in_situ)
    following: dict[Key, dict[Text, list[SpanRatio]]] = {key: defaultdict(list) for key in usual}
    rounds: dict[HostTerm, dict[Text, list[RoundHost]]] = defaultdict(lambda: defaultdict(list))
    for number, trace in traces:
        for found in ratios_of_spans(trace, system.latency, slower):
            if found.key in system.in_situ.get(kind, {}) and found.key in usual:
                following[found.key][number, found.sequence].append(found)
        for of_round in host_of_rounds(trace, system.latency, slower):
            rounds[of_round.term][number, of_round.sequence].append(of_round)
    return {term: _host_time(own, following, usual, of_second, system.host_s[term]) for term, own in rounds.items()}


def _host_time(
    rounds: Mapping[Text, Sequence[RoundHost]],
    following: Mapping[Key, Mapping[Text, Sequence[SpanRatio]]],
    usual: Mapping[Key, float],
    of_second: float,
    value: float,
) -> Estimate:
    """`usual` are the ratios of the operations `following` others, and stand for them where these are too few."""
    texts = sorted(rounds.keys() | {text for own in following.values() for text in own})
    own = [rounds.get(text, ()) for text in texts]
    spent_s = np.array([sum(r.rest_s + sum(s.duration_s for s in r.woken) for r in of_text) for of_text in own])
    num = np.array([float(len(of_text)) for of_text in own])
    woken_s = {
        key: np.array([sum(s.location_s for r in of_text for s in r.woken if s.key == key) for of_text in own])
        for key in usual
    }
    seen = {key: _seconds_and_locations(row.get(text, ()) for text in texts) for key, row in following.items() if row}

    def statistic(weights: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = {
                key: (weights @ seen[key][0]) / (weights @ seen[key][1]) if key in seen else usual[key] for key in usual
            }
            return (weights @ spent_s - sum(ratios[key] * (weights @ woken_s[key]) for key in usual)) / (weights @ num)

    low, high = bootstrap(statistic, len(texts))
    of_tables = usual[DRAFT_STEP] * of_second * sum(_second_tokens_s(r) for of_text in own for r in of_text) / num.sum()
    below, above = (float(np.hypot(max(0.0, side), of_tables)) for side in (value - low, high - value))
    return Estimate(value, max(0.0, value - below), value + above, len(texts))


def _second_tokens_s(of_round: RoundHost) -> float:
    """What the tables say of the first draft step, for its tokens of each row beyond the first."""
    steps_s = sum(s.location_s for s in of_round.woken if s.key == DRAFT_STEP)
    return steps_s * (of_round.first_tokens - 1)


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
