"""What a run would do and how long it would take, without doing it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

import yaml

from experiments.config import ExperimentConfig, SearchConfig
from experiments.measurement import EXECUTE
from experiments.output import MANIFEST
from experiments.short_runs import LATENCIES, SHORT_RUNS
from experiments.strict_yaml import parse_yaml, validate
from sim.errors import BadInput


class Command(StrEnum):
    """What would be done."""

    PROFILE = "profile"
    RUN = "run"
    VALIDATE = "validate"


SAME = ("pair", "concurrency", "device", "draft_device", "dtype", "graphs")  # settings that make times comparable


@dataclass(frozen=True)
class Estimate:
    """Seconds of every stage, scaled from those of an earlier run of the pair. `source` is None if there is none; then
    only the latencies' time is known, which the settings give."""

    stages_s: Mapping[str, float]
    source: Path | None

    @property
    def total_s(self) -> float:
        return sum(self.stages_s.values())

    def in_words(self) -> str:
        if self.source is None:
            return (
                f"estimated time: more than {self.total_s:.0f} s, which the latencies take; "
                "no earlier run or profile of this pair was found that tells how long the rest takes"
            )
        return f"estimated time: {self.total_s:.0f} s, scaled from {self.source}"


def estimate(config: ExperimentConfig, folders: Iterable[Path], command: Command) -> Estimate:
    """From the first folder that holds a finished run or profile of the same pair and placement."""
    work = work_of(config, command)
    for folder in folders:
        earlier = _earlier(folder / MANIFEST)
        if earlier is None:
            continue
        settings, durations_s = earlier
        if all(getattr(settings, name) == getattr(config, name) for name in SAME) and work.keys() <= durations_s.keys():
            before = work_of(settings, command)
            return Estimate({name: durations_s[name] * work[name] / before[name] for name in work}, folder)
    return Estimate({LATENCIES: work[LATENCIES]}, None)


def work_of(config: ExperimentConfig, command: Command) -> dict[str, float]:
    """How much each stage has to do: seconds, steps of decoding, or 1 where the settings hardly matter."""
    if command is Command.VALIDATE:
        return _work_of_validation(config)
    rules, profile = config.workload, config.profile
    steps = rules.max_new_tokens / rules.batch_size
    stages = {
        "load the pair": 1.0,
        "profile: agreement of the models": rules.calibration_prompts * steps,
        LATENCIES: profile.latency_budget_s,
        SHORT_RUNS: profile.trace_prompts * steps,
    }
    if command is Command.PROFILE:
        return stages
    return stages | {
        "fit the simulator": 1.0,
        "search": _num_combinations(config.search) * rules.test_prompts * steps,
        "execute AR, SD and SSD": rules.test_prompts * config.run.repeats * steps,
        "check the texts": rules.test_prompts * steps,
        "compare": rules.test_prompts * steps,
    }


def _num_combinations(search: SearchConfig) -> int:
    grids = (search.speculation_lengths, search.budgets, search.fan_out_rules, search.fallbacks, search.downweights)
    return prod(len(grid) for grid in (*grids, search.on_late_builds))


def _work_of_validation(config: ExperimentConfig) -> dict[str, float]:
    """The stages of a validation; those that only compute take as long as they have configurations."""
    validation, rules, tokens = config.validation, config.workload, config.workload.max_new_tokens
    assert validation is not None
    sizes = {str(group.batch_size): 1 / group.batch_size for group in validation.configurations}
    stages = {"load the pair": 1.0, "profile: agreement of the models": float(rules.calibration_prompts * tokens)}
    stages[LATENCIES] = config.profile.latency_budget_s
    for size, share in sizes.items():
        stages[f"{SHORT_RUNS}, batches of {size}"] = config.profile.trace_prompts * tokens * share
    numbers = [_num_combinations(group) / group.batch_size for group in validation.configurations]
    measured = sum(numbers) * tokens * validation.repeats
    stages[EXECUTE] = measured * rules.test_prompts
    for size, share in sizes.items():
        stages[f"the best again on fresh prompts, batches of {size}"] = (
            validation.fresh_prompts * tokens * share * validation.repeats
        )
    computed = ("fit and forecast", "check the texts", "predict at the speed of the run")
    return stages | dict.fromkeys(computed, sum(numbers) * tokens * rules.test_prompts)


def _earlier(path: Path) -> tuple[ExperimentConfig, dict[str, float]] | None:
    """Settings and durations of a finished record; None of anything else, an older release's settings included."""
    try:
        manifest = json.loads(path.read_text())
        settings = validate(ExperimentConfig, parse_yaml(json.dumps(manifest["settings"]), str(path)))
        return settings, dict(manifest["durations_s"])
    except (OSError, ValueError, KeyError, TypeError, BadInput):
        return None


def resolved_yaml(config: ExperimentConfig) -> str:
    """A complete experiment file."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, default_flow_style=None, width=120)


def dry_run(config: ExperimentConfig, out: Path, earlier: Path | None, command: Command, *, as_json: bool) -> str:
    """The resolved settings and the time they take, as a YAML file with a comment or as JSON. Earlier records are
    looked for in `earlier`, in `out`, and beside it."""
    beside = sorted(out.parent.glob("*")) if out.parent.is_dir() else []
    folders = [*([earlier] if earlier else []), out, *beside]
    found = estimate(config, folders, command)
    if not as_json:
        return f"# {found.in_words()}\n{resolved_yaml(config)}"
    source = None if found.source is None else str(found.source)
    times: dict[str, Any] = {"estimated_s": found.total_s, "stages_s": dict(found.stages_s), "source": source}
    return json.dumps({"config": config.to_dict(), **times}, indent=1)
