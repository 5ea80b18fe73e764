"""Figures of a served load: waiting, time to the first token, time per token, throughput, goodput.

Everything is measured in one window, from the arrival of the first request after the warm-up share to the arrival of
the last request: before it the system fills, after it the system drains. An event counts where it falls into the
window, times of a request where the event that completes them does (its first token, its end), and busy times and
numbers of requests by the time inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from sim.admission import ContinuousBatching, Dispatcher
from sim.decider import Decider
from sim.errors import BadInput
from sim.load import ClosedLoop, Load, OpenLoop, num_variants
from sim.metrics import Estimate
from sim.policy import Autoregressive, PolicyTable, Speculative, SpeculativeSpeculative
from sim.replications import rate_of
from sim.rows import Row
from sim.system import System
from sim.target import Target
from sim.timeline import Run, Stage
from sim.trace import Lane, Operation, Trace
from sim.workload import Workload

SKETCH_ERROR = 0.005  # relative, of a quantile
NUM_BATCHES = 30  # consecutive parts of the window, with equally many ended requests, that intervals are made from
SATURATION_MARGIN = 0.02  # at less than this below capacity no run is long enough to see a steady state
CAPACITY_ROUNDS = 20  # requests of the run that measures capacity, in multiples of those decoded at a time
MIN_CAPACITY_REQUESTS = 500
SATURATED = "saturated, no steady state"


class QuantileSketch:
    """Weighted quantiles of numbers >= 0 to a relative error of `SKETCH_ERROR`, in bins of equal width in logarithms.

    Quantile q is the smallest value with at least a share q of the weight at or below it. Numbers of any size take
    2,100 bins for each nine powers of ten that they spread over, however many there are.
    """

    _log_width = math.log((1 + SKETCH_ERROR) / (1 - SKETCH_ERROR))

    def __init__(self) -> None:
        self._weights: dict[int, int] = {}
        self._zeros = self._total = 0

    def add(self, value: float, weight: int = 1) -> None:
        """Count a value `weight` times."""
        self._total += weight
        if value <= 0:
            self._zeros += weight
            return
        index = math.ceil(math.log(value) / self._log_width)
        self._weights[index] = self._weights.get(index, 0) + weight

    def quantile(self, share: float) -> float:
        """Not a number where nothing was counted."""
        if not self._total:
            return math.nan
        wanted = share * self._total * (1 - 1e-12)  # not beyond a value for rounding's sake
        below = self._zeros
        if below >= wanted:
            return 0.0
        for index in sorted(self._weights):
            below += self._weights[index]
            if below >= wanted:
                break
        return (1 - SKETCH_ERROR) * math.exp(index * self._log_width)


@dataclass(frozen=True)
class Slo:
    """What a request is promised: the time to its first token, and the mean time of each further one."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise BadInput(f"slo.{name}", "must be > 0", getattr(self, name))

    def to_dict(self) -> dict[str, float | None]:
        """JSON-safe: no limit is None."""
        return {name: _finite(getattr(self, name)) for name in ("ttft_s", "tpot_s")}


@dataclass(slots=True)
class Totals:
    """Sums over the window so far."""

    seconds: float = 0.0
    tokens: int = 0
    ended: int = 0
    good: int = 0
    admitted: int = 0
    first_tokens: int = 0
    further_tokens: int = 0  # gaps between tokens
    long_enough: int = 0  # ended requests with more than one token
    wait_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    gap_s: float = 0.0
    waiting_s: float = 0.0  # number of requests that wait, over time
    in_system_s: float = 0.0
    rounds: int = 0
    rows: int = 0
    target_s: float = 0.0
    draft_s: float = 0.0
    row_rounds: int = 0  # of ended requests, as what follows
    decoded: int = 0
    lookups: int = 0
    hits: int = 0


