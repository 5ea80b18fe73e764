"""`saguaro search`: a question about policies, its answer, and the answer as JSON and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console

from experiments.numbers import Numbers
from experiments.planning import Plan, best_engine
from experiments.stages import Stages
from experiments.uncertainty import SHARE_INSIDE, Uncertainty, uncertainty
from sim.errors import BadInput
from sim.front import BatchSearch, search_batch_sizes
from sim.goodput import GoodputResult, goodput_of_finalists
from sim.load import Load
from sim.metrics import Estimate
from sim.objective import Objective
from sim.policy import Policy
from sim.search import KINDS, SearchResult
from sim.search_space import SearchSpace
from sim.sensitivity import RELATIVE_ERROR, Sensitivity, sensitivity
from sim.serving import Slo
from sim.simulate import Prediction, predicted_speedup
from sim.ties import ERROR_RATE
from sim.win_map import WinMap, win_map
from sim.workers import Workers
from sim.workload import Workload

FOUND_HEAD = ("policy", "tokens/s", "of the first, %", "verdict", "emitted / round", "hit rate, %")
FRONT_HEAD = ("rows", "policy", "ms per token", "tokens/s", "per device", "front")
SENSITIVITY_HEAD = ("if wrong", "by", "tokens/s", "then best", "lost, %", "changes")
FEW_ROWS = 8  # of a table of what-ifs
WORTH_NAMING = 0.001  # share of the rate that a what-if costs


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

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; what the answer depends on."""
        return {
            "space": {field.name: list(getattr(self.space, field.name)) for field in fields(self.space)},
            "objective": self.objective.value,
            "batch_sizes": list(self.batch_sizes),
            "slo_ttft_s": _finite(self.slo.ttft_s),
            "slo_tpot_s": _finite(self.slo.tpot_s),
            "load": None if self.load is None else self.load.to_dict(),
            "engine": self.engine,
            "seed": self.seed,
            "num_draws": self.num_draws,
        }

    def sizes(self, workload: Workload) -> tuple[int, ...]:
        """The batch sizes to search; finalists of a load come from a search of its full batches."""
        if self.load is not None:
            return (self.load.most_rows,)
        return self.batch_sizes or (workload.batch_size,)


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


@dataclass(frozen=True)
class Answer:
    """What was found, and what else was asked."""

    batches: BatchSearch
    seconds: float
    goodput: GoodputResult | None
    moved: Uncertainty | None
    sensitivity: Sensitivity | None
    win_map: WinMap | None
    no_map: str = ""  # why there is none though it was asked for

    @property
    def found(self) -> SearchResult:
        """Of the batch size chosen."""
        return self.batches.result

    @property
    def recommended(self) -> Policy:
        """By goodput the finalist chosen under the load."""
        return self.goodput.recommended if self.goodput else self.found.recommended.policy

    def in_words(self) -> str:
        """The answer in a sentence, with its uncertainty."""
        return self._by_goodput(self.goodput) if self.goodput else self._by_rate()

    def _by_goodput(self, goodput: GoodputResult) -> str:
        ties = len(goodput.ties)
        words = "the only one of the finalists" if ties == 1 else f"the simplest of {ties} finalists"
        served = next(report.goodput_per_s for report in goodput.ranked if report.name == self.recommended.name)
        return (
            f"{self.recommended.name} serves most requests as promised, {words} without significant difference: "
            f"{_with_interval(served, '.2f')} per second"
        )

    def _by_rate(self) -> str:
        mine, found = self.found.recommended, self.found
        others = [found.best_if_any(kind) for kind in KINDS if not isinstance(mine.policy, KINDS[kind])]
        speedups = ", ".join(self._speedup(other) for other in others if other is not None)
        return f"{found.in_words()}: {_with_interval(mine.tokens_per_s, '.1f')} tokens/s{self._draws()}; {speedups}"

    def _draws(self) -> str:
        if self.moved is None:
            return ""
        low, high = self.moved.intervals[0]
        share = f"{100 * SHARE_INSIDE:.0f} % of {self.moved.num_draws} draws of what is only known to lie in a range"
        return f" ({low:.1f} to {high:.1f} in {share})"

    def _speedup(self, other: Prediction[Policy]) -> str:
        mine = self.found.recommended
        if self.moved is not None and other.policy in self.moved.policies:
            ratio = mine.tokens_per_s.value / other.tokens_per_s.value
            low, high = self.moved.ratio_interval(mine.policy, other.policy)
            return f"{ratio:.2f} ({low:.2f} to {high:.2f}) times {other.policy.name}"
        return f"{_with_interval(predicted_speedup(mine, other), '.2f')} times {other.policy.name}"

    def remarks(self) -> list[str]:
        """Sentences on what the answer hangs on, as far as that was asked."""
        said = []
        if len(self.batches.points) > 1:
            said.append(f"Batches of {self.found.batch_size} are the best by {self.batches.objective}")
        if self.moved is not None:
            said += [self.moved.in_words(), self.moved.ranges_in_words()]
        if self.sensitivity is not None:
            said.append(what_if_in_words(self.sensitivity))
        if self.win_map is not None:
            said.append(self.win_map.in_words())
        return said

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
            "remarks": self.remarks(),
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
            "no_map": self.no_map or None,
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


