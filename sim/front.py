"""Searches over batch sizes: what a row waits for a token against what all rows get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.errors import BadInput, require_count
from sim.objective import Objective, num_devices, tpot_s
from sim.policy import Policy
from sim.search import SearchResult, search
from sim.search_space import SearchSpace
from sim.simulate import Prediction
from sim.system import System
from sim.workload import Workload


@dataclass(frozen=True)
class Point:
    """What a batch size gets from the policy recommended for it."""

    batch_size: int
    prediction: Prediction[Policy]
    tpot_s: float  # of a row, counted until the last row of its batch ends
    throughput: float  # tokens/s of all rows of all targets
    num_devices: int

    @property
    def throughput_per_device(self) -> float:
        return self.throughput / self.num_devices

    def dominates(self, other: Point) -> bool:
        """No worse in both, better in one."""
        mine, others = (self.tpot_s, -self.throughput), (other.tpot_s, -other.throughput)
        return mine != others and mine[0] <= others[0] and mine[1] <= others[1]

    def merit(self, objective: Objective) -> float:
        if objective is Objective.TOKENS_PER_S:
            return 1 / self.tpot_s
        return self.throughput_per_device if objective is Objective.THROUGHPUT_PER_DEVICE else self.throughput

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "name": self.prediction.policy.name,
            "policy": self.prediction.policy.to_dict(),
            "ms_per_token": 1e3 * self.tpot_s,
            "tokens_per_s_per_sequence": 1 / self.tpot_s,
            "throughput": self.throughput,
            "throughput_per_device": self.throughput_per_device,
            "num_devices": self.num_devices,
        }


@dataclass(frozen=True)
class BatchSearch:
    """A search of every batch size. `refused` are sizes at which no policy can run or keeps the promise, with the
    reason."""

    found: dict[int, SearchResult]
    objective: Objective
    refused: dict[int, str]
    system: System

    def point(self, prediction: Prediction[Policy], batch_size: int) -> Point:
        """What a batch size gets from a policy."""
        throughput = prediction.tokens_per_s.value * self.system.placement.num_targets
        devices = num_devices(prediction.policy, self.system)
        return Point(batch_size, prediction, tpot_s(prediction, batch_size), throughput, devices)

    @property
    def points(self) -> tuple[Point, ...]:
        """Of every batch size that of the policy recommended for it."""
        return tuple(self.point(result.recommended, size) for size, result in self.found.items())

    @property
    def front(self) -> list[Point]:
        """The points that no other beats in both, from the quickest row on (Pareto)."""
        kept = [point for point in self.points if not any(other.dominates(point) for other in self.points)]
        return sorted(kept, key=lambda point: point.tpot_s)

    @property
    def chosen(self) -> Point:
        """The best by the objective; of equal ones the smallest batch."""
        return max(self.points, key=lambda point: (point.merit(self.objective), -point.batch_size))

    @property
    def result(self) -> SearchResult:
        """The search of the batch size chosen."""
        return self.found[self.chosen.batch_size]


def search_batch_sizes(
    space: SearchSpace,
    workload: Workload,
    system: System,
    batch_sizes: Sequence[int],
    *,
    engine_of: Callable[[Workload, System], str],
    objective: Objective = Objective.TOKENS_PER_S,
    **options: Any,
) -> BatchSearch:
    """`search` of every batch size, by the engine that `engine_of` names; `options` are those of `search`. Raises
    `BadInput`, that of the first size, where nothing can run at any of them."""
    found: dict[int, SearchResult] = {}
    refused: dict[int, str] = {}
    sizes = sorted({require_count("batch_sizes", size, 1) for size in batch_sizes})
    for size in sizes:
        together = replace(workload, batch_size=size)
        engine = engine_of(together, system)
        try:
            _check_size(size, system)
            found[size] = search(space, together, system, engine=engine, objective=objective, **options)
        except BadInput as error:
            refused[size] = str(error)
            if len(refused) == len(sizes):
                raise BadInput("batch_sizes", f"none can be served; {sizes[0]}: {refused[sizes[0]]}", sizes) from None
    return BatchSearch(found, Objective(objective), refused, system)


def _check_size(size: int, system: System) -> None:
    """A batch that no texts fill would be predicted with fewer rows than it says."""
    if size > system.agreement.num_prompts:
        rule = f"must not exceed the number of texts, {system.agreement.num_prompts} (of numbers their text.batch_size)"
        raise BadInput("batch size", rule, size)
