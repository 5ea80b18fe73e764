"""The whole way: profile a pair, fit the simulator, choose policies, execute them, compare with the prediction."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from calibration.breakdown import figures_of_merit
from calibration.digest import digest, digest_of_inputs
from calibration.doubts import doubts_about
from calibration.fit import at_speed_of, fit
from calibration.hit_rates import hit_curves
from calibration.profile import (
    Profile,
    check_identity,
    check_prompts,
    check_workload,
    profile_manifest,
    prompt_hashes,
)
from calibration.report import (
    ACCEPTED_COUNTS,
    HIT_RATE_BY_FAN_OUT,
    PREDICTED_AGAINST_MEASURED,
    TIMELINE,
    WIN_MAP,
    report,
)
from calibration.side_by_side import SideBySide, lack_of_overlap, side_by_side
from calibration.slow_moments import usual_runs
from calibration.validate import Comparison, Losslessness, check_losslessness, compare, estimate_regret, summarize
from experiments.bench import Bench
from experiments.config import ExperimentConfig, SearchConfig
from experiments.ledger import AGREEMENT, JSON, LATENCY, NOWHERE, TRACE, Ledger
from experiments.measured_folder import fill
from experiments.measurement import (
    MEASURED,
    CompanionRuns,
    Execute,
    Warm,
    batches,
    draft_failure,
    measure_interleaved,
    turns,
    warm_up,
)
from experiments.planning import best_engine
from experiments.recorded_workload import recorded_workload
from experiments.sessions import Sessions
from experiments.short_runs import LATENCIES, SHORT_RUNS, ShortRuns, in_between, workload_of_short_runs
from experiments.stages import Stages
from sim.errors import BadInput, RunFailed
from sim.metrics import Estimate, overlap, speedup
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative, uniform_fan_out
from sim.search import SearchResult, search
from sim.search_space import SearchSpace
from sim.simulate import cross_check, predict_all, simulate
from sim.system import System
from sim.trace import Trace
from sim.win_map import win_map
from sim.workload import Workload

SCHEMA = 1
KINDS = ("ar", "sd", "ssd")
FEW_PROMPTS = 10  # with fewer, prompts differ too much for the intervals to be more than rough
Repeats = list[Trace]


def run_experiment(
    config: ExperimentConfig,
    bench: Bench,
    folder: Path,
    stages: Stages,
    *,
    earlier: Profile | None = None,
    ledger: Ledger = NOWHERE,
) -> dict[str, Any]:
    """Do everything that `config` asks for, write it into `folder` and return the summary.

    `earlier` is a profile to use instead of measuring one. Raises `BadInput` if it is of another pair, machine or
    workload, or if a test prompt is among its calibration prompts. What an earlier session left in the `ledger` is not
    done again; raises `BadInput` if it was of another experiment.
    """
    test = bench.workload("test", config.workload.test_prompts)
    calibration = bench.workload("calibration", config.workload.calibration_prompts)
    check_prompts(prompt_hashes(calibration), test)
    for policy in one_of_each_kind(config.search):
        bench.check_runs(policy, test)
    if earlier:
        check_identity(earlier.identity, bench.identity)
    ledger.same("inputs", inputs(config, bench, test, earlier))
    profile = earlier or measure_profile(config, bench, stages, ledger)
    check_workload(profile.manifest, test)
    with stages.stage("fit the simulator"):
        system = fit(profile)
    engine = best_engine(test, system)
    with stages.stage("search"):
        found = search(search_space(config.search), test, system, engine=engine, seed=config.seed)
    policies = {kind: found.best(kind).policy for kind in KINDS}
    ledger.same("policies", {kind: policy.to_dict() for kind, policy in policies.items()})
    companions = companion_runs(config, bench, policies.values(), ledger)
    measured = measure_policies(config, list(policies.values()), bench, test, companions, stages, ledger)
    sessions = Sessions.of(ledger, MEASURED, places(config, len(policies), test))
    with stages.stage("check the texts"):
        lossless = compare_texts(measured, list(policies.values()), bench, test, ledger)
    sound = sound_repeats(measured)
    with stages.stage("compare"):
        # The same profile at the speed that the machine had during the run.
        system_then = at_speed_of(system, usual_runs(companions.by_policy()))
        predictions = predict_all(list(policies.values()), test, system_then, engine=engine, seed=config.seed)
        comparisons = [
            compare(found.best(kind), prediction, traces)
            for kind, prediction, traces in zip(KINDS, predictions, sound, strict=True)
        ]
        summary = summarize_run(comparisons, found, sound, lossless)
        simulated = [simulate(policy, test, system_then, config.seed) for policy in policies.values()]
        details = explain_run(comparisons, found, sound, simulated, lossless)
        details["engines"] = cross_check_engines(list(policies.values()), test, system_then, engine, config.seed)
        company = side_by_side(profile.latency)
        best_ssd = found.best("ssd").policy
        details["hit_curves"] = hit_curves(profile.agreement, recorded_workload(profile.agreement), best_ssd, sound[-1])
        details |= map_around(config, test, system_then)
        details["side_by_side"] = None if company is None else company.to_dict()
        remarks = notes(config, bench.identity, overlap(sound[-1]), company)
        details["notes"] = [*doubts_about(profile.agreement), *failure_notes(measured), *sessions.notes(), *remarks]
    stages.console.print(agreement_of_engines(details["engines"]), highlight=False)
    manifest = run_manifest(config, bench.identity, test, profile, stages) | {"sessions": sessions.to_dict()}
    profile.write(folder / "profile")
    system.write(folder / "system.json")
    system_then.write(folder / "system_during_run.json")
    write_traces(folder / "traces", measured, simulated, companions.by_policy())
    write_results(folder, summary, details, manifest, sound[-1][0], simulated[-1])
    return summary


def run_in(
    out: Path,
    config: ExperimentConfig,
    console: Console,
    *,
    overwrite: bool,
    resume: bool,
    quiet: bool = False,
    earlier: Profile | None = None,
) -> dict[str, Any]:
    """The summary of the run in the folder `out`: measured now, or with `resume` as far as it is not finished there.
    Raises `BadInput` on a folder that may not be written into."""

    def work(folder: Path, bench: Bench, stages: Stages, ledger: Ledger) -> None:
        run_experiment(config, bench, folder, stages, earlier=earlier, ledger=ledger)

    fill(out, config, console, work, overwrite=overwrite, resume=resume, quiet=quiet)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def inputs(
    config: ExperimentConfig, bench: Bench, workload: Workload, earlier: Profile | None = None
) -> dict[str, Any]:
    """What must not change between the sessions of a run."""
    return {
        "version": version("saguaro-planner"),
        "settings": config.to_dict(),
        "identity": bench.identity,
        "prompts": digest(prompt_hashes(workload)),
        "profile": None if earlier is None else digest(earlier.manifest),
    }


def places(config: ExperimentConfig, num_policies: int, test: Workload) -> Iterator[tuple[int, int, int]]:
    """Repeat, batch and policy of every measured piece, in the order in which they are measured."""
    for repeat, batch in product(range(config.run.repeats), range(len(batches(test)))):
        yield from ((repeat, batch, number) for number in turns(num_policies, repeat, batch))


# ------------------------------------------------------------------------------------------------------------- profile


def measure_profile(config: ExperimentConfig, bench: Bench, stages: Stages, ledger: Ledger = NOWHERE) -> Profile:
    """Agreement record, latencies and a few short runs on calibration prompts."""
    calibration = bench.workload("calibration", config.workload.calibration_prompts)
    policies = trace_policies(config)
    before = dict(stages.durations_s)
    with stages.reported("profile: agreement of the models") as progress:
        measure = partial(bench.measure_agreement, calibration, progress)
        agreement = ledger.once("profile/agreement", AGREEMENT, measure)
    short_runs = ShortRuns(bench, policies, workload_of_short_runs(config, calibration), config.seed, ledger)
    with stages.reported(LATENCIES) as progress:
        measure_latency = partial(bench.measure_latency, in_between([short_runs], progress))
        latency = ledger.once("profile/latency", LATENCY, measure_latency)
        short_runs.up_to(1.0)
    stages.split(LATENCIES, SHORT_RUNS, short_runs.seconds)
    runs = short_runs.traces()
    durations_s = {name: s for name, s in stages.durations_s.items() if name not in before}
    settings = config.to_dict()
    manifest = ledger.once(
        "profile/manifest",
        JSON,
        lambda: profile_manifest(bench.identity, calibration, settings, durations_s, latency, len(runs)),
    )
    return Profile(agreement, tuple(latency), tuple(runs), manifest)


def profile_into(folder: Path, config: ExperimentConfig, bench: Bench, stages: Stages, ledger: Ledger) -> None:
    """Measure a profile and write it, as far as an earlier session has not left it in the `ledger`."""
    calibration = bench.workload("calibration", config.workload.calibration_prompts)
    ledger.same("inputs", inputs(config, bench, calibration))
    measure_profile(config, bench, stages, ledger).write(folder)


def trace_policies(config: ExperimentConfig, taken: Collection[int] = ()) -> list[Policy]:
    """AR, one SD, and SSD with each fallback: every kind of round whose host time the fit needs.

    Their speculation length is the middle one of the search, those `taken` left out where others remain.
    """
    lengths = sorted(config.search.speculation_lengths)
    lengths = [K for K in lengths if K not in taken] or lengths
    K = lengths[len(lengths) // 2]
    budget = sorted(config.search.budgets)[len(config.search.budgets) // 2]
    fan_out = uniform_fan_out(K, budget)
    return [
        Autoregressive(),
        Speculative(K),
        SpeculativeSpeculative(K, fan_out, fan_out, Fallback.DRAFT),
        SpeculativeSpeculative(K, fan_out, (min(budget, config.profile.num_candidates),), Fallback.NONE),
    ]


# ------------------------------------------------------------------------------------------------------------- measure


def one_of_each_kind(config: SearchConfig) -> list[Policy]:
    """An SSD policy for every combination of fallback, sampling and late-build rule that the search may recommend."""
    kinds = product(config.fallbacks, config.downweights, config.on_late_builds)
    return [
        SpeculativeSpeculative(1, (1, 1), (1,) if fallback is Fallback.NONE else (1, 1), fallback, downweight, late)
        for fallback, downweight, late in kinds
    ]


def search_space(config: SearchConfig) -> SearchSpace:
    return SearchSpace(
        config.speculation_lengths,
        config.budgets,
        config.fan_out_rules,
        config.fallbacks,
        config.downweights,
        config.on_late_builds,
    )


def companion_runs(
    config: ExperimentConfig, bench: Bench, measured: Iterable[Policy], ledger: Ledger = NOWHERE
) -> CompanionRuns:
    """Reference policies of another speculation length than the measured ones, on calibration prompts."""
    calibration = bench.workload("calibration", config.workload.calibration_prompts)
    taken = {policy.speculation_length for policy in measured}
    return CompanionRuns(_execute(config, bench), trace_policies(config, taken), calibration, config.seed, ledger)


def _execute(config: ExperimentConfig, bench: Bench) -> Execute:
    return partial(bench.execute, on_draft_failure=config.run.on_draft_failure)


def measure_policies(
    config: ExperimentConfig,
    policies: list[Policy],
    bench: Bench,
    test: Workload,
    companions: CompanionRuns,
    stages: Stages,
    ledger: Ledger = NOWHERE,
) -> list[Repeats]:
    """The repeats of every policy on the test prompts, with companions in between."""
    total = len(policies) * len(test.prompts) * config.run.repeats
    with stages.counted("execute AR, SD and SSD", total) as advance:
        return measure_interleaved(
            Warm(_execute(config, bench), partial(warm_up, _execute(config, bench), policies, test)),
            policies,
            test,
            repeats=config.run.repeats,
            seed=config.seed,
            on_sequence=advance,
            between=companions,
            ledger=ledger,
        )


def sound_repeats(measured: Sequence[Repeats]) -> list[Repeats]:
    """The repeats in which no policy lost its draft: only these tell how fast the policies are.

    Raises `RunFailed` if there is none.
    """
    whole = [draft_failure(trace) is None for trace in measured[0]]
    for repeats in measured[1:]:
        whole = [sound and draft_failure(trace) is None for sound, trace in zip(whole, repeats, strict=True)]
    if not any(whole):
        first = next(f for repeats in measured for f in map(draft_failure, repeats) if f)
        raise RunFailed(f"the draft failed in every repeat, nothing is left to compare: {first['message']}")
    return [[trace for sound, trace in zip(whole, repeats, strict=True) if sound] for repeats in measured]


def failure_notes(measured: Sequence[Repeats]) -> list[str]:
    """Where drafts failed, and what became of those runs."""
    return [
        f"in repeat {number} of the {kind.upper()} runs the draft failed in round {failure['round']} of prompt "
        f"{failure['sequence']} ({failure['message'].splitlines()[0]}). The target went on alone and lost no token; no "
        "policy's figures include that repeat."
        for kind, repeats in zip(KINDS, measured, strict=True)
        for number, failure in enumerate(map(draft_failure, repeats))
        if failure
    ]


def compare_texts(
    measured: Sequence[Repeats],
    policies: Sequence[Policy],
    bench: Bench,
    test: Workload,
    ledger: Ledger = NOWHERE,
) -> Losslessness | None:
    """Token ids of every policy and repeat, and of transformers' `generate`, against the first AR run.

    None where only the law of the text is equal.
    """
    if test.temperature > 0:
        return None
    names = [policy.name for policy in policies]

    def top2_gap(prompt: int, tokens: tuple[int, ...]) -> float:
        return bench.top2_gap(test.prompts[prompt] + tokens)

    generated = ledger.once("texts", TRACE, partial(bench.generate, test))
    others = dict(zip(names, measured, strict=True)) | {"transformers generate": [generated]}
    return check_losslessness(measured[0][0], others, top2_gap)


# ------------------------------------------------------------------------------------------------------------- compare


def summarize_run(
    comparisons: list[Comparison], found: SearchResult, measured: list[Repeats], lossless: Losslessness | None
) -> dict[str, Any]:
    names = [comparison.name for comparison in comparisons]
    recommended = found.recommended.policy.name
    return summarize(
        comparisons,
        recommended=recommended,
        regret=estimate_regret(measured, names.index(recommended)),
        lossless=lossless,
        speedups=speedups(measured),
    )


def speedups(measured: Sequence[Repeats]) -> dict[str, Estimate]:
    """Paired ratios of the measured tokens/s."""
    ar, sd, ssd = measured
    return {"sd_over_ar": speedup(sd, ar), "ssd_over_ar": speedup(ssd, ar), "ssd_over_sd": speedup(ssd, sd)}


def explain_run(
    comparisons: Sequence[Comparison],
    found: SearchResult,
    measured: Sequence[Repeats],
    simulated: Sequence[Trace],
    lossless: Losslessness | None,
) -> dict[str, Any]:
    """What the report shows beyond the summary (see `calibration.report.report`)."""
    return {
        "policies": {
            comparison.name: {"measured": figures_of_merit(real), "simulated": figures_of_merit([virtual])}
            for comparison, real, virtual in zip(comparisons, measured, simulated, strict=True)
        },
        "differences": [difference.to_dict() for difference in lossless.differences] if lossless else [],
        "num_policies": found.num_policies,
    }


def cross_check_engines(
    policies: Sequence[Policy], workload: Workload, system: System, engine: str, seed: int
) -> list[dict[str, str | float]]:
    checks = [cross_check(policy, workload, system, engine=engine, seed=seed) for policy in policies]
    return [
        {
            "name": check.policy.name,
            "engine": check.engine,
            "tokens_per_s": check.tokens_per_s,
            "des_tokens_per_s": check.des_tokens_per_s,
            "standard_error": check.standard_error,
            "relative_difference": check.relative_difference,
            "z": check.z,
        }
        for check in checks
    ]


def map_around(config: ExperimentConfig, workload: Workload, system: System) -> dict[str, Any]:
    """Where SSD wins near the system, or why that is not known."""
    try:
        around = win_map(search_space(config.search), workload, system)
    except BadInput as error:
        return {"map": None, "map_in_words": f"There is no map: {error}"}
    return {"map": around.to_dict(), "map_in_words": around.in_words()}


def agreement_of_engines(checks: Sequence[Mapping[str, Any]]) -> str:
    """The largest difference in one line."""
    worst = max(checks, key=lambda check: abs(check["relative_difference"]))
    return (
        f"the two engines differ by at most {100 * worst['relative_difference']:+.2f} % "
        f"({worst['z']:+.1f} standard errors; {worst['name']})"
    )


def notes(
    config: ExperimentConfig, identity: Mapping[str, Any], hidden: Estimate | None, company: SideBySide | None
) -> list[str]:
    """What a reader must know beside the answer. `hidden` is the overlap of the measured SSD runs."""
    remarks = []
    if identity["concurrency"] == "serial":
        remarks.append("draft and target took turns in one process: nothing overlapped, so SSD could not gain by it.")
    elif lack := lack_of_overlap(None if hidden is None else hidden.value, company):
        remarks.append(lack)
    if config.workload.test_prompts < FEW_PROMPTS:
        remarks.append(f"only {config.workload.test_prompts} test prompts: a check that all works, not a measurement.")
    return remarks


# --------------------------------------------------------------------------------------------------------------- write


def run_manifest(
    config: ExperimentConfig, identity: Mapping[str, Any], test: Workload, profile: Profile, stages: Stages
) -> dict[str, Any]:
    manifest = {
        "schema": SCHEMA,
        "record": "validation",
        "version": version("saguaro-planner"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": dict(identity),
        "workload": test.identity() | {"prompts": prompt_hashes(test)},
        "calibration": {"date": profile.manifest["date"], "prompts": profile.manifest["workload"]["prompts"]},
        "settings": config.to_dict(),
        "durations_s": stages.durations_s,
    }
    return manifest | {"digest": digest_of_inputs(manifest)}


def digest_in_words(manifest: Mapping[str, Any]) -> str:
    """For the terminal."""
    return f"digest {manifest['digest'][:16]} (seed {manifest['settings']['seed']}, settings, pair, prompts, version)"


def write_traces(
    folder: Path, measured: Sequence[Repeats], simulated: Sequence[Trace], companions: Sequence[Trace]
) -> None:
    """`measured/<kind>/<repeat>/`, `simulated/<kind>/` and `companions/<number>/`."""
    for number, trace in enumerate(companions):
        trace.write(folder / "companions" / str(number))
    for kind, repeats, virtual in zip(KINDS, measured, simulated, strict=True):
        virtual.write(folder / "simulated" / kind)
        for number, trace in enumerate(repeats):
            trace.write(folder / "measured" / kind / str(number))


def write_results(
    folder: Path,
    summary: Mapping[str, Any],
    details: Mapping[str, Any],
    manifest: Mapping[str, Any],
    measured: Trace,
    simulated: Trace,
) -> None:
    """Figures, the two reports and the three JSON files; the timeline shows the two traces given."""
    from experiments.figures import accepted_counts, hit_rate_by_fan_out, predicted_against_measured, timeline
    from experiments.figures import win_map as draw_map
    from experiments.html_report import html_report

    figures = folder / "figures"
    predicted_against_measured(summary, figures / f"{PREDICTED_AGAINST_MEASURED.name}.svg")
    accepted_counts(details["policies"], figures / f"{ACCEPTED_COUNTS.name}.svg")
    hit_rate_by_fan_out(details["hit_curves"], figures / f"{HIT_RATE_BY_FAN_OUT.name}.svg")
    timeline(measured, simulated, figures / f"{TIMELINE.name}.svg")
    if details["map"] is not None:
        draw_map(details["map"], figures / f"{WIN_MAP.name}.svg")
    (folder / "report.md").write_text(report(summary, details, manifest))
    (folder / "report.html").write_text(html_report(summary, details, manifest, figures))
    for name, content in (("summary", summary), ("details", details), ("manifest", manifest)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, allow_nan=False))