class Tally:
    """Told of everything that happens to requests, in order of time; keeps sums over the window and sketches."""

    def __init__(self, num_requests: int, num_unmeasured: int, slo: Slo) -> None:
        """The first `num_unmeasured` of the requests are the warm-up."""
        self.first, self.last, self.slo = num_unmeasured, num_requests - 1, slo
        self.start_s = self.end_s = math.inf
        self.totals = Totals()
        self.snapshots = [Totals()]
        self.sketches = {name: QuantileSketch() for name in ("wait_s", "ttft_s", "tpot_s", "gap_s")}
        self._in_system = self._waiting = 0
        self._since_s = 0.0
        self._per_batch = max(1, (num_requests - num_unmeasured) // NUM_BATCHES)

    def _is_inside(self, now: float) -> bool:
        return self.start_s < now <= self.end_s

    def _overlap_s(self, start_s: float, end_s: float) -> float:
        return max(0.0, min(end_s, self.end_s) - max(start_s, self.start_s))

    def _advance(self, now: float) -> None:
        """Nothing has changed since the last call."""
        seconds = self._overlap_s(self._since_s, now)
        self.totals.seconds += seconds
        self.totals.in_system_s += self._in_system * seconds
        self.totals.waiting_s += self._waiting * seconds
        self._since_s = now

    def arrive(self, index: int, now: float) -> None:
        """Request number `index` waits."""
        self._advance(now)
        if index == self.first:
            self.start_s = now
        if index == self.last:
            self.end_s = now
        self._in_system += 1
        self._waiting += 1

    def admit(self, row: Row) -> None:
        """Its prefill begins."""
        self._advance(row.admitted_s)
        self._waiting -= 1
        if self._is_inside(row.admitted_s):
            self.totals.admitted += 1
            self._add("wait_s", row.admitted_s - row.arrival_s)

    def emit_first(self, row: Row, now: float) -> None:
        """Its first token is there."""
        if self._is_inside(now):
            self.totals.tokens += 1
            self.totals.first_tokens += 1
            self._add("ttft_s", now - row.arrival_s)

    def end_round(self, now: float, num_rows: int, num_tokens: int, gaps: list[tuple[float, int]]) -> None:
        """Rows have emitted tokens together; `gaps` are the times since their last ones, each with a number of rows."""
        if not self._is_inside(now):
            return
        totals = self.totals
        totals.tokens += num_tokens
        totals.further_tokens += num_tokens
        totals.rounds += 1
        totals.rows += num_rows
        for gap_s, weight in gaps:
            self._add("gap_s", gap_s, weight)
        if num_tokens > num_rows:
            self.sketches["gap_s"].add(0.0, num_tokens - num_rows)

    def end(self, row: Row) -> None:
        """Its last token is there."""
        self._advance(row.end_s)
        self._in_system -= 1
        if not self._is_inside(row.end_s):
            return
        totals = self.totals
        totals.ended += 1
        tpot_s = (row.end_s - row.first_token_s) / (row.length - 1) if row.length > 1 else 0.0
        if row.length > 1:
            totals.long_enough += 1
            self._add("tpot_s", tpot_s)
        is_good = row.first_token_s - row.arrival_s <= self.slo.ttft_s and tpot_s <= self.slo.tpot_s
        totals.good += is_good
        totals.row_rounds += row.num_rounds
        totals.decoded += row.length - 1
        totals.lookups += sum(row.lookups)
        totals.hits += sum(row.hits)
        if totals.ended % self._per_batch == 0:
            self.snapshots.append(replace(totals))

    def _add(self, name: str, value: float, weight: int = 1) -> None:
        self.sketches[name].add(value, weight)
        setattr(self.totals, name, getattr(self.totals, name) + weight * value)

    def meter(self, lane: Lane, start_s: float, duration_s: float) -> None:
        """A device of a lane was busy."""
        busy_s = self._overlap_s(start_s, start_s + duration_s)
        if lane is Lane.TARGET:
            self.totals.target_s += busy_s
        else:
            self.totals.draft_s += busy_s

    # ------------------------------------------------------------------------------------------------------- figures

    def ratio(self, numerator: str, denominator: str, scale: float = 1.0) -> Estimate | None:
        """Total over total in the window; the interval is that of batch means (ratio estimate, Student's t)."""
        above, below = (getattr(self.totals, name) for name in (numerator, denominator))
        if not below:
            return None
        batches = [[getattr(s, name) for s in self.snapshots] for name in (numerator, denominator)]
        steps = [[after - before for before, after in pairwise(batch)] for batch in batches]
        half_width = rate_of(*steps).half_width if len(steps[0]) > 1 and sum(steps[1]) else math.inf
        value = scale * above / below
        return Estimate(value, value - scale * half_width, value + scale * half_width, len(steps[0]))


class ServedRun(Run):
    """One policy under one load and seed."""

    def __init__(
        self,
        policy: Decider,
        load: Load,
        workload: Workload,
        system: System,
        seed: int,
        *,
        tally: Tally,
        record: bool = False,
    ) -> None:
        _check(policy, workload, system)
        stage = Stage(workload, system)
        variants = num_variants(stage.replay)
        super().__init__(
            policy, workload, system, seed, record=record, stage=stage, num_variants=variants, meter=tally.meter
        )
        self.load, self.seed, self.tally = load, seed, tally
        self.dispatcher = Dispatcher(self, self._rows(), load.num_requests or 0)
        for index in range(system.placement.num_targets):
            queue = ContinuousBatching(self, index, load.most_rows)
            self.dispatcher.queues.append(queue)
            self.targets.append(Target(self, index, queue))

    def _rows(self) -> Iterator[Row]:
        replay = self.stage.replay
        prompt_length, lengths = replay.prompt_length.tolist(), replay.lengths.tolist()
        for index, request in enumerate(self.load.requests(replay, self.seed)):
            cap = min(replay.cap, request.output_tokens or replay.cap)
            length = min(cap, lengths[request.prompt])
            yield Row(index, prompt_length[request.prompt], length, cap=cap, luck=request.luck)

    def run(self) -> None:
        """Serve every request; once."""
        if isinstance(self.load, OpenLoop):
            self.env.process(self.dispatcher.open_loop(self.load.arrival_times(self.seed)))
        else:
            for _ in range(self.load.concurrency):
                self.dispatcher.arrive()
        self._play()

    def finish(self, row: Row) -> None:
        super().finish(row)
        self.tally.end(row)
        self.dispatcher.end(row)


def _check(policy: Decider, workload: Workload, system: System) -> None:
    if workload.max_new_tokens < 1:
        raise BadInput("workload.max_new_tokens", "must be >= 1 where requests are served", workload.max_new_tokens)
    lanes = [Lane.TARGET, Lane.DRAFT] if draws_on_draft(policy) else [Lane.TARGET]
    for lane in lanes:
        if (lane, Operation.PREFILL) not in system.latency.operations:
            raise BadInput(f"latency of {lane.value} prefill", "must be profiled to serve requests as they arrive")


def draws_on_draft(policy: Decider) -> bool:
    """Whether a draft device is needed; a controller may ask for it."""
    if isinstance(policy, PolicyTable):
        return any(draws_on_draft(entry) for _, entry in policy.entries)
    if isinstance(policy, (Autoregressive, Speculative, SpeculativeSpeculative)):
        return policy.speculation_length > 0
    return True


# --------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Spread:
    """Mean with its interval, and quantiles to a relative error of `SKETCH_ERROR`."""

    mean: Estimate
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ServingReport:
    """Figures of one policy under one load; None where there is nothing to say.

    `start_s` and `end_s` are the window of every figure. Intervals of means are 95 % by batch means: `n` is the number
    of consecutive parts of the window, with equally many ended requests, behind them. `wait_s` is from arrival to the
    start of the prefill, `ttft_s` to the first token, `tpot_s` the mean time of the further tokens of a request,
    `gap_s` the time between tokens of a request that follow one another: those of one round come together.
    `batch_size` is the mean over rounds. Hit rate and acceptance length are those of requests that ended.

    A saturated load has no steady state: its queue grows as long as it lasts. Figures that grow with it are None, the
    others are those of a closed loop that keeps the batches as full as the load would in the end.
    """

    policy: dict[str, Any]
    name: str
    load: dict[str, Any]
    slo: Slo | None
    seed: int
    num_requests: int
    num_measured: int  # requests that ended in the window
    start_s: float
    end_s: float
    note: str | None
    offered_per_s: float | None  # open loop: requests
    capacity_per_s: float | None  # open loop: requests that are served where many wait at any time
    ttft_s: Spread | None
    wait_s: Spread | None
    tpot_s: Spread | None
    gap_s: Spread | None
    tokens_per_s: Estimate | None
    requests_per_s: Estimate | None
    num_devices: int
    tokens_per_s_per_device: float | None
    goodput_per_s: Estimate | None
    batch_size: Estimate | None
    num_waiting: Estimate | None
    num_in_system: Estimate | None
    target_utilisation: Estimate | None
    draft_utilisation: Estimate | None
    hit_rate: Estimate | None
    acceptance_length: Estimate | None
    doubt: float
    extrapolated: str | None = None  # which latency lies beyond the profiled range, if any

    @property
    def is_saturated(self) -> bool:
        return self.note == SATURATED

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def serve(
    policy: Decider,
    load: Load,
    workload: Workload,
    system: System,
    seed: int = 0,
    *,
    warm_up: float = 0.2,
    slo: Slo | None = None,
) -> ServingReport:
    """Figures of a policy under a load (SimPy). Requests are texts of the system's agreement under the rules of the
    workload, whose batch size plays no part.

    An open load is saturated if it offers more than what a closed loop of `max_batch_size` clients for each target is
    served with the same requests, less a margin of `SATURATION_MARGIN`. Raises `BadInput` if the prefill was not
    profiled, if memory has no room for a request, or if no time is left to measure.
    """
    report, extrapolated = system.answer(lambda of: _serve(policy, load, workload, of, seed, warm_up, slo))
    return replace(report, extrapolated=extrapolated)


def _serve(
    policy: Decider, load: Load, workload: Workload, system: System, seed: int, warm_up: float, slo: Slo | None
) -> ServingReport:
    if not isinstance(load, OpenLoop):
        return _report(_run(policy, load, workload, system, seed, warm_up, slo, record=False), load, slo)
    full = _full_run(policy, load, workload, system, seed, slo)
    capacity_per_s = _capacity_per_s(full)
    is_saturated = load.rate_per_s > (1 - SATURATION_MARGIN) * capacity_per_s
    run = full if is_saturated else _run(policy, load, workload, system, seed, warm_up, slo, record=False)
    return _report(run, load, slo, capacity_per_s, is_saturated=is_saturated)


def serve_trace(policy: Decider, load: Load, workload: Workload, system: System, seed: int = 0) -> Trace:
    """The trace of what `serve` measures: a sequence is a request, with its arrival and the start of its prefill."""
    run = _run(policy, load, workload, system, seed, 0.0, None, record=True)
    run.trace.meta = {"producer": "simulator", "engine": "des", "seed": seed, "identity": system.identity}
    run.trace.meta["load"] = load.to_dict()
    return run.trace


def capacity(policy: Decider, load: OpenLoop, workload: Workload, system: System, seed: int = 0) -> float:
    """Requests per second that are served where there are always as many as can be decoded together."""
    return _capacity_per_s(_full_run(policy, load, workload, system, seed, None))


def _full_run(
    policy: Decider, load: OpenLoop, workload: Workload, system: System, seed: int, slo: Slo | None
) -> ServedRun:
    clients = load.max_batch_size * system.placement.num_targets
    num_requests = max(CAPACITY_ROUNDS * clients, MIN_CAPACITY_REQUESTS)
    full = ClosedLoop(clients, num_requests, load.max_batch_size, load.shapes)
    return _run(policy, full, workload, system, seed, 0.2, slo, record=False)


def _capacity_per_s(full: ServedRun) -> float:
    return full.tally.totals.ended / full.tally.totals.seconds


def _run(
    policy: Decider,
    load: Load,
    workload: Workload,
    system: System,
    seed: int,
    warm_up: float,
    slo: Slo | None,
    *,
    record: bool,
) -> ServedRun:
    if not 0 <= warm_up < 1:
        raise BadInput("warm_up", "must be a share >= 0 and below 1", warm_up)
    num_requests = load.num_requests or 0
    tally = Tally(num_requests, int(warm_up * num_requests), slo or Slo())
    run = ServedRun(policy, load, workload, system, seed, tally=tally, record=record)
    run.run()
    if not record and not tally.totals.seconds:
        rule = "must leave time to measure between the first arrival after the warm-up and the last arrival"
        raise BadInput("load", f"{rule}: more requests, or a smaller warm-up")
    return run


def _report(
    run: ServedRun, load: Load, slo: Slo | None, capacity_per_s: float | None = None, *, is_saturated: bool = False
) -> ServingReport:
    tally, placement, is_steady = run.tally, run.system.placement, not is_saturated
    uses_draft = draws_on_draft(run.policy)
    num_devices = run.system.num_devices(uses_draft=uses_draft)
    tokens_per_s = tally.ratio("tokens", "seconds")
    return ServingReport(
        policy=run.policy.to_dict(),
        name=run.policy.name,
        load=load.to_dict(),
        slo=slo,
        seed=run.seed,
        num_requests=load.num_requests or 0,
        num_measured=tally.totals.ended,
        start_s=tally.start_s,
        end_s=tally.end_s,
        note=SATURATED if is_saturated else None,
        offered_per_s=load.rate_per_s if isinstance(load, OpenLoop) else None,
        capacity_per_s=capacity_per_s,
        ttft_s=_spread(tally, "ttft_s", "first_tokens") if is_steady else None,
        wait_s=_spread(tally, "wait_s", "admitted") if is_steady else None,
        tpot_s=_spread(tally, "tpot_s", "long_enough"),
        gap_s=_spread(tally, "gap_s", "further_tokens"),
        tokens_per_s=tokens_per_s,
        requests_per_s=tally.ratio("ended", "seconds"),
        num_devices=num_devices,
        tokens_per_s_per_device=tokens_per_s.value / num_devices if tokens_per_s else None,
        goodput_per_s=tally.ratio("good", "seconds") if slo and is_steady else None,
        batch_size=tally.ratio("rows", "rounds"),
        num_waiting=tally.ratio("waiting_s", "seconds") if is_steady else None,
        num_in_system=tally.ratio("in_system_s", "seconds") if is_steady else None,
        target_utilisation=tally.ratio("target_s", "seconds", 1 / placement.num_targets),
        draft_utilisation=tally.ratio("draft_s", "seconds", 1 / placement.num_draft_devices) if uses_draft else None,
        hit_rate=tally.ratio("hits", "lookups"),
        acceptance_length=tally.ratio("decoded", "row_rounds"),
        doubt=run.stage.doubt,
    )


def _spread(tally: Tally, name: str, number: str) -> Spread | None:
    mean, sketch = tally.ratio(name, number), tally.sketches[name]
    return Spread(mean, *map(sketch.quantile, (0.5, 0.9, 0.99))) if mean else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, (Estimate, Slo)):
        return value.to_dict()
    if isinstance(value, Spread):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value