def answer(question: Question, plan: Plan, stages: Stages | None = None) -> Answer:
    """Search, and whatever else the question asks. Raises `BadInput` where nothing can be recommended."""
    stages = stages or Stages(Console(quiet=True))
    with stages.reported("search") as report:
        batches = _batches(question, plan, report)
    seconds = stages.durations_s["search"]
    found, together = batches.result, replace(plan.workload, batch_size=batches.chosen.batch_size)
    goodput = moved = what_if = around = None
    no_map = ""
    if question.load is not None:
        with stages.reported("serve the load") as report:
            goodput = goodput_of_finalists(
                found,
                question.load,
                question.slo,
                together,
                plan.system,
                seed=question.seed,
                workers=replace(question.workers, on_done=report),
            )
    if plan.numbers is not None and plan.numbers.ranges and question.num_draws:
        moved = _moved(question, plan.numbers, found, stages)
    if question.with_sensitivity:
        with stages.reported("what if a quantity is wrong") as report:
            what_if = sensitivity(
                found,
                together,
                plan.system,
                engine=question.engine or best_engine(together, plan.system),
                seed=question.seed,
                workers=replace(question.workers, on_done=report),
            )
    if question.with_map:
        try:
            around = win_map(question.space, together, plan.system)
        except BadInput as error:
            no_map = str(error)
    return Answer(batches, seconds, goodput, moved, what_if, around, no_map)


def _batches(question: Question, plan: Plan, report: Callable[[int, int], None]) -> BatchSearch:
    return search_batch_sizes(
        question.space,
        plan.workload,
        plan.system,
        question.sizes(plan.workload),
        engine_of=lambda together, system: question.engine or best_engine(together, system),
        objective=question.objective,
        seed=question.seed,
        slo_tpot_s=math.inf if question.load else question.slo.tpot_s,
        workers=replace(question.workers, on_done=report),
    )


def _moved(question: Question, numbers: Numbers, found: SearchResult, stages: Stages) -> Uncertainty:
    others = [prediction for prediction in found.best_of_each_length() if prediction is not found.recommended]
    stated, num = [found.recommended, *others], question.num_draws
    with stages.watched("draws of what is not known", num + len(numbers.ranges)) as watched:
        return uncertainty(numbers, stated, num, question.seed, watched)


# ---------------------------------------------------------------------------------------------------------- sentences


def _with_interval(estimate: Estimate | None, spec: str) -> str:
    """Where more than one text was predicted."""
    if estimate is None:
        return "none"
    return f"{estimate:{spec}}" if estimate.n > 1 and estimate.low < estimate.high else f"{estimate.value:{spec}}"


def what_if_in_words(what_if: Sensitivity) -> str:
    """Which measured quantity would change the choice, and at what cost."""
    changing = [row for row in what_if.rows if row.changes]
    costly = [row for row in changing if row.loss >= WORTH_NAMING][:FEW_ROWS]
    num = len({row.quantity for row in what_if.rows})
    percent, least = f"{100 * RELATIVE_ERROR:.0f} %", f"{100 * WORTH_NAMING:.1f} %"
    if not changing:
        return f"No quantity, of {num}, makes another policy the best if it is {percent} wrong"
    costs = [f"{row.quantity} {100 * (row.factor - 1):+.0f} % ({100 * row.loss:.1f} %)" for row in costly]
    others = len(changing) - len(costly)
    rest = [f"{others} changes lose less than {least if len(costly) < FEW_ROWS else 'these'}"] if others else []
    return (
        f"If one of {num} quantities is {percent} wrong, another policy may be the best (in brackets what the "
        f"recommended one then loses): {'; '.join([*costs, *rest])}"
    )


# --------------------------------------------------------------------------------------------------------------- tables


def found_table(answer: Answer) -> tuple[list[str], list[list[str]]]:
    """Head and cells: AR, and the best SD and SSD of every length, first ones first; where it was asked how far they
    move, the rates of the draws as well."""
    found, moved = answer.found, answer.moved
    if moved is None:
        return list(FOUND_HEAD), [_found_row(prediction, found) for prediction in found.best_of_each_length()]
    of_draws = {
        policy: [f"{low:.1f} to {high:.1f}", f"{100 * share:.0f}"]
        for policy, (low, high), share in zip(moved.policies, moved.intervals, moved.best_shares, strict=True)
    }
    rows = [_found_row(p, found) + of_draws.get(p.policy, ["-", "-"]) for p in found.best_of_each_length()]
    return [*FOUND_HEAD, f"in {100 * SHARE_INSIDE:.0f} % of draws", "best, % of draws"], rows


def _found_row(prediction: Prediction[Policy], found: SearchResult) -> list[str]:
    contrast = found.contrasts[prediction.policy]
    length, hits = prediction.mean_acceptance_length, prediction.hit_rate
    return [
        prediction.policy.name,
        _with_interval(prediction.tokens_per_s, ".1f"),
        f"{100 * contrast.ratio:.1f}",
        "recommended" if prediction is found.recommended else ("tie" if contrast.is_tie else ""),
        "-" if length is None else f"{length.value:.2f}",
        "-" if hits is None else f"{100 * hits.value:.1f}",
    ]


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


RANGES_HEAD = ("one range at a time", "tokens/s of the recommended", "then best", "lost, %", "why")


def ranges_rows(moved: Uncertainty) -> list[Sequence[str]]:
    """Cells under `RANGES_HEAD`."""
    return [
        (
            entry.range.in_words(),
            "{:.1f} .. {:.1f}".format(*entry.tokens_per_s),
            " .. ".join(dict.fromkeys(policy.name for policy in entry.best)),
            "{:.1f} .. {:.1f}".format(*(100 * lost for lost in entry.lost)),
            entry.range.because or "given",
        )
        for entry in moved.sensitivities
    ]
