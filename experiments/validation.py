"""`saguaro validate`: profile a pair, predict many configurations, run every one of them, and set both side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from calibration.digest import digest
from calibration.fit import at_speed_of, fit
from calibration.profile import Profile, check_identity, check_prompts, check_workload, profile_manifest, prompt_hashes
from calibration.slow_moments import usual_runs
from calibration.summaries import parametric
from calibration.validate import Losslessness, check_losslessness, estimate_regret, interval
from calibration.validation import SCHEMA, Result, Totals, Validation, missed, predicted_totals
from calibration.validation_report import (
    ERRORS,
    PREDICTED_MEASURED,
    in_a_sentence,
    notes_of,
    sections,
    table_of_rows,
    title,
    validation_report,
)
from calibration.validation_report import answer as result_in_words
from experiments.bench import Bench
from experiments.config import ExperimentConfig, ValidationConfig
from experiments.ledger import AGREEMENT, JSON, LATENCY, NOWHERE, Ledger, piece_name
from experiments.measurement import EXECUTE, CompanionRuns, Warm, join, measure_interleaved, warm_up
from experiments.planning import best_engine
from experiments.run import (
    inputs,
    one_of_each_kind,
    run_manifest,
    search_space,
    trace_policies,
)
from experiments.sessions import Sessions
from experiments.short_runs import LATENCIES, SHORT_RUNS, ShortRuns, in_between, workload_of_short_runs
from experiments.stages import Stages
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.metrics import Estimate, decode_totals, speedup
from sim.parametric import ParametricAgreement
from sim.policy import Autoregressive, Policy, Proposer, SpeculativeSpeculative, policy_from_dict
from sim.search_space import candidates
from sim.simulate import Prediction, predict, predicted_speedup
from sim.system import HostTerm, System
from sim.trace import Lane, Source, Trace
from sim.workload import Workload

RELATIVE_HALF_WIDTH = 0.005  # to which sampled predictions are known: little beside the errors looked for
NUM_RIVALS = 3  # of a batch size: the fastest measured, which are measured again beside the recommended policy
ABLATIONS = ("without contention", "without host time", "means instead of distributions", "independent rounds")


@dataclass(frozen=True)
class Configuration:
    """A policy, and how many prompts are decoded together."""

    batch_size: int
    policy: Policy

    @property
    def name(self) -> str:
        return f"{self.policy.name}, batches of {self.batch_size}" if self.batch_size > 1 else self.policy.name


def run_validation(
    config: ExperimentConfig,
    bench: Bench,
    folder: Path,
    stages: Stages,
    earlier: Mapping[int, Profile] | None = None,
    ledger: Ledger = NOWHERE,
) -> dict[str, Any]:
    """Do everything that the `validation` section of `config` asks for, write it into `folder`, return the content of
    validation.json. `config`, and the bench, are of the largest batch size.

    `earlier` are profiles by batch size to use instead of measuring them. What an earlier session left in the `ledger`
    is not done again; raises `BadInput` if it was of another experiment.
    """
    settings = _settings(config)
    test, fresh = test_workloads(config, bench, settings)
    check_before_measuring(config, bench, settings, test, fresh, earlier)
    manifests = {str(size): profile.manifest for size, profile in (earlier or {}).items()}
    ledger.same("inputs", inputs(config, bench, test) | {"profiles": digest(manifests)})
    profiles = earlier or measure_profiles(config, bench, stages, settings.batch_sizes, ledger)
    for batch_size in settings.batch_sizes:
        check_profile(profiles, batch_size, bench, test, fresh)
    with stages.stage("fit and forecast"):
        systems = {size: fit(profiles[size]) for size in settings.batch_sizes}
        configurations = configurations_of(settings, systems[settings.batch_sizes[0]])
        forecasts = predictions(configurations, test, systems, config.seed)
    stages.console.print(expected_duration(configurations, forecasts, profiles, test, settings), highlight=False)
    ledger.same("configurations", {c.name: c.policy.to_dict() for c in configurations})
    companions = companions_of(config, bench, configurations, settings, ledger)
    traces = measure(bench, configurations, test, companions, stages, settings.repeats, config.seed, ledger=ledger)
    with stages.stage("check the texts"):
        lossless = compare_texts(configurations, traces, bench, test)
    with stages.stage("predict at the speed of the run"):
        systems_then = at_speed_of_run(systems, companions)
        predicted = predictions(configurations, test, systems_then, config.seed)
        block = max(settings.batch_sizes)
        of_size = {size: (systems[size], systems_then[size]) for size in systems}
        validation = Validation(
            [
                Result.of(c.batch_size, block, forecast, prediction, repeats, of_size[c.batch_size])
                for c, forecast, prediction, repeats in zip(configurations, forecasts, predicted, traces, strict=True)
            ]
        )
        ablations = ablate(configurations, validation, test, systems_then, config.seed)
    regrets = measure_regrets(config, bench, configurations, forecasts, validation, fresh, stages, ledger)
    answer = summarize(config, settings, validation, ablations, regrets, lossless, configurations, forecasts, traces)
    answer["profile"] = cost_of_profile(profiles, forecasts)
    sessions = sessions_of(ledger, configurations, test, settings.repeats)
    answer["notes"] = sessions.notes()
    manifest = run_manifest(config, bench.identity, test, next(iter(profiles.values())), stages)
    manifest["sessions"] = sessions.to_dict()
    write(folder, profiles, (systems, systems_then), traces, companions, answer, manifest)
    return answer


def _settings(config: ExperimentConfig) -> ValidationConfig:
    if config.validation is None:
        raise BadInput("validation", "this section is missing; it lists the configurations to measure")
    return config.validation


def for_largest_batch(config: ExperimentConfig) -> ExperimentConfig:
    """The same experiment with the batch size that the latency grid must reach. Raises `BadInput` if there is nothing
    to validate."""
    return config.with_batch_size(max(_settings(config).batch_sizes))


def test_workloads(config: ExperimentConfig, bench: Bench, settings: ValidationConfig) -> tuple[Workload, Workload]:
    """Those that every configuration decodes, and the fresh ones."""
    num = config.workload.test_prompts
    whole = bench.workload("test", num + settings.fresh_prompts)
    return whole.select(range(num)), whole.select(range(num, len(whole.prompts)))


# ------------------------------------------------------------------------------------------------------------- profile


def measure_profiles(
    config: ExperimentConfig, bench: Bench, stages: Stages, batch_sizes: Sequence[int], ledger: Ledger = NOWHERE
) -> dict[int, Profile]:
    """One per batch size: short runs of its own, the agreement record and the latencies of all sizes shared."""
    calibration = bench.workload("calibration", config.workload.calibration_prompts)
    policies = trace_policies(config)
    before = dict(stages.durations_s)
    with stages.reported("profile: agreement of the models") as progress:
        measured = partial(bench.measure_agreement, calibration, progress)
        agreement = ledger.once("profile/agreement", AGREEMENT, measured)
    short_runs = {
        size: ShortRuns(
            bench,
            policies,
            workload_of_short_runs(config, replace(calibration, batch_size=size)),
            config.seed,
            ledger.within(f"batch-{size}"),
        )
        for size in batch_sizes
    }
    with stages.reported(LATENCIES) as progress:
        measure_latency = partial(bench.measure_latency, in_between(list(short_runs.values()), progress))
        samples = ledger.once("profile/latency", LATENCY, measure_latency)
        latency = tuple(samples)
        for runs in short_runs.values():
            runs.up_to(1.0)
    for size, runs in short_runs.items():
        stages.split(LATENCIES, f"{SHORT_RUNS}, batches of {size}", runs.seconds)
    durations_s = {name: s for name, s in stages.durations_s.items() if name not in before}
    profiles = {}
    for size in batch_sizes:
        workload, own = replace(calibration, batch_size=size), short_runs[size].traces()
        made = partial(profile_manifest, bench.identity, workload, config.to_dict(), durations_s, latency, len(own))
        manifest = ledger.once(f"profile/manifest-{size}", JSON, made)
        profiles[size] = Profile(agreement, latency, tuple(own), manifest)
    return profiles


def check_profile(
    profiles: Mapping[int, Profile], batch_size: int, bench: Bench, test: Workload, fresh: Workload
) -> None:
    """Raises `BadInput` unless there is a profile of the batch size that may speak about these prompts here."""
    if batch_size not in profiles:
        raise BadInput("profile", f"must hold batches of {batch_size}; it has", sorted(profiles))
    check_identity(profiles[batch_size].identity, bench.identity)
    for workload in (test, fresh):
        check_workload(profiles[batch_size].manifest, replace(workload, batch_size=batch_size))


def read_profiles(folder: Path) -> dict[int, Profile]:
    """Inverse of what `write` stores."""
    found = {int(path.name.removeprefix("batch-")): Profile.read(path) for path in sorted(folder.glob("batch-*"))}
    if not found:
        raise BadInput(str(folder), "must hold batch-1 and the like, as `saguaro validate` writes them")
    return found


# ------------------------------------------------------------------------------------------------------ configurations


def check_before_measuring(
    config: ExperimentConfig,
    bench: Bench,
    settings: ValidationConfig,
    test: Workload,
    fresh: Workload,
    earlier: Mapping[int, Profile] | None,
) -> None:
    """Raises `BadInput` for what would be refused after the profile in any case: prompts that are not held out,
    policies that do not run, policies that are not held out."""
    calibration = prompt_hashes(bench.workload("calibration", config.workload.calibration_prompts))
    for prompts in (test, fresh):
        check_prompts(calibration, prompts)
    check_prompts(prompt_hashes(test), fresh)
    for group in settings.configurations:
        for policy in one_of_each_kind(group):
            bench.check_runs(policy, test)
    if earlier is None:
        check_held_out(settings, trace_policies(config))
    else:
        traces = (trace for profile in earlier.values() for trace in profile.traces)
        check_held_out(settings, [policy_from_dict(trace.policy) for trace in traces])


def check_held_out(settings: ValidationConfig, seen: Iterable[Policy]) -> None:
    """Raises `BadInput` if a configuration has a speculation length of the profile's short runs, which the fit sees: SD
    of this length would be one of them. Only AR, which has no setting, may be in both."""
    lengths = {policy.speculation_length for policy in seen} - {0}
    for number, group in enumerate(settings.configurations):
        shared = lengths.intersection(group.speculation_lengths)
        if shared:
            rule = "must not be validated on: the profile's short runs, which the fit sees, decode by it"
            raise BadInput(f"validation.configurations.{number}.speculation_lengths", rule, min(shared))


def configurations_of(settings: ValidationConfig, system: System) -> list[Configuration]:
    """Distinct ones in the order of the file, AR and SD of each batch size first."""
    found: dict[Configuration, None] = {}
    for size in settings.batch_sizes:
        groups = [group for group in settings.configurations if group.batch_size == size]
        of_size = [policy for group in groups for policy in candidates(search_space(group), system.agreement)]
        kinds = sorted(of_size, key=lambda policy: isinstance(policy, SpeculativeSpeculative))
        found |= dict.fromkeys(Configuration(size, policy) for policy in kinds)
    return list(found)


def expected_duration(
    configurations: Sequence[Configuration],
    forecasts: Sequence[Prediction[Policy]],
    profiles: Mapping[int, Profile],
    test: Workload,
    settings: ValidationConfig,
) -> str:
    """How long the measurement should take, runs of reference policies left out."""
    prefill_s = {size: _prefill_s(profile.traces) for size, profile in profiles.items()}
    of_prompt_s = [
        forecast.expectation.num_tokens.mean() / forecast.tokens_per_s.value + prefill_s[c.batch_size]
        for c, forecast in zip(configurations, forecasts, strict=True)
    ]
    total_s = sum(of_prompt_s) * len(test.prompts) * settings.repeats
    counts = f"{len(configurations)} configurations x {len(test.prompts)} prompts x {settings.repeats} repeats"
    return f"{counts}: about {total_s:.0f} s"


def _prefill_s(traces: Iterable[Trace]) -> float:
    """Mean over prompts; those of a batch share theirs."""
    times = [
        (s.decode_start_s - s.prefill_start_s) / trace.workload["batch_size"]
        for trace in traces
        for s in trace.sequences
    ]
    return sum(times) / len(times)


def predictions(
    configurations: Iterable[Configuration], test: Workload, systems: Mapping[int, System], seed: int
) -> list[Prediction[Policy]]:
    predicted = []
    for c in configurations:
        workload, system = replace(test, batch_size=c.batch_size), systems[c.batch_size]
        engine = best_engine(workload, system)
        predicted.append(
            predict(c.policy, workload, system, engine=engine, seed=seed, relative_half_width=RELATIVE_HALF_WIDTH)
        )
    return predicted


# ------------------------------------------------------------------------------------------------------------- measure


def companions_of(
    config: ExperimentConfig,
    bench: Bench,
    configurations: Sequence[Configuration],
    settings: ValidationConfig,
    ledger: Ledger = NOWHERE,
) -> dict[int, CompanionRuns]:
    """Reference policies on calibration prompts, by batch size."""
    calibration = bench.workload("calibration", config.workload.calibration_prompts)
    taken = {configuration.policy.speculation_length for configuration in configurations}
    policies = trace_policies(config, taken)
    return {
        size: CompanionRuns(
            bench.execute, policies, replace(calibration, batch_size=size), config.seed, ledger.within(f"batch-{size}")
        )
        for size in settings.batch_sizes
    }


def measure(
    bench: Bench,
    configurations: Sequence[Configuration],
    workload: Workload,
    companions: Mapping[int, CompanionRuns],
    stages: Stages,
    repeats: int,
    seed: int,
    name: str = EXECUTE,
    ledger: Ledger = NOWHERE,
) -> list[list[Trace]]:
    """The repeats of every configuration. A block of prompts goes through all configurations of all batch sizes before
    the next one, in an order that rotates, so that drift of the machine meets all alike. What the `ledger` holds under
    `name` is not measured again."""
    block = max(c.batch_size for c in configurations)
    blocks = [workload.select(range(start, start + block)) for start in range(0, len(workload.prompts), block)]
    pieces: list[list[list[Trace]]] = [[[] for _ in range(repeats)] for _ in configurations]
    by_size: dict[int, list[int]] = {}
    for number, c in enumerate(configurations):
        by_size.setdefault(c.batch_size, []).append(number)
    with stages.counted(name, len(configurations) * len(workload.prompts) * repeats) as advance:
        execute = Warm(bench.execute, partial(_warm_up, bench, configurations, by_size, workload))
        for repeat in range(repeats):
            for index, of_block in enumerate(blocks):
                for size, numbers in by_size.items():
                    turn = (index + repeat * len(blocks)) % len(numbers)
                    rotated = numbers[turn:] + numbers[:turn]
                    measured = measure_interleaved(
                        execute,
                        [configurations[n].policy for n in rotated],
                        replace(of_block, batch_size=size),
                        repeats=1,
                        seed=seed + repeat,
                        on_sequence=advance,
                        between=partial(_run_companions, companions.get(size), size),
                        ledger=ledger.within(f"{name}/batch-{size}"),
                        name=f"{repeat}/{index}",
                    )
                    for n, (trace,) in zip(rotated, measured, strict=True):
                        pieces[n][repeat].append(trace)
    return [[join(parts) for parts in of_repeat] for of_repeat in pieces]


def _warm_up(
    bench: Bench, configurations: Sequence[Configuration], by_size: Mapping[int, Sequence[int]], workload: Workload
) -> None:
    for size, numbers in by_size.items():
        warm_up(bench.execute, [configurations[n].policy for n in numbers], replace(workload, batch_size=size))


def _run_companions(companions: CompanionRuns | None, times: int) -> None:
    """As often as there are prompts in a batch: batches are the fewer the larger they are, and reference policies of
    each size need as many runs for slow moments among them to be told."""
    for _ in range(times if companions else 0):
        assert companions is not None
        companions()


def at_speed_of_run(systems: Mapping[int, System], companions: Mapping[int, CompanionRuns]) -> dict[int, System]:
    """By batch size. What slow moments cost is shared by the reference policies of all batch sizes."""
    traces = {size: companions[size].by_policy() for size in systems}
    runs = iter(usual_runs([trace for own in traces.values() for trace in own]))
    return {size: at_speed_of(systems[size], [next(runs) for _ in own]) for size, own in traces.items()}


def compare_texts(
    configurations: Sequence[Configuration], traces: Sequence[Sequence[Trace]], bench: Bench, test: Workload
) -> Losslessness | None:
    """Greedy token ids of every configuration and repeat against those of the first AR run; None where only the law is
    equal."""
    if test.temperature > 0:
        return None
    first_ar = next(number for number, c in enumerate(configurations) if isinstance(c.policy, Autoregressive))
    others = {c.name: repeats for c, repeats in zip(configurations, traces, strict=True)}
    return check_losslessness(traces[first_ar][0], others, partial(_gap, bench, test))


def _gap(bench: Bench, test: Workload, prompt: int, tokens: tuple[int, ...]) -> float:
    return bench.top2_gap(test.prompts[prompt] + tokens)


# -------------------------------------------------------------------------------------------------------------- regret


@dataclass(frozen=True)
class Regret:
    """What the policy recommended for a batch size lost on fresh prompts against the best of its rivals."""

    batch_size: int
    recommended: Policy
    best: Policy
    lost: Estimate

    def to_dict(self) -> dict[str, Any]:
        names = {"recommended": self.recommended.name, "best_measured": self.best.name}
        return {"batch_size": self.batch_size, **names, "regret": interval(self.lost)}


def measure_regrets(
    config: ExperimentConfig,
    bench: Bench,
    configurations: Sequence[Configuration],
    forecasts: Sequence[Prediction[Policy]],
    validation: Validation,
    fresh: Workload,
    stages: Stages,
    ledger: Ledger = NOWHERE,
) -> list[Regret]:
    """By batch size: the best forecast and the fastest measured, both measured anew with fresh prompts and seeds, for
    the fastest of many was also the luckiest."""
    regrets = []
    for size in sorted({c.batch_size for c in configurations}):
        numbers = [n for n, c in enumerate(configurations) if c.batch_size == size]
        measured = {n: _rate(validation.results[n].measured) for n in numbers}
        recommended = max(numbers, key=lambda n: forecasts[n].tokens_per_s.value)
        rivals = sorted(numbers, key=lambda n: -measured[n])[:NUM_RIVALS]
        chosen = [recommended, *(n for n in rivals if n != recommended)]
        name = f"the best again on fresh prompts, batches of {size}"
        some = [configurations[n] for n in chosen]
        seed, repeats = config.seed + 1000, _settings(config).repeats
        traces = measure(bench, some, fresh, {}, stages, repeats, seed, name, ledger)
        lost = estimate_regret(traces, 0)
        rates = [sum(s.num_decoded for t in own for s in t.sequences) / _seconds(own) for own in traces]
        best = chosen[max(range(len(chosen)), key=rates.__getitem__)]
        regrets.append(Regret(size, configurations[recommended].policy, configurations[best].policy, lost))
    return regrets


def _rate(totals: Totals) -> float:
    return float(totals.tokens.sum() / totals.seconds.sum())


def _seconds(traces: Sequence[Trace]) -> float:
    return float(decode_totals(traces)[0][1].sum())


# ----------------------------------------------------------------------------------------------------------- ablations


def ablate(
    configurations: Sequence[Configuration],
    validation: Validation,
    test: Workload,
    systems: Mapping[int, System],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """The aggregates of predictions that leave a part of the model out, beside those of the whole for the same
    configurations. Rounds taken for independent do not tell how an n-gram, a filler or a down-weighted draft fares:
    those keep their whole prediction there and are counted."""
    whole = [result.predicted for result in validation.results]
    found: dict[str, dict[str, Any]] = {"nothing left out": validation.figures(whole)}
    for name in ABLATIONS:
        predicted, num_kept = [], 0
        for c, own in zip(configurations, whole, strict=True):
            system = _without(name, systems[c.batch_size], c.policy, test)
            if system is None:
                predicted.append(own)
                num_kept += 1
                continue
            rules = _rules(system, test)
            prediction = predictions([c], rules, {c.batch_size: system}, seed)[0]
            predicted.append(predicted_totals(prediction, validation.results[0].block))
        found[name] = validation.figures(predicted) | {"num_unchanged": num_kept}
    return found


def _rules(system: System, test: Workload) -> Workload:
    """Of texts of which only numbers are known, the length and the temperature."""
    if not isinstance(system.agreement, ParametricAgreement):
        return test
    return Workload("parametric", test.prompts, test.max_new_tokens, test.temperature)


def _without(name: str, system: System, policy: Policy, test: Workload) -> System | None:
    if name == "without contention":
        return replace(system, contention=dict.fromkeys(Lane, 1.0))
    if name == "without host time":
        return replace(system, host_s=dict.fromkeys(HostTerm, 0.0))
    if name == "means instead of distributions":
        return _with_means(system)
    drafts = [policy.drafting(source) for source in (Source.HIT, Source.MISS)]
    if any(d.num_drafted and (d.proposer is not Proposer.DRAFT_MODEL or d.downweight != 1) for d in drafts):
        return None
    if not isinstance(system.agreement, AgreementRecord):
        return None
    return replace(system, agreement=parametric(system.agreement, test, policy))


def _with_means(system: System) -> System:
    """Every operation always takes its mean time."""
    tables = {key: replace(table, residuals=(table.mean_residual,)) for key, table in system.latency.operations.items()}
    in_situ = {
        kind: {key: (sum(ratios) / len(ratios),) for key, ratios in rows.items()}
        for kind, rows in system.in_situ.items()
    }
    return replace(system, latency=replace(system.latency, operations=tables), in_situ=in_situ)


# ------------------------------------------------------------------------------------------------------------- summary


def summarize(
    config: ExperimentConfig,
    settings: ValidationConfig,
    validation: Validation,
    ablations: Mapping[str, Any],
    regrets: Sequence[Regret],
    lossless: Losslessness | None,
    configurations: Sequence[Configuration],
    forecasts: Sequence[Prediction[Policy]],
    traces: Sequence[Sequence[Trace]],
) -> dict[str, Any]:
    """The content of validation.json but for the profile's cost."""
    figures = validation.figures([result.predicted for result in validation.results])
    figures["regret"] = interval(max((regret.lost for regret in regrets), key=lambda lost: lost.value))
    figures["noise"] = interval(validation.noise)
    figures["noise_without_drift"] = interval(validation.noise_without_drift)
    figures["drift"] = interval(validation.drift)
    predicted = [result.predicted for result in validation.results]
    sizes = settings.batch_sizes
    return {
        "schema": SCHEMA,
        "name": config.name,
        **figures,
        "forecast": {
            **validation.figures([result.forecasted for result in validation.results]),
            "causes": validation.causes(validation.forecast_errors),
        },
        "causes": validation.causes(validation.errors),
        "ablations": dict(ablations),
        "regret_by_batch_size": [regret.to_dict() for regret in regrets],
        "rank_correlation_by_batch_size": {str(s): interval(validation.rank_correlation(predicted, s)) for s in sizes},
        "does_ssd_pay": [_ssd_pays(size, configurations, validation, traces) for size in sizes],
        "lossless": None if lossless is None else lossless.to_dict(),
        "tolerance": settings.tolerance.stated(),
        "missed": missed(figures, settings.tolerance.stated()),
        "rows": validation.rows(),
    }


