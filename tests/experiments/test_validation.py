"""`saguaro validate` on a bench that obeys the simulator's laws, and on ones that break a known one of them."""

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import experiments.bench
from experiments.cli import main
from experiments.config import ConfigurationsConfig, ExperimentConfig, load_config
from experiments.ledger import Ledger
from experiments.measurement import EXECUTE
from experiments.stages import Stages
from experiments.validation import (
    Configuration,
    for_largest_batch,
    measure_profiles,
    print_validation,
    read_profiles,
    run_validation,
)
from sim.errors import BadInput
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative
from sim.system import System
from sim.trace import Trace
from tests.experiments.browser import assert_sound, needs_browser
from tests.experiments.fake_bench import FakeBench, greedy_record

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"
PACKAGED = sorted(path.name for path in CONFIGS.glob("validate_*.yaml"))
TOLERANCE = {"mape_tokens_per_s": 0.05, "hit_rate_mae": 0.03, "rank_correlation": 0.9, "regret": 0.05}

Change = Callable[[FakeBench], None]


def group(batch_size: int, lengths: list[int], fallbacks: list[str], budgets: tuple[int, ...] = (8,)) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "speculation_lengths": lengths,
        "budgets": list(budgets),
        "fan_out_rules": ["uniform"],
        "fallbacks": fallbacks,
    }


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    """Two batch sizes, twelve configurations, forty test prompts of 24 tokens; the short runs have K = 5."""
    settings = load_config(CONFIGS / "validate_stdlib.yaml", reduced=True).to_dict()
    settings["workload"] |= {"calibration_prompts": 80, "test_prompts": 40}
    settings["search"] |= {"speculation_lengths": [2, 5, 6], "budgets": [8]}
    settings["validation"] |= {
        "configurations": [group(1, [2, 4], ["draft", "none"]), group(2, [3], ["draft", "draft_missing", "none"])],
        "fresh_prompts": 8,
        "tolerance": TOLERANCE,
    }
    return for_largest_batch(ExperimentConfig.model_validate_json(json.dumps(settings)))


def quiet() -> Stages:
    return Stages(Console(quiet=True))


@pytest.fixture(scope="module")
def few(config: ExperimentConfig) -> ExperimentConfig:
    """Eight configurations of the same, without fallbacks that tie the length of a round to hits."""
    groups = (group(1, [3, 4], ["draft"]), group(2, [3], ["draft_missing"]))
    settings = config.to_dict()
    settings["workload"] |= {"calibration_prompts": 60, "test_prompts": 24}
    settings["validation"] |= {"configurations": groups, "fresh_prompts": 4}
    return ExperimentConfig.model_validate_json(json.dumps(settings))


def validated(config: ExperimentConfig, folder: Path, change: Change = lambda bench: None, **fields: Any) -> dict:
    bench = FakeBench(config, **fields)
    change(bench)
    return run_validation(config, bench, folder, quiet())


