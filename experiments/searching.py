"""`saguaro search`: a question about policies, its answer, and the answer as JSON and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.planning import Plan, best_engine
from experiments.uncertainty import Uncertainty, uncertainty
from sim.errors import BadInput
from sim.front import BatchSearch, search_batch_sizes
from sim.goodput import GoodputResult, goodput_of_finalists
from sim.load import Load
from sim.objective import Objective
from sim.policy import Policy
from sim.search import SearchResult
from sim.search_space import SearchSpace
from sim.sensitivity import Sensitivity, sensitivity
from sim.serving import Slo
from sim.simulate import Prediction
from sim.ties import ERROR_RATE
from sim.win_map import WinMap, win_map
from sim.workers import Workers
from sim.workload import Workload

FOUND_HEAD = ("policy", "tokens/s", "of the first, %", "tie", "emitted / round", "hit rate, %")
FRONT_HEAD = ("rows", "policy", "ms per token", "tokens/s", "per device", "front")
SENSITIVITY_HEAD = ("if wrong", "by", "tokens/s", "then best", "lost, %", "changes")
FEW_ROWS = 8  # of a table of what-ifs


@dataclass(frozen=True)
class Question:
    """What is searched for, and how. `load` and `slo` with a time to the first token go with goodput only."""

    space: SearchSpace
    objective: Objective = Objective.TOKENS_PER_S
    batch_sizes: tuple[int, ...] = ()
    slo: Slo = Slo()  # noqa: RUF009  # a frozen value
    load: Load | None = None
    engine: str | None = None
    seed: int = 0
    num_draws: int = 0
    with_sensitivity: bool = False
    with_map: bool = False
    workers: Workers = Workers()  # noqa: RUF009

    def __post_init__(self) -> None:
        if (self.objective is Objective.GOODPUT) != (self.load is not None):
            raise BadInput("--objective goodput", "goes with a load, --rate or --concurrency, and a load with it")
        if self.objective is Objective.GOODPUT and len(self.batch_sizes) > 1:
            raise BadInput("--batch-sizes", "must be left out for goodput, whose batches are those of --max-batch")

    def sizes(self, workload: Workload) -> tuple[int, ...]:
        """The batch sizes to search; finalists of a load come from a search of its full batches."""
        if self.load is not None:
            return (self.load.most_rows,)
        return self.batch_sizes or (workload.batch_size,)


@dataclass(frozen=True)
class Answer:
    """What was found, and what else was asked."""

    batches: BatchSearch
    seconds: float
    goodput: GoodputResult | None
    moved: Uncertainty | None
    sensitivity: Sensitivity | None
    win_map: WinMap | None

    @property
    def found(self) -> SearchResult:
        """Of the batch size chosen."""
        return self.batches.result

    @property
    def recommended(self) -> Policy:
        """By goodput the finalist chosen under the load."""
        return self.goodput.recommended if self.goodput else self.found.recommended.policy

    def in_words(self) -> str:
        """The answer in a sentence."""
        if self.goodput:
            ties = len(self.goodput.ties)
            words = "the only one of the finalists" if ties == 1 else f"the simplest of {ties} finalists"
            return f"{self.recommended.name} serves most requests as promised, {words} without significant difference"
        sentence = self.found.in_words()
        if len(self.batches.points) > 1:
            sentence += f"; {self.found.batch_size} rows are the best by {self.batches.objective}"
        return sentence

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        """JSON-safe. `ranked`, `ties` and `infeasible` are those of the batch size chosen."""
        found = self.found
        chosen = next((p for p in found.ranked if p.policy == self.recommended), found.recommended)
        return {
            "num_policies": sum(result.num_policies for result in self.batches.found.values()),
            "num_combinations": found.num_combinations,
            "stopped": found.stopped,
            "seconds": self.seconds,
            "objective": found.objective.value,
            "batch_size": found.batch_size,
            "answer": self.in_words(),
            "recommended": chosen.to_dict(),
            "ties": [prediction.policy.name for prediction in found.ties],
            "comparisons": {"error_rate": ERROR_RATE, "number": len(found.ranked) - 1, "correction": "Bonferroni"},
            "front": [point.to_dict() for point in self.batches.front],
            "by_batch_size": [_of_batch_size(result) for result in self.batches.found.values()],
            "refused_batch_sizes": self.batches.refused,
            "ranked": [_row(prediction, found) for prediction in found.ranked],
            "infeasible": [{"name": policy.name, "reason": reason} for policy, reason in found.infeasible],
            "goodput": None if self.goodput is None else self.goodput.to_dict(),
            "assumptions": list(plan.assumptions),
            "uncertainty": None if self.moved is None else self.moved.to_dict(),
            "sensitivity": None if self.sensitivity is None else self.sensitivity.to_dict(),
            "map": None if self.win_map is None else self.win_map.to_dict(),
        }


def _row(prediction: Prediction[Policy], found: SearchResult) -> dict[str, Any]:
    is_confirmed = prediction.policy in found.confirmed or prediction.engine == "exact"
    contrast = found.contrasts[prediction.policy].to_dict()
    return prediction.to_dict() | {"beside_first": contrast, "confirmed": is_confirmed}


def _of_batch_size(found: SearchResult) -> dict[str, Any]:
    best = {p.policy.to_dict()["kind"]: p for p in reversed([found.recommended, *found.ranked])}
    return {
        "batch_size": found.batch_size,
        "recommended": found.recommended.policy.name,
        "num_ties": len(found.ties),
        "best": {kind: _name_and_rate(best[kind]) for kind in ("ar", "sd", "ssd") if kind in best},
    }


def _name_and_rate(prediction: Prediction[Policy]) -> dict[str, Any]:
    return {"name": prediction.policy.name, "tokens_per_s": prediction.tokens_per_s.to_dict()}


def parse_batch_sizes(text: str | None) -> tuple[int, ...]:
    """`1,2,4`. Raises `BadInput` on anything else."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BadInput("--batch-sizes", "must be integers >= 1 with commas between them", text)
    return tuple(dict.fromkeys(map(int, parts)))