def _ssd_pays(
    size: int, configurations: Sequence[Configuration], validation: Validation, traces: Sequence[Sequence[Trace]]
) -> dict[str, Any]:
    """The best SSD over the best of AR and SD, by the forecast, by the prediction at the speed of the run, and as each
    pair was measured."""
    numbers = [n for n, c in enumerate(configurations) if c.batch_size == size]
    of_run = {n: validation.results[n].prediction for n in numbers}
    before = {n: validation.results[n].forecast for n in numbers}
    pays = _pays(of_run, configurations, traces)
    if pays is None:
        return {"batch_size": size, "ssd": None}
    return {"batch_size": size, **pays, "forecast": _pays(before, configurations, traces)}


def _pays(
    predicted: Mapping[int, Prediction[Policy]],
    configurations: Sequence[Configuration],
    traces: Sequence[Sequence[Trace]],
) -> dict[str, Any] | None:
    def best(*, is_ssd: bool) -> int | None:
        some = [n for n in predicted if isinstance(configurations[n].policy, SpeculativeSpeculative) == is_ssd]
        return max(some, key=lambda n: predicted[n].tokens_per_s.value) if some else None

    ssd, other = best(is_ssd=True), best(is_ssd=False)
    if ssd is None or other is None:
        return None
    expected = predicted_speedup(predicted[ssd], predicted[other])
    measured = speedup(traces[ssd], traces[other])
    return {
        "ssd": configurations[ssd].policy.name,
        "other": configurations[other].policy.name,
        "predicted_speedup": interval(expected),
        "measured_speedup": interval(measured),
        "predicted_answer": _answer(expected),
        "measured_answer": _answer(measured),
    }