@pytest.fixture(scope="module")
def finished(config: ExperimentConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Of a machine that obeys the model."""
    folder = tmp_path_factory.mktemp("validation")
    return folder, validated(config, folder)


def of_test_prompts(to: Callable[[System], System]) -> Change:
    """Change what test prompts meet, and nothing that the profile or the reference policies meet."""

    def change(bench: FakeBench) -> None:
        bench.truth["test"] = to(bench.truth["test"])

    return change


def with_texts(**odds: float) -> Change:
    """Test prompts whose texts the draft guesses with other odds."""

    def other(system: System) -> System:
        size = system.agreement.num_prompts
        length, prompt_length = system.agreement.max_new_tokens, int(system.agreement.prompt_length[0])
        record = greedy_record(num_prompts=size, length=length, prompt_length=prompt_length, seed=1, **odds)
        return replace(system, agreement=record)

    return of_test_prompts(other)


def slower(system: System) -> System:
    """Every operation and the host take a quarter more."""
    tables = {
        key: replace(table, residuals=tuple(1.25 * ratio for ratio in table.residuals))
        for key, table in system.latency.operations.items()
    }
    host_s = {term: 1.25 * seconds for term, seconds in system.host_s.items()}
    return replace(system, latency=replace(system.latency, operations=tables), host_s=host_s)


# ------------------------------------------------------------------------------------------------- a machine that obeys


def test_every_configuration_is_measured_and_in_the_table(finished: tuple[Path, dict]) -> None:
    folder, answer = finished
    kinds = [(row["batch_size"], row["policy"]["kind"]) for row in answer["rows"]]
    assert kinds == [(1, "ar"), *[(1, "sd")] * 2, *[(1, "ssd")] * 4, (2, "ar"), (2, "sd"), *[(2, "ssd")] * 3]
    report = (folder / "validation.md").read_text()
    for number, row in enumerate(answer["rows"]):
        assert len(row["measured"]["repeats"]) == 2
        assert row["name"].replace("|", "\\|") in report
        for repeat in range(2):
            trace = Trace.read(folder / "traces" / str(number) / str(repeat))
            assert trace.policy == row["policy"] and trace.workload["batch_size"] == row["batch_size"]
            assert len(trace.sequences) == 40


def test_the_answer_is_complete_and_stored(finished: tuple[Path, dict]) -> None:
    folder, answer = finished
    assert json.loads((folder / "validation.json").read_text()) == answer
    figures = {"mape_tokens_per_s", "worst_tokens_per_s", "hit_rate_mae", "rank_correlation"}
    for name in figures | {"regret", "noise", "noise_without_drift", "drift"}:
        assert answer[name].keys() == {"value", "low", "high"}
        assert answer[name]["low"] <= answer[name]["value"] <= answer[name]["high"]
    apart = {"latency_and_overlap", "acceptance", "hits", "hits_after_hit", "hits_after_miss", "all_together"}
    assert answer["causes"].keys() == answer["forecast"]["causes"].keys() == apart
    assert figures <= answer["forecast"].keys()
    for row in answer["rows"]:
        errors = {"tokens_per_s", "latency_and_overlap", "tokens_per_round"}
        hits = {"hit_rate", "hit_rate_after_hit", "hit_rate_after_miss"}
        for of in ("error", "forecast_error"):
            assert row[of].keys() == errors | hits
            assert all(row[of][name].keys() == {"value", "low", "high"} for name in errors)
        assert (row["error"]["hit_rate"] is None) == (row["policy"]["kind"] != "ssd")
    assert read_profiles(folder / "profile").keys() == {1, 2}
    System.read(folder / "system_batch-2.json")
    System.read(folder / "system_during_run_batch-1.json")


def test_a_machine_that_obeys_the_model_is_predicted_within_its_noise(finished: tuple[Path, dict]) -> None:
    """Durations are constant here, so that latencies are exact; texts differ, and of 12 rows that share their prompts
    nearly all intervals hold 0 unless those prompts are among the rarest 5 %."""
    _, answer = finished
    assert answer["causes"]["latency_and_overlap"]["mean_absolute"]["value"] < 0.002
    assert answer["mape_tokens_per_s"]["value"] < 0.05
    assert answer["hit_rate_mae"]["value"] < 0.03
    assert answer["regret"]["low"] <= 0.01
    verdicts = [row["verdict"] for row in answer["rows"] if row["policy"]["kind"] != "ar"]
    assert verdicts.count("not distinguishable") >= 0.8 * len(verdicts)
    assert answer["noise"]["value"] == pytest.approx(0, abs=1e-9)  # the same texts at constant times
    assert answer["lossless"] == {"prompts": 40, "identical": 40, "near_tie_flips": 0}


def test_prompts_of_no_configuration_were_seen_before(finished: tuple[Path, dict]) -> None:
    folder, answer = finished
    manifest = json.loads((folder / "manifest.json").read_text())
    assert not set(manifest["workload"]["prompts"]) & set(manifest["calibration"]["prompts"])
    for profile in read_profiles(folder / "profile").values():
        seen = [trace.policy for trace in profile.traces]
        assert not [row for row in answer["rows"] if row["policy"] in seen and row["policy"]["kind"] != "ar"]


def test_configurations_take_turns_over_the_prompts(few: ExperimentConfig, tmp_path: Path) -> None:
    """A block of prompts goes through all configurations of all batch sizes before the next one begins."""
    bench = FakeBench(few)
    run_validation(few, bench, tmp_path, quiet())
    is_test = Speculative(4).name  # a policy that the profile does not run
    prompts = [prompt for name, prompt in bench.executed if name == is_test]
    of_run = prompts[1:]  # after the warm-up
    assert of_run[:4] == [0, 1, 2, 3] and of_run[24:28] == [0, 1, 2, 3]
    first = bench.executed.index((is_test, 2))
    last = len(bench.executed) - 1 - bench.executed[::-1].index((is_test, 21))
    between = {name for name, _ in bench.executed[first:last]}
    assert {Autoregressive().name, Speculative(3).name} <= between


# ------------------------------------------------------------------------------------------------------- known faults


def test_without_host_time_predictions_are_visibly_worse(finished: tuple[Path, dict]) -> None:
    """A tenth of a millisecond in each millisecond of a round is host time here."""
    _, answer = finished
    whole, without = (answer["ablations"][name] for name in ("nothing left out", "without host time"))
    assert without["mape_tokens_per_s"]["value"] > whole["mape_tokens_per_s"]["value"] + 0.02
    assert without["mean_error_tokens_per_s"]["value"] > 0.02
    names = {"without contention", "means instead of distributions", "independent rounds"}
    assert answer["ablations"].keys() == names | {"nothing left out", "without host time"}


def test_slow_operations_are_blamed_on_latency(few: ExperimentConfig, tmp_path: Path) -> None:
    answer = validated(few, tmp_path, of_test_prompts(slower))
    assert _blamed(answer) == {"latency_and_overlap"}
    assert answer["causes"]["latency_and_overlap"]["mean_signed"]["value"] == pytest.approx(0.25, abs=0.005)
    assert {row["verdict"] for row in answer["rows"]} == {"predicted too fast"}
    assert answer["missed"][0].startswith("mape_tokens_per_s is 0.2")


def test_texts_that_are_hard_to_guess_are_blamed_on_acceptance(few: ExperimentConfig, tmp_path: Path) -> None:
    """The bonus token stays as easy to prepare where the draft token was rejected; it is not after full acceptance."""
    answer = validated(few, tmp_path, with_texts(accepted=0.6, prepared=0.7))
    assert "acceptance" in _blamed(answer) and "latency_and_overlap" not in _blamed(answer)
    assert answer["causes"]["acceptance"]["mean_signed"]["low"] > 0.1


def test_outcomes_that_were_not_prepared_are_blamed_on_hits(few: ExperimentConfig, tmp_path: Path) -> None:
    answer = validated(few, tmp_path, with_texts(prepared=0.2))
    assert _blamed(answer) == {"hits"}
    assert answer["causes"]["hits"]["mean_signed"]["low"] > 0.05
    assert any(miss.startswith("hit_rate_mae") for miss in answer["missed"])


def _blamed(answer: dict) -> set[str]:
    """Causes whose mean signed error is beyond what prompts explain, and large."""
    causes = {name: answer["causes"][name]["mean_signed"] for name in ("latency_and_overlap", "acceptance", "hits")}
    return {name for name, mean in causes.items() if mean["low"] * mean["high"] > 0 and abs(mean["value"]) > 0.01}


def test_drift_since_the_profile_is_the_forecast_s_alone(few: ExperimentConfig, tmp_path: Path) -> None:
    """The same profile, on a machine that has become a quarter slower."""
    profiles = measure_profiles(few, FakeBench(few), quiet(), (1, 2))
    answer = run_validation(few, FakeBench(few, slowness=1.25), tmp_path, quiet(), profiles)
    forecast = answer["forecast"]["causes"]["latency_and_overlap"]
    assert forecast["mean_signed"]["value"] == pytest.approx(0.25, abs=0.005)
    assert answer["causes"]["latency_and_overlap"]["mean_absolute"]["value"] < 0.002


def test_a_wrong_recommendation_is_regretted(few: ExperimentConfig, tmp_path: Path) -> None:
    """SSD takes twice as long as its profile says wherever test prompts are decoded: SD would have been better."""

    def alter(policy: Policy, trace: Trace) -> Trace:
        is_test = trace.sequences and trace.policy["kind"] == "ssd" and policy.speculation_length in (3, 4)
        return stretched(trace, 2.0) if is_test else trace

    answer = validated(few, tmp_path, alter=alter)
    assert answer["regret"]["low"] > 0.2
    assert {pays["predicted_answer"] for pays in answer["does_ssd_pay"]} == {"yes"}
    assert {pays["measured_answer"] for pays in answer["does_ssd_pay"]} == {"no"}
    assert "unlike measured" in (tmp_path / "validation.md").read_text()
    assert any(miss.startswith("regret") for miss in answer["missed"])


def stretched(trace: Trace, factor: float) -> Trace:
    """All times since the start multiplied."""
    times = ("start_s", "end_s", "prefill_start_s", "decode_start_s")
    for rows in (trace.sequences, trace.rounds, trace.spans):
        rows[:] = [
            replace(row, **{name: factor * getattr(row, name) for name in times if hasattr(row, name)}) for row in rows
        ]
    return trace


def test_texts_that_differ_are_counted(few: ExperimentConfig, tmp_path: Path) -> None:
    def corrupt(policy: Policy, trace: Trace) -> Trace:
        if isinstance(policy, SpeculativeSpeculative):
            first = trace.sequences[0]
            trace.sequences[0] = replace(first, tokens=(*first.tokens[:-1], first.tokens[-1] + 1))
        return trace

    assert validated(few, tmp_path, alter=corrupt)["lossless"]["identical"] < 24


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def command(config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """`saguaro validate` of a smaller file on the machine that obeys, in an empty folder; returns the exit code."""

    @contextmanager
    def open_bench(config: ExperimentConfig, stages: Stages) -> Iterator[FakeBench]:
        yield FakeBench(config)

    def run(tolerance: dict[str, float], *arguments: str) -> int:
        settings = config.to_dict()
        settings["workload"] |= {"calibration_prompts": 8, "test_prompts": 4, "batch_size": 1}
        small = [group(1, [3, 4], ["draft"]), group(2, [4], ["none"])]
        settings["validation"] |= {"configurations": small, "fresh_prompts": 2, "tolerance": tolerance}
        (tmp_path / "small.yaml").write_text(json.dumps(settings))
        monkeypatch.setattr(sys, "argv", ["saguaro", "validate", "small.yaml", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments.bench, "open_bench", open_bench)
    return run


def test_a_missed_tolerance_is_exit_code_1_and_said(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command({"mape_tokens_per_s": 1e-9}, "--out", "out") == 1
    assert "missed: mape_tokens_per_s is 0." in capsys.readouterr().out
    assert (Path("out") / "validation.json").is_file()


def test_met_tolerances_are_exit_code_0_and_a_profile_serves_again(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command({"mape_tokens_per_s": 0.9}, "--out", "first") == 0
    capsys.readouterr()
    assert command({"mape_tokens_per_s": 0.9}, "--out", "second", "--profile", "first/profile", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads((Path("second") / "validation.json").read_text())
    assert answer["missed"] == []
    assert command({}, "--out", "second") == 2  # finished outputs stay


def test_a_dry_run_measures_nothing_and_scales_an_earlier_validation(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command({}, "--dry-run", "--out", "out") == 0
    assert "no earlier run or profile of this pair was found" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
    assert command({}, "--out", "out", "--quiet") == 0
    shown = capsys.readouterr().out
    assert "execute every configuration" not in shown and "held-out configurations" in shown and "digest " in shown
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    durations_s = manifest["durations_s"] | {"load the pair": 1.0}  # which a bench without models does not take
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest | {"durations_s": durations_s}))
    assert command({}, "--dry-run", "--out", "out", "--set", "validation.repeats=7", "--json") == 0
    twice = json.loads(capsys.readouterr().out)
    repeats = json.loads((tmp_path / "small.yaml").read_text())["validation"]["repeats"]
    assert twice["stages_s"][EXECUTE] == pytest.approx(7 / repeats * durations_s[EXECUTE])
    assert twice["config"]["validation"]["repeats"] == 7 and twice["source"] == "out"


def test_an_interrupted_validation_goes_on_and_ends_as_it_would_have(config: ExperimentConfig, tmp_path: Path) -> None:
    settings = config.to_dict()
    settings["workload"] |= {"calibration_prompts": 8, "test_prompts": 4}
    small = [group(1, [3], ["draft"]), group(2, [4], ["none"])]
    settings["validation"] |= {"configurations": small, "fresh_prompts": 2}
    few = ExperimentConfig.model_validate_json(json.dumps(settings))
    whole = FakeBench(few)
    expected = run_validation(few, whole, tmp_path / "whole", quiet())
    executed: list[tuple[str, int]] = []
    for stops_after in (3, len(whole.executed) // 2, None):
        bench = FakeBench(few, alter=_stopping(stops_after))
        with contextlib.suppress(KeyboardInterrupt):
            found = run_validation(few, bench, tmp_path / "found", quiet(), ledger=Ledger(tmp_path / "ledger"))
        executed += bench.executed
    assert found | {"notes": [], "profile": None} == expected | {"profile": None}
    assert "are of 2 sessions" in found["notes"][0]
    warm_ups = 2 * 4 * 3  # every session that measures warms up anew
    assert len(executed) < len(whole.executed) + 2 * warm_ups + 2


def _stopping(after: int | None) -> Callable[[Policy, Trace], Trace]:
    """Interrupts a run after so many executions."""
    calls = itertools.count(1)

    def alter(policy: Policy, trace: Trace) -> Trace:
        if next(calls) == after:
            raise KeyboardInterrupt
        return trace

    return alter


@needs_browser
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_without_network_shows_the_report_whole(
    finished: tuple[Path, dict], tmp_path: Path, width: int
) -> None:
    figures = ["predicted_measured", "errors"]
    assert_sound(finished[0] / "validation.html", tmp_path, width=width, figures=figures)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_policy_that_the_profile_runs_is_refused_before_anything_is_measured(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    search = config.search.model_copy(update={"speculation_lengths": (2, 4, 6)})  # short runs of K = 4
    bench = FakeBench(config.model_copy(update={"search": search}))
    with pytest.raises(BadInput, match=r"configurations\.0\.speculation_lengths: must not be validated on.*got 4"):
        run_validation(bench.config, bench, tmp_path, quiet())
    assert not bench.executed


def test_a_policy_of_an_earlier_profile_is_refused_whatever_this_file_says(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    search = config.search.model_copy(update={"speculation_lengths": (2, 4, 6)})
    other = config.model_copy(update={"search": search})
    profiles = measure_profiles(other, FakeBench(other), quiet(), (1, 2))
    bench = FakeBench(config)
    with pytest.raises(BadInput, match="must not be validated on"):
        run_validation(config, bench, tmp_path, quiet(), profiles)
    assert not bench.executed


def test_a_profile_without_a_batch_size_is_refused(config: ExperimentConfig, tmp_path: Path) -> None:
    profiles = measure_profiles(config, FakeBench(config), quiet(), (1,))
    with pytest.raises(BadInput, match="must hold batches of 2"):
        run_validation(config, FakeBench(config), tmp_path, quiet(), profiles)


def test_calibration_prompts_are_refused_as_test_prompts(config: ExperimentConfig, tmp_path: Path) -> None:
    class Leaky(FakeBench):
        def workload(self, split: str, num_prompts: int) -> Any:
            return super().workload("calibration", num_prompts)

    bench = Leaky(config)
    with pytest.raises(BadInput, match="must not be validated on its own calibration prompts"):
        run_validation(config, bench, tmp_path, quiet())
    assert not bench.executed


def test_a_file_without_the_section_is_refused(config: ExperimentConfig) -> None:
    with pytest.raises(BadInput, match="validation: this section is missing"):
        for_largest_batch(config.model_copy(update={"validation": None}))


# ---------------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.parametrize("reduced", [False, True])
def test_packaged_configurations_are_held_out(name: str, reduced: bool, tmp_path: Path) -> None:
    """The refusal comes before the first run; a bench that cannot run shows that it did not come."""

    class Started(Exception):
        pass

    def start(policy: Policy, trace: Trace) -> Trace:
        raise Started

    config = for_largest_batch(load_config(CONFIGS / name, reduced=reduced))
    shorter = config.workload.model_copy(update={"max_new_tokens": 8, "temperature": 0.0})  # as the bench's texts
    at_0 = tuple(g.model_copy(update={"downweights": (1.0,)}) for g in _groups(config))
    validation = config.validation and config.validation.model_copy(update={"configurations": at_0})
    config = config.model_copy(update={"workload": shorter, "validation": validation})
    with pytest.raises(Started):
        run_validation(config, FakeBench(config, alter=start), tmp_path, quiet())


def _groups(config: ExperimentConfig) -> tuple[ConfigurationsConfig, ...]:
    assert config.validation is not None
    return config.validation.configurations


def test_names_tell_batches_apart() -> None:
    assert Configuration(1, Speculative(2)).name == "SD K=2"
    assert Configuration(4, Speculative(2)).name == "SD K=2, batches of 4"


def test_what_is_printed_holds_the_answer_and_every_row(finished: tuple[Path, dict]) -> None:
    _, answer = finished
    out = io.StringIO()
    print_validation(answer, Console(file=out, width=400))
    text = out.getvalue()
    assert "does SSD pay?" in text and "12 held-out configurations" in text
    assert all(row["name"] in text for row in answer["rows"])
