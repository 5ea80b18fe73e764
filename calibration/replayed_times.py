"""How long measured rounds should have taken: their outcomes as they were, their times as a system has them.

What is left between that and the clock is the error of latencies, overlap and host times alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.metrics import batch_numbers
from sim.policy import Policy, SpeculativeSpeculative
from sim.round_times import SIDES, BatchTimes, Noise, Places, Visited
from sim.system import System
from sim.trace import Round, Source, Trace

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

NUM_REPLICATIONS = 32  # of the durations; a run of some hundred rounds averages each of them already


def replayed_seconds(trace: Trace, policy: Policy, system: System, seed: int = 0) -> dict[int, float]:
    """Expected decode time of each batch of a trace, by the number that `sim.metrics.batch_numbers` gives it.

    The rounds are the measured ones: their drafted and accepted counts, sources, rows and contexts. Raises `BadInput`
    if the trace is of another policy, and where the system does not cover a round.
    """
    if trace.policy != policy.to_dict():
        raise BadInput("trace.policy", f"must be {policy.name}", trace.policy)
    if not trace.rounds:
        return {}
    places, visited, batches = _visited(trace, policy)
    times = BatchTimes(policy, places, system.as_run_by(policy), float(trace.workload["temperature"]))
    rng = np.random.default_rng([seed, 0])
    shape = (visited.num_rounds, visited.num_batches)
    seconds = np.zeros(visited.num_batches)
    for _ in range(NUM_REPLICATIONS):
        noise = Noise(rng.random(shape), rng.random((times.num_draft_draws, *shape)))
        seconds += times.seconds(visited, noise) / NUM_REPLICATIONS
    return dict(zip(batches, seconds.tolist(), strict=True))


def _visited(trace: Trace, policy: Policy) -> tuple[Places, Visited, list[int]]:
    batch_of = batch_numbers([trace])
    batches = sorted({batch_of[r.sequence] for r in trace.rounds})
    rows: dict[int, list[int]] = {batch: [] for batch in batches}
    for sequence, batch in batch_of.items():
        if batch in rows:
            rows[batch].append(sequence)
    at = {s: (batches.index(batch), row) for batch, of_batch in rows.items() for row, s in enumerate(of_batch)}
    shape = (1 + max(r.index for r in trace.rounds), len(batches), max(map(len, rows.values())))
    numbers = np.zeros((shape[0] + 1, *shape[1:]), dtype=np.int64)
    for number, r in enumerate(trace.rounds, start=1):
        numbers[(r.index, *at[r.sequence])] = number
    is_live = numbers > 0
    return _places(trace, policy), Visited(numbers, is_live[:-1], is_live[1:]), batches


def _places(trace: Trace, policy: Policy) -> Places:
    """Every round is a place of its own; number 0 is no round."""
    is_ssd = isinstance(policy, SpeculativeSpeculative)
    of_miss, of_hit = SIDES if is_ssd else (Source.SYNCHRONOUS,) * len(SIDES)
    draftings = (policy.drafting(of_miss), policy.drafting(of_hit))
    prompt_length = {s.index: s.prompt_length for s in trace.sequences}
    cap = int(trace.workload["max_new_tokens"])
    sides = _sides(trace.rounds, is_ssd=is_ssd)
    branches = [
        # Beside the round that must be the last nothing is built.
        draftings[side].num_branches(r.num_drafted) if r.context - prompt_length[r.sequence] + 2 < cap else 0
        for r, side in zip(trace.rounds, sides, strict=True)
    ]

    def column(values: Sequence[int]) -> IntArray:
        return np.array([0, *values], dtype=np.int64)

    return Places(
        is_ssd=is_ssd,
        draftings=draftings,
        is_reachable=np.arange(1 + len(sides)) > 0,
        side=column(sides),
        context=column([r.context for r in trace.rounds]),
        num_drafted=column([r.num_drafted for r in trace.rounds]),
        num_branches=column(branches),
    )


def _sides(rounds: Sequence[Round], *, is_ssd: bool) -> list[int]:
    """1 of a round after a hit, or of SD after a full acceptance (see `sim.round_times`)."""
    if is_ssd:
        return [int(r.source is Source.HIT) for r in rounds]
    before: Mapping[tuple[int, int], Round] = {(r.sequence, r.index + 1): r for r in rounds}
    previous = (before.get((r.sequence, r.index)) for r in rounds)
    return [int(p is not None and 0 < p.num_drafted == p.num_accepted) for p in previous]