def _answer(ratio: Estimate) -> str:
    if ratio.low <= 1 <= ratio.high:
        return "no significant difference"
    return "yes" if ratio.value > 1 else "no"


def cost_of_profile(profiles: Mapping[int, Profile], forecasts: Sequence[Prediction[Policy]]) -> dict[str, float]:
    """Seconds that the profile took, and that decoding the calibration prompts once under every configuration takes,
    prefills left out."""
    (first, *_) = profiles.values()
    sweep_s = sum(f.expectation.num_tokens.sum() / f.tokens_per_s.value for f in forecasts)
    return {"profile_s": sum(first.manifest["durations_s"].values()), "sweep_s": float(sweep_s)}


# --------------------------------------------------------------------------------------------------------------- write


def sessions_of(ledger: Ledger, configurations: Sequence[Configuration], test: Workload, repeats: int) -> Sessions:
    """Which attempt measured what: repeat, block of prompts, and place among those that the block went through."""
    pieces = {}
    block = max(c.batch_size for c in configurations)
    for repeat, index in product(range(repeats), range(len(test.prompts) // block)):
        place = count()
        for size in dict.fromkeys(c.batch_size for c in configurations):
            own = ledger.within(f"{EXECUTE}/batch-{size}")
            num = sum(c.batch_size == size for c in configurations)
            for batch, number in product(range(block // size), range(num)):
                pieces[repeat, index, next(place)] = own.session_of(piece_name(f"{repeat}/{index}", 0, batch, number))
    return Sessions(pieces)


def write(
    folder: Path,
    profiles: Mapping[int, Profile],
    systems: tuple[Mapping[int, System], Mapping[int, System]],
    traces: Sequence[Sequence[Trace]],
    companions: Mapping[int, CompanionRuns],
    answer: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> None:
    """`validation.json`, `validation.md`, `validation.html` with its figures, `manifest.json`, profiles, the systems of
    forecast and prediction, every measured trace (`traces/<row>/<repeat>/`) and those of the reference policies in
    between."""
    before, then = systems
    for size, profile in profiles.items():
        profile.write(folder / "profile" / f"batch-{size}")
        before[size].write(folder / f"system_batch-{size}.json")
        then[size].write(folder / f"system_during_run_batch-{size}.json")
        for number, trace in enumerate(companions[size].by_policy()):
            trace.write(folder / "traces" / f"companions_batch-{size}" / str(number))
    for number, repeats in enumerate(traces):
        for repeat, trace in enumerate(repeats):
            trace.write(folder / "traces" / str(number) / str(repeat))
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, allow_nan=False))
    (folder / "validation.json").write_text(json.dumps(answer, indent=1, allow_nan=False))
    write_reports(folder, answer, manifest)


def write_reports(folder: Path, validation: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """The two reports, and their figures."""
    from experiments.figures import errors_by_configuration, predicted_measured
    from experiments.html_report import note, page

    figures = folder / "figures"
    predicted_measured(validation["rows"], figures / f"{PREDICTED_MEASURED.name}.svg")
    errors_by_configuration(validation["rows"], validation["noise"]["value"], figures / f"{ERRORS.name}.svg")
    (folder / "validation.md").write_text(validation_report(validation, manifest))
    notes, parts = [note(text) for text in notes_of(validation)], sections(validation, manifest)
    html = page(title(validation), result_in_words(validation), notes, parts, figures)
    (folder / "validation.html").write_text(html)


def print_validation(validation: Mapping[str, Any], console: Console) -> None:
    """The answer, whether SSD pays, the errors by cause, and the table of all configurations."""
    head, rows = table_of_rows(validation["rows"])
    shown = (0, 1, 2, 3, 4, 6, 9, 10)
    table = Table(*(head[column] for column in shown))
    for row in rows:
        table.add_row(*(row[column] for column in shown))
    console.print(table)
    for sentence in (*map(in_a_sentence, validation["does_ssd_pay"]), result_in_words(validation)):
        console.print(sentence, highlight=False)
    for miss in validation["missed"]:
        console.print(f"missed: {miss}", highlight=False)
