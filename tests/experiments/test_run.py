"""The pipeline on a bench that obeys the simulator's own laws: it finds them, writes everything and hides nothing."""

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from calibration.profile import Profile
from calibration.validate import compare
from experiments.cli import _print_summary
from experiments.config import QUICKSTART, ExperimentConfig, load_config
from experiments.measurement import batches, join, measure_interleaved
from experiments.run import KINDS, measure_profile, notes, run_experiment
from experiments.stages import Stages
from sim.errors import BadInput, RunFailed
from sim.metrics import Estimate
from sim.policy import Autoregressive, Policy, Speculative
from sim.simulate import predict
from sim.system import System
from sim.trace import Trace
from sim.workload import Workload
from tests.experiments.fake_bench import FakeBench


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    """The quickstart at its reduced size, with few policies to search."""
    config = load_config(QUICKSTART, reduced=True)
    small = config.search.model_copy(update={"speculation_lengths": (2, 4), "budgets": (8, 16)})
    return config.model_copy(update={"search": small})


def quiet() -> Stages:
    return Stages(Console(quiet=True))


@pytest.fixture(scope="module")
def finished(config: ExperimentConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_experiment(config, FakeBench(config), folder, quiet())


def test_summary_has_exactly_the_published_keys(finished: tuple[Path, dict]) -> None:
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    interval = {"value", "low", "high"}
    assert summary.keys() == {
        "schema", "policies", "recommended", "best_measured", "regret", "lossless", "speedups",
    }  # fmt: skip
    assert summary["schema"] == 1
    assert [row["policy"]["kind"] for row in summary["policies"]] == list(KINDS)
    for row in summary["policies"]:
        assert row.keys() == {"name", "policy", "forecast", "predicted", "measured", "error"}
        figures = {"tokens_per_s", "hit_rate", "mean_acceptance_length"}
        assert row["predicted"].keys() == figures
        assert row["measured"].keys() == figures | {"repeats", "repeat_spread"}
        assert row["error"].keys() == {"tokens_per_s", "forecast_tokens_per_s", "tokens_per_s_interval"}
        for figure in figures:
            for kind in ("predicted", "measured"):
                estimate = row[kind][figure]
                assert estimate is None or estimate.keys() == interval
        assert (row["measured"]["hit_rate"] is None) == (row["policy"]["kind"] != "ssd")
    assert summary["regret"].keys() == interval
    assert summary["lossless"].keys() == {"prompts", "identical", "near_tie_flips"}
    assert summary["speedups"].keys() == {"sd_over_ar", "ssd_over_ar", "ssd_over_sd"}
    assert all(speedup.keys() == interval for speedup in summary["speedups"].values())
    names = [row["name"] for row in summary["policies"]]
    assert summary["recommended"] in names and summary["best_measured"] in names


def test_everything_is_written_and_can_be_read_back(finished: tuple[Path, dict], config: ExperimentConfig) -> None:
    folder, _ = finished
    for file in ("report.md", "manifest.json", "details.json", "system.json", "figures/timeline.svg"):
        assert (folder / file).stat().st_size > 0
    assert "<svg" in (folder / "figures" / "predicted_against_measured.svg").read_text()
    Profile.read(folder / "profile")
    System.read(folder / "system.json")
    for kind in KINDS:
        assert Trace.read(folder / "traces" / "simulated" / kind).rounds
        for repeat in range(config.run.repeats):
            trace = Trace.read(folder / "traces" / "measured" / kind / str(repeat))
            assert len(trace.sequences) == config.workload.test_prompts
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["workload"]["max_new_tokens"] == config.workload.max_new_tokens
    assert not set(manifest["workload"]["prompts"]) & set(manifest["calibration"]["prompts"])


def test_a_machine_that_obeys_the_model_is_predicted(finished: tuple[Path, dict]) -> None:
    _, summary = finished
    ar, sd, ssd = summary["policies"]
    assert abs(ar["error"]["tokens_per_s"]) < 0.001  # constant times, no random outcome
    for row in (sd, ssd):
        assert abs(row["error"]["tokens_per_s"]) < 0.25  # four test prompts of other text
    assert ar["measured"]["mean_acceptance_length"]["value"] == 1
    assert summary["lossless"] == {"prompts": 4, "identical": 4, "near_tie_flips": 0}
    assert summary["recommended"] == ssd["name"]


def test_drift_since_the_profile_is_in_the_forecast_and_not_in_the_prediction(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    profile = measure_profile(config, FakeBench(config), quiet())
    summary = run_experiment(config, FakeBench(config, slowness=1.5), tmp_path, quiet(), earlier=profile)
    assert summary["policies"][0]["error"]["forecast_tokens_per_s"] == pytest.approx(0.5, abs=0.001)
    assert summary["policies"][0]["error"]["tokens_per_s"] == pytest.approx(0, abs=0.001)


def test_text_of_ssd_that_differs_is_counted_and_said_first(config: ExperimentConfig, tmp_path: Path) -> None:
    def corrupt(policy: Policy, trace: Trace) -> Trace:
        if policy.to_dict()["kind"] == "ssd":
            first = trace.sequences[0]
            trace.sequences[0] = replace(first, tokens=(*first.tokens[:-1], first.tokens[-1] + 1))
        return trace

    summary = run_experiment(config, FakeBench(config, alter=corrupt), tmp_path / "a", quiet())
    assert summary["lossless"] == {"prompts": 4, "identical": 0, "near_tie_flips": 0}
    assert "**Not lossless" in (tmp_path / "a" / "report.md").read_text().split("##")[0]
    tied = run_experiment(config, FakeBench(config, alter=corrupt, gap=1e-5), tmp_path / "b", quiet())
    assert tied["lossless"] == {"prompts": 4, "identical": 0, "near_tie_flips": 4}
    assert "**Not lossless" not in (tmp_path / "b" / "report.md").read_text()


def test_report_says_what_was_not_overlapped(config: ExperimentConfig, tmp_path: Path) -> None:
    bench = FakeBench(config)
    bench.identity["concurrency"] = "serial"
    run_experiment(config, bench, tmp_path, quiet())
    assert "nothing overlapped" in (tmp_path / "report.md").read_text().split("##")[0]


def test_report_says_first_what_to_doubt_of_the_acceptance(finished: tuple[Path, dict]) -> None:
    """The fake texts have no end."""
    assert "texts were decoded past their end" in (finished[0] / "report.md").read_text().split("##")[0]


def test_roles_that_hardly_overlap_are_said_first(config: ExperimentConfig) -> None:
    identity = {"concurrency": "streams"}
    (remark,) = (r for r in notes(config, identity, Estimate(0.03, 0.02, 0.04, 4), None) if "overlap" in r)
    assert remark.startswith("no overlap achieved: 3 %")
    assert not [r for r in notes(config, identity, Estimate(0.7, 0.6, 0.8, 4), None) if "overlap" in r]


def test_profile_of_another_pair_is_refused_before_anything_is_executed(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    profile = measure_profile(config, FakeBench(config), quiet())
    other = FakeBench(config)
    other.identity["threads"] = {"target": 2, "draft": 1}
    with pytest.raises(BadInput, match=r"threads\.target was 1 and is 2"):
        run_experiment(config, other, tmp_path, quiet(), earlier=profile)
    assert not other.executed
    assert not list(tmp_path.iterdir())


def test_profile_under_other_rules_is_refused(config: ExperimentConfig, tmp_path: Path) -> None:
    profile = measure_profile(config, FakeBench(config), quiet())
    rules = config.workload.model_copy(update={"max_new_tokens": 16})
    shorter = config.model_copy(update={"workload": rules})
    with pytest.raises(BadInput, match=r"workload\.max_new_tokens: must be 32 as in the profile, got 16"):
        run_experiment(shorter, FakeBench(shorter), tmp_path, quiet(), earlier=profile)


# --------------------------------------------------------------------------------------------------------- interleaving


def test_policies_take_turns_and_their_order_rotates(config: ExperimentConfig) -> None:
    bench = FakeBench(config)
    policies = [Autoregressive(), Speculative(2), Speculative(4)]
    test = bench.workload("test", 4)
    steps = []
    measure_interleaved(bench.execute, policies, test, repeats=3, seed=0, on_sequence=lambda: steps.append(1))
    assert len(steps) == len(bench.executed) == 3 * 4 * 3
    turns = [bench.executed[i : i + 3] for i in range(0, 36, 3)]
    for turn in turns:
        assert {name for name, _ in turn} == {p.name for p in policies}
        assert len({prompt for _, prompt in turn}) == 1
    assert all(before[0][0] != after[0][0] for before, after in pairwise(turns[:4]))
    for policy in policies:  # every policy goes first equally often
        assert sum(turn[0][0] == policy.name for turn in turns) == 4


def test_joined_trace_equals_one_run_over_all_prompts(config: ExperimentConfig) -> None:
    bench = FakeBench(config)
    test = bench.workload("test", 4)
    whole = bench.execute(Speculative(3), test, 0)
    parts = [bench.execute(Speculative(3), replace(test, prompts=(prompt,)), 0) for prompt in test.prompts]
    assert join(parts).digest() == whole.digest()
    assert len(join(parts).spans) == len(whole.spans)
    assert join(parts[::-1]).digest() != whole.digest()


def test_counts_of_joined_traces_add_up() -> None:
    parts = [Trace({}, {}, meta={"producer": "executor", "num_bad_draft_rows": n}) for n in (1, 0, 2)]
    assert join(parts).meta == {"producer": "executor", "num_bad_draft_rows": 3}


def with_rows(config: ExperimentConfig, num_rows: int) -> ExperimentConfig:
    return config.model_copy(update={"workload": config.workload.model_copy(update={"batch_size": num_rows})})


def test_batches_are_profiled_searched_executed_and_predicted(config: ExperimentConfig, tmp_path: Path) -> None:
    bench = FakeBench(with_rows(config, 4))
    summary = run_experiment(bench.config, bench, tmp_path, quiet())
    for row in summary["policies"]:
        assert abs(row["error"]["tokens_per_s"]) < 0.15  # one test batch, another draw
    trace = Trace.read(tmp_path / "traces" / "measured" / "ssd" / "0")
    assert [len(rounds) for rounds in trace.verified_together()][:1] == [4]
    assert trace.workload["batch_size"] == 4
    profile = Profile.read(tmp_path / "profile")
    assert {s.batch_size for s in profile.latency} == {1, 4}
    assert {len(t.sequences) for t in profile.traces} == {8}  # a whole batch before the latencies, one after
    assert "batches of 4 sequences that begin together" in (tmp_path / "report.md").read_text()
    shown = io.StringIO()
    _print_summary(summary, Console(file=shown, width=200))
    assert shown.getvalue().count("(no interval)") >= 3  # there is one batch of test prompts


def test_batches_take_turns_whole(config: ExperimentConfig) -> None:
    bench = FakeBench(with_rows(config, 3))
    workload, decoded = bench.workload("test", 4), []
    policies: list[Policy] = [Autoregressive(), Speculative(2)]
    traces = measure_interleaved(
        bench.execute, policies, workload, repeats=2, seed=1, on_sequence=lambda: decoded.append(1)
    )
    assert bench.executed == [
        *(("AR", 0), ("SD K=2", 0), ("SD K=2", 3), ("AR", 3)),
        *(("SD K=2", 0), ("AR", 0), ("AR", 3), ("SD K=2", 3)),
    ]
    assert len(decoded) == 16
    assert all([s.index for s in trace.sequences] == [0, 1, 2, 3] for repeats in traces for trace in repeats)


FAILURE = {"sequence": 0, "round": 7, "message": "the draft process died with exit code -9\nand more"}


class BenchThatLosesItsDraft(FakeBench):
    """From repeat `lost_in` on the target decodes the test prompts alone where SSD was asked for."""

    lost_in = 1

    def execute(self, policy: Policy, workload: Workload, seed: int, *, on_draft_failure: str = "raise") -> Trace:
        trace = super().execute(policy, workload, seed)
        is_test, is_ssd = workload.prompts[0][0] == 1, policy.to_dict()["kind"] == "ssd"
        if on_draft_failure == "continue" and is_test and is_ssd and seed - self.config.seed >= self.lost_in:
            trace.meta["draft_failure"] = FAILURE
        return trace


def continuing(config: ExperimentConfig) -> ExperimentConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"on_draft_failure": "continue"})})


