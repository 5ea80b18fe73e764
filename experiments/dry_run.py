"""What a run would do and how long it would take, without doing it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.config import ExperimentConfig
from experiments.output import MANIFEST
from experiments.short_runs import LATENCIES, SHORT_RUNS
from experiments.strict_yaml import parse_yaml, validate
from sim.errors import BadInput

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


def estimate(config: ExperimentConfig, folders: Iterable[Path], *, only_profile: bool) -> Estimate:
    """From the first folder that holds a finished run or profile of the same pair and placement."""
    work = work_of(config, only_profile=only_profile)
    for folder in folders:
        earlier = _earlier(folder / MANIFEST)
        if earlier is None:
            continue
        settings, durations_s = earlier
        if all(getattr(settings, name) == getattr(config, name) for name in SAME) and work.keys() <= durations_s.keys():
            before = work_of(settings, only_profile=only_profile)
            return Estimate({name: durations_s[name] * work[name] / before[name] for name in work}, folder)
    return Estimate({LATENCIES: work[LATENCIES]}, None)


def work_of(config: ExperimentConfig, *, only_profile: bool) -> dict[str, float]:
    """How much each stage has to do: seconds, steps of decoding, or 1 where the settings hardly matter."""
    rules, profile = config.workload, config.profile
    steps = rules.max_new_tokens / rules.batch_size
    stages = {
        "load the pair": 1.0,
        "profile: agreement of the models": rules.calibration_prompts * steps,
        LATENCIES: profile.latency_budget_s,
        SHORT_RUNS: profile.trace_prompts * steps,
    }
    if only_profile:
        return stages
    search = config.search
    grids = (search.speculation_lengths, search.budgets, search.fan_out_rules, search.fallbacks, search.downweights)
    num_policies = 1.0
    for grid in (*grids, search.on_late_builds):
        num_policies *= len(grid)
    return stages | {
        "fit the simulator": 1.0,
        "search": num_policies * rules.test_prompts * steps,
        "execute AR, SD and SSD": rules.test_prompts * config.run.repeats * steps,
        "check the texts": rules.test_prompts * steps,
        "compare": rules.test_prompts * steps,
    }


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


def dry_run(config: ExperimentConfig, out: Path, earlier: Path | None, *, only_profile: bool, as_json: bool) -> str:
    """The resolved settings and the time they take, as a YAML file with a comment or as JSON. Earlier records are
    looked for in `earlier`, in `out`, and beside it."""
    beside = sorted(out.parent.glob("*")) if out.parent.is_dir() else []
    folders = [*([earlier] if earlier else []), out, *beside]
    found = estimate(config, folders, only_profile=only_profile)
    if not as_json:
        return f"# {found.in_words()}\n{resolved_yaml(config)}"
    source = None if found.source is None else str(found.source)
    times: dict[str, Any] = {"estimated_s": found.total_s, "stages_s": dict(found.stages_s), "source": source}
    return json.dumps({"config": config.to_dict(), **times}, indent=1)