def answer(question: Question, plan: Plan) -> Answer:
    """Search, and whatever else the question asks. Raises `BadInput` where nothing can be recommended."""
    start_s = time.perf_counter()
    workload, system, workers = plan.workload, plan.system, question.workers
    batches = search_batch_sizes(
        question.space,
        workload,
        system,
        question.sizes(workload),
        engine_of=lambda together, system: question.engine or best_engine(together, system),
        objective=question.objective,
        seed=question.seed,
        slo_tpot_s=math.inf if question.load else question.slo.tpot_s,
        workers=workers,
    )
    seconds = time.perf_counter() - start_s
    found, together = batches.result, _together(plan, batches)
    goodput = None
    if question.load is not None:
        goodput = goodput_of_finalists(
            found, question.load, question.slo, together, system, seed=question.seed, workers=workers
        )
    moved = None
    if plan.numbers is not None and plan.numbers.ranges and question.num_draws:
        others = [prediction for prediction in found.best_of_each_length() if prediction is not found.recommended]
        moved = uncertainty(plan.numbers, [found.recommended, *others], question.num_draws, question.seed)
    what_if = None
    if question.with_sensitivity:
        engine = question.engine or best_engine(together, system)
        what_if = sensitivity(found, together, system, engine=engine, seed=question.seed, workers=workers)
    around = win_map(question.space, together, system) if question.with_map else None
    return Answer(batches, seconds, goodput, moved, what_if, around)


def _together(plan: Plan, batches: BatchSearch) -> Workload:
    return replace(plan.workload, batch_size=batches.chosen.batch_size)


# --------------------------------------------------------------------------------------------------------------- tables


def found_rows(found: SearchResult) -> list[tuple[str, ...]]:
    """Cells under `FOUND_HEAD`: AR, and the best SD and SSD of every length, first ones first."""
    return [_found_row(prediction, found) for prediction in found.best_of_each_length()]


def _found_row(prediction: Prediction[Policy], found: SearchResult) -> tuple[str, ...]:
    contrast = found.contrasts[prediction.policy]
    rate = prediction.tokens_per_s
    length, hits = prediction.mean_acceptance_length, prediction.hit_rate
    mark = "recommended" if prediction is found.recommended else ("yes" if contrast.is_tie else "")
    return (
        prediction.policy.name,
        f"{rate:.1f}" if rate.n > 1 else f"{rate.value:.1f}",
        f"{100 * contrast.ratio:.1f}",
        mark,
        "-" if length is None else f"{length.value:.2f}",
        "-" if hits is None else f"{100 * hits.value:.1f}",
    )


def front_rows(batches: BatchSearch) -> list[tuple[str, ...]]:
    """Cells under `FRONT_HEAD`."""
    front = batches.front
    return [
        (
            str(point.batch_size),
            point.prediction.policy.name,
            f"{1e3 * point.tpot_s:.2f}",
            f"{point.throughput:.1f}",
            f"{point.throughput_per_device:.1f}",
            "yes" if point in front else "",
        )
        for point in batches.points
    ]


def sensitivity_rows(what_if: Sensitivity) -> list[Sequence[str]]:
    """Cells under `SENSITIVITY_HEAD`: the costliest, and whatever else changes the answer."""
    shown = [row for index, row in enumerate(what_if.rows) if index < FEW_ROWS or row.changes]
    return [
        (
            row.quantity,
            f"{100 * (row.factor - 1):+.0f} %",
            f"{row.tokens_per_s:.1f}",
            row.best.name,
            f"{100 * row.loss:.1f}",
            "yes" if row.changes else "",
        )
        for row in shown
    ]
