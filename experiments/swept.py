"""`saguaro sweep`: a file of numbers searched, or an experiment run, at every point of its sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from calibration.report import in_words as interval_in_words
from experiments.config import load_sweep
from experiments.numbers import numbers_of
from experiments.planning import Plan, best_engine, plan_from
from experiments.run import run_in, search_space
from experiments.strict_yaml import Document, read_yaml
from experiments.sweep import Point, in_words, points
from sim.errors import BadInput
from sim.objective import num_devices
from sim.search import KINDS, SearchResult, search
from sim.workers import HERE, Workers

SCHEMA = 1
FIGURES_HEAD = ("AR", "best SD", "best SSD", "SSD over AR", "over SD", "recommended")
PER_DEVICE_HEAD = ("a device", "with AR")  # tokens/s per device of the recommended policy and of AR
Say = Callable[[str], None]


@dataclass(frozen=True)
class Answered:
    """What was found at a point. `kinds` holds, of AR, the best SD and the best SSD, name, tokens/s of all rows of a
    target, and of numbers also tokens/s per device; nothing of a kind that cannot run there. `speedups` are those of
    SSD over the others."""

    point: Point
    kinds: Mapping[str, Mapping[str, Any]]
    speedups: Mapping[str, Mapping[str, Any]]
    recommended: str

    @property
    def recommended_kind(self) -> str:
        return next(kind for kind, found in self.kinds.items() if found["name"] == self.recommended)

    @property
    def gain(self) -> float | None:
        """Tokens/s of SSD over the better of AR and SD, less one; None where there is no SSD."""
        rates = {kind: found["tokens_per_s"]["value"] for kind, found in self.kinds.items()}
        ssd = rates.pop("ssd", None)
        return None if ssd is None else ssd / max(rates.values()) - 1

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "values": dict(self.point.values),
            "recommended": self.recommended,
            **{kind: self.kinds.get(kind) for kind in KINDS},
            "speedups": dict(self.speedups),
        }


@dataclass(frozen=True)
class Swept:
    """The answers at all points; those of experiments were measured, those of numbers predicted."""

    kind: Literal["search", "run"]
    answers: tuple[Answered, ...]

    @property
    def head(self) -> tuple[str, ...]:
        """Columns of `rows`; tokens/s are those of all rows of a target."""
        names = _short(list(self.answers[0].point.values))
        return (*names, *FIGURES_HEAD, *(PER_DEVICE_HEAD if self.kind == "search" else ()))

    def rows(self) -> list[tuple[str, ...]]:
        """Cells under `head`."""
        return [self._row(answer) for answer in self.answers]

    def _row(self, answer: Answered) -> tuple[str, ...]:
        figures = [_rate_in_words(answer.kinds.get(kind)) for kind in KINDS]
        speedups = [_ratio_in_words(answer.speedups.get(name)) for name in ("ssd_over_ar", "ssd_over_sd")]
        cells = (*map(in_words, answer.point.values.values()), *figures, *speedups, answer.recommended_kind.upper())
        if self.kind == "run":
            return cells
        per_device = [answer.kinds[kind]["tokens_per_s_per_device"] for kind in (answer.recommended_kind, "ar")]
        return (*cells, *(f"{rate:.1f}" for rate in per_device))

    def in_words(self) -> str:
        """The answer in a sentence."""
        chosen = [answer.recommended_kind for answer in self.answers]
        counts = ", ".join(f"{kind.upper()} at {chosen.count(kind)}" for kind in KINDS if kind in chosen)
        words = f"recommended of {len(chosen)} points: {counts}"
        gains = sorted(((a.gain, a.point.name) for a in self.answers if a.gain is not None), key=lambda gain: gain[0])
        if gains:
            (low, at_low), (high, at_high) = gains[0], gains[-1]
            words += f"; against the better of AR and SD, SSD makes {100 * low:+.1f} % of tokens/s ({at_low})"
            words += f" to {100 * high:+.1f} % ({at_high})" if len(gains) > 1 else ""
        return words

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        points_found = [answer.to_dict() for answer in self.answers]
        return {"schema": SCHEMA, "kind": self.kind, "points": points_found, "answer": self.in_words()}


def is_experiment(document: Document) -> bool:
    """Whether a file is run on a pair, or its numbers are searched."""
    return "pair" in document.data


# -------------------------------------------------------------------------------------------------------------- numbers


def search_points(
    path: Path, say: Say, *, settings: Sequence[str] = (), seed: int = 0, workers: Workers = HERE
) -> Swept:
    """Search a file of numbers at every point of its sweep, all with the same seed. `say` is told what is assumed, and
    the progress. Raises `BadInput` on a file that is wrong at any point, before the first search."""
    document = read_yaml(path).with_settings(settings)
    plans = [(point, plan_from(numbers_of(point.document))) for point in points(document)]
    for assumption in dict.fromkeys(line for _, plan in plans for line in plan.assumptions):
        say(f"assumed: {assumption}")
    answers = []
    for number, (point, plan) in enumerate(plans, 1):
        answers.append(_searched(point, plan, seed, workers))
        say(f"{number} of {len(plans)}: {point.name}: {answers[-1].recommended}")
    return Swept("search", tuple(answers))


def _searched(point: Point, plan: Plan, seed: int, workers: Workers) -> Answered:
    assert plan.search is not None
    space, engine = search_space(plan.search), best_engine(plan.workload, plan.system)
    try:
        found = search(space, plan.workload, plan.system, engine=engine, seed=seed, workers=workers)
    except BadInput as error:
        raise BadInput(point.name, f"nothing can be recommended; {error}") from None
    kinds = {kind: _best(kind, found, plan) for kind in KINDS if _has(kind, found)}
    rates = {kind: entry["tokens_per_s"]["value"] for kind, entry in kinds.items()}
    rivals = [kind for kind in ("ar", "sd") if {kind, "ssd"} <= kinds.keys()]
    speedups = {f"ssd_over_{kind}": {"value": rates["ssd"] / rates[kind]} for kind in rivals}
    return Answered(point, kinds, speedups, found.recommended.policy.name)


def _has(kind: str, found: SearchResult) -> bool:
    return any(isinstance(prediction.policy, KINDS[kind]) for prediction in found.ranked)


def _best(kind: str, found: SearchResult, plan: Plan) -> dict[str, Any]:
    best = found.best(kind)
    throughput = best.tokens_per_s.value * plan.system.placement.num_targets
    return {
        "name": best.policy.name,
        "policy": best.policy.to_dict(),
        "tokens_per_s": best.tokens_per_s.to_dict(),
        "tokens_per_s_per_device": throughput / num_devices(best.policy, plan.system),
        "hit_rate": None if best.hit_rate is None else best.hit_rate.value,
        "is_tie": found.contrasts[best.policy].is_tie,
    }


# ---------------------------------------------------------------------------------------------------------- experiments


def run_points(
    path: Path,
    out: Path | None,
    console: Console,
    *,
    reduced: bool = False,
    settings: Sequence[str] = (),
    seed: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    quiet: bool = False,
) -> Swept:
    """Run an experiment file at every point of its sweep, each in a folder of its own. Raises `BadInput` on a file that
    is wrong at any point, before the first run, and as a run does."""
    experiments = load_sweep(path, reduced=reduced, seed=seed, settings=settings)
    folder = out or Path("out") / experiments[0][1].name
    answers = []
    for number, (point, config) in enumerate(experiments, 1):
        if not quiet:
            console.print(f"{number} of {len(experiments)}: {point.name}", highlight=False, markup=False)
        place = folder / f"point-{number}"
        answers.append(
            _measured(point, run_in(place, config, console, overwrite=overwrite, resume=resume, quiet=quiet))
        )
    return Swept("run", tuple(answers))


def _measured(point: Point, summary: Mapping[str, Any]) -> Answered:
    kinds = {
        row["policy"]["kind"]: {
            "name": row["name"],
            "policy": row["policy"],
            "tokens_per_s": row["measured"]["tokens_per_s"],
            "predicted_tokens_per_s": row["predicted"]["tokens_per_s"]["value"],
            "hit_rate": None if row["measured"]["hit_rate"] is None else row["measured"]["hit_rate"]["value"],
            "lossless": summary["lossless"],
        }
        for row in summary["policies"]
    }
    speedups = {name: summary["speedups"][name] for name in ("ssd_over_ar", "ssd_over_sd")}
    return Answered(point, kinds, speedups, summary["recommended"])


# --------------------------------------------------------------------------------------------------------------- tables


def _short(keys: Sequence[str]) -> list[str]:
    """The last word of every full key, where it is the last of one only."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(word) > 1 else word for key, word in zip(keys, last, strict=True)]


def _rate_in_words(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    length = found["policy"].get("speculation_length")
    label = "" if length is None else f"K={length}: "
    if found["policy"]["kind"] == "ssd":
        label = f"K={length} {found['policy']['fallback']}: "
    return label + _with_interval(found["tokens_per_s"], ".1f")


def _ratio_in_words(ratio: Mapping[str, Any] | None) -> str:
    return "-" if ratio is None else _with_interval(ratio, ".2f")


def _with_interval(figure: Mapping[str, Any], spec: str) -> str:
    """With its interval, where it has one that is not a point."""
    low, high = figure.get("low"), figure.get("high")
    if low is None or high is None or low == high:
        return f"{figure['value']:{spec}}"
    return interval_in_words(figure, spec)