def test_repeats_without_their_draft_are_told_and_left_out(config: ExperimentConfig, tmp_path: Path) -> None:
    bench = BenchThatLosesItsDraft(continuing(config))
    summary = run_experiment(bench.config, bench, tmp_path, quiet())
    assert {row["measured"]["repeats"] for row in summary["policies"]} == {1}
    text = (tmp_path / "report.md").read_text()
    for repeat in (1, 2):
        assert f"in repeat {repeat} of the SSD runs the draft failed in round 7 of prompt 0 (the draft process" in text
    assert summary["lossless"]["identical"] == summary["lossless"]["prompts"]  # those texts are compared all the same
    assert Trace.read(tmp_path / "traces" / "measured" / "ssd" / "2").meta["draft_failure"] == FAILURE


def test_without_a_sound_repeat_there_is_nothing_to_compare(config: ExperimentConfig, tmp_path: Path) -> None:
    bench = BenchThatLosesItsDraft(continuing(config))
    bench.lost_in = 0
    with pytest.raises(RunFailed, match=r"the draft failed in every repeat.*exit code -9"):
        run_experiment(bench.config, bench, tmp_path, quiet())


def test_a_failure_keeps_its_place_in_a_joined_trace_and_is_in_no_comparison(config: ExperimentConfig) -> None:
    bench = BenchThatLosesItsDraft(config)
    workload = bench.workload("test", 3)
    parts = [bench.execute(Speculative(2), batch, 0) for batch in batches(workload)]
    parts[1].meta["draft_failure"] = FAILURE
    whole = join(parts)
    assert whole.meta["draft_failure"] == FAILURE | {"sequence": 1}
    prediction = predict(Speculative(2), workload, bench.truth["test"])
    with pytest.raises(BadInput, match="must be of a run whose draft did not fail"):
        compare(prediction, prediction, [whole])
