"""A sweep is its points, asked one after another; whatever is wrong with one of them is said before the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.config import QUICKSTART, load_config, load_sweep
from experiments.numbers import numbers_of, read_numbers
from experiments.planning import best_engine, plan_from, read_plan
from experiments.run import search_space
from experiments.schema import FileKind, schema
from experiments.strict_yaml import parse_yaml, read_yaml
from experiments.sweep import points
from experiments.swept import search_points
from sim.errors import BadInput
from sim.policy import Autoregressive, Speculative
from sim.search import search
from sim.simulate import predict
from sim.workers import Workers

HEAD = """\
schema: 1
name: swept
text: {prompt_tokens: 8, new_tokens: 32}
acceptance: {conditional: [0.8]}
times: {verify_ms: 20.0, draft_step_ms: 2.0}
search: {speculation_lengths: [1, 3], budgets: [4], fan_out_rules: [uniform], fallbacks: [draft]}
"""
SWEEP = "sweep:\n  times.draft_step_ms: [1.0, 4.0]\n  text.batch_size: [1, 2]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "swept.yaml"
    path.write_text(HEAD + SWEEP)
    return path


def test_points_are_all_combinations_in_order(file: Path) -> None:
    found = points(read_yaml(file))
    assert [point.name for point in found] == [
        f"times.draft_step_ms={ms}, text.batch_size={rows}" for ms in (1.0, 4.0) for rows in (1, 2)
    ]
    last = numbers_of(found[-1].document)
    assert last.workload.batch_size == 2
    assert last.search.speculation_lengths == (1, 3)


def test_every_point_is_what_a_search_of_its_own_finds(file: Path, tmp_path: Path) -> None:
    swept = search_points(file, lambda line: None, seed=3)
    for answered in swept.answers:
        ms, rows = answered.point.values.values()
        alone = tmp_path / "alone.yaml"
        alone.write_text(
            HEAD.replace("draft_step_ms: 2.0", f"draft_step_ms: {ms}").replace("32}", f"32, batch_size: {rows}}}")
        )
        plan = read_plan(alone)
        assert plan.search is not None
        engine = best_engine(plan.workload, plan.system)
        found = search(search_space(plan.search), plan.workload, plan.system, engine=engine, seed=3)
        assert answered.recommended == found.recommended.policy.name
        for kind in ("ar", "sd", "ssd"):
            assert answered.kinds[kind]["tokens_per_s"] == found.best(kind).tokens_per_s.to_dict()


def test_results_do_not_depend_on_the_number_of_workers(file: Path) -> None:
    alone, together = (search_points(file, lambda line: None, workers=Workers(n)).to_dict() for n in (1, 2))
    assert alone == together


def test_a_whole_section_may_be_swept() -> None:
    text = (
        HEAD
        + "sweep:\n  times: [{verify_ms: 10.0, draft_step_ms: 1.0}, {ar_ms: 9.0, verify_ms: 10.0, draft_over_ar: .1}]\n"
    )
    found = [numbers_of(point.document) for point in points(parse_yaml(text, "x.yaml"))]
    rates = [predict(Autoregressive(), n.workload, n.system).tokens_per_s.value for n in found]
    assert rates == pytest.approx([100.0, 1000 / 9], rel=1e-6)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("", "sweep: must list the values of one setting at least"),
        ("sweep: {}", r"line 7: sweep: must list the values of one setting at least"),
        ("sweep: [1, 2]", r"line 7: sweep: must list the values of one setting at least"),
        ("sweep:\n  name: [a, b]", r"line 8: sweep.name: must be the full key of a setting"),
        ("sweep:\n  times..ar_ms: [1.0]", r"line 8: sweep.times..ar_ms: must be the full key of a setting"),
        ("sweep:\n  times.ar_ms: 20.0", r"line 8: sweep.times.ar_ms: must be a list of one value at least"),
        ("sweep:\n  times.ar_ms: []", r"line 8: sweep.times.ar_ms: must be a list of one value at least"),
        ("sweep:\n  times.ar_ms: [20.0, 20.0]", r"line 8: sweep.times.ar_ms: must list every value once"),
        ("sweep:\n  times.verify_sm: [20.0]", r"line 8: sweep.times.verify_sm: unknown key; did you mean"),
        ("sweep:\n  times.verify_ms: [20.0, fast]", r"line 8: sweep.times.verify_ms"),
        ("sweep:\n  search.budgets.first: [20.0]", r"line 8: sweep.search.budgets.first: search.budgets is a list"),
    ],
)  # fmt: skip
def test_a_wrong_sweep_is_refused_at_its_line(tmp_path: Path, sweep: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(HEAD + sweep)
    said: list[str] = []
    with pytest.raises(BadInput, match=message):
        search_points(path, said.append)
    assert not said


def test_a_point_is_not_asked_of_other_commands(file: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"line 7: sweep: is answered by `saguaro sweep`"):
        read_numbers(file)
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(QUICKSTART.read_text() + "sweep: {workload.temperature: [0.0, 1.0]}\n")
    with pytest.raises(BadInput, match="sweep: is answered by `saguaro sweep`"):
        load_config(experiment)


def test_points_of_an_experiment_obey_options_and_reduced_values(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    text = (
        QUICKSTART.read_text() + "  sweep: {workload.temperature: [0.5]}\nsweep: {workload.temperature: [0.0, 1.0]}\n"
    )
    path.write_text(text)
    full = [config for _, config in load_sweep(path, seed=7, settings=["run.repeats=4"])]
    assert [(c.workload.temperature, c.seed, c.run.repeats) for c in full] == [(0.0, 7, 4), (1.0, 7, 4)]
    (small,) = [config for _, config in load_sweep(path, reduced=True)]
    assert small.workload.temperature == 0.5
    assert small.workload.test_prompts < full[0].workload.test_prompts
    with pytest.raises(BadInput, match="must be given once"):
        load_sweep(path, settings=["workload.temperature=0.1"])


def test_the_command_prints_a_table_and_json(file: Path) -> None:
    runner = CliRunner()
    table = runner.invoke(app, ["sweep", str(file), "--num-workers", "1"])
    assert table.exit_code == 0
    assert "draft_step_ms" in table.stdout and "recommended of 4 points" in table.stdout
    assert "4 of 4: times.draft_step_ms=4.0, text.batch_size=2" in table.stderr
    quiet = runner.invoke(app, ["sweep", str(file), "--num-workers", "1", "--quiet", "--json"])
    found = json.loads(quiet.stdout)
    assert found["kind"] == "search" and len(found["points"]) == 4
    assert [line for line in quiet.stderr.splitlines() if not line.startswith("digest")] == []
    assert found["points"][0]["values"] == {"times.draft_step_ms": 1.0, "text.batch_size": 1}


@pytest.mark.parametrize("option", ["--reduced", "--resume", "--overwrite"])
def test_options_of_runs_do_not_go_with_numbers(file: Path, option: str) -> None:
    refused = CliRunner().invoke(app, ["sweep", str(file), option])
    assert isinstance(refused.exception, BadInput) and str(refused.exception).startswith(option)


def test_sections_have_a_schema() -> None:
    for kind in (FileKind.EXPERIMENT, FileKind.NUMBERS):
        assert schema(kind)["properties"]["sweep"]["additionalProperties"]["type"] == "array"


@pytest.mark.parametrize("num_targets", [1, 2, 4, 6])
def test_targets_that_share_a_draft_queue_for_it(num_targets: int) -> None:
    """With nothing left to chance a round takes the longer of its own drafting and verification (20 + 3 x 4 ms) and of
    the drafting for all targets. The first prompts of a draft come one after another, which a long text forgets."""
    text = HEAD.replace("[0.8]", "[1.0]").replace("new_tokens: 32", "new_tokens: 4001")
    text = text.replace("draft_step_ms: 2.0", "draft_step_ms: 4.0") + f"devices: {{num_targets: {num_targets}}}\n"
    plan = plan_from(numbers_of(parse_yaml(text, "shared.yaml")))
    rate = predict(Speculative(3), plan.workload, plan.system, engine="des").tokens_per_s.value
    assert rate == pytest.approx(4e3 / max(20 + 12, num_targets * 12), rel=0.01)
    alone = predict(Autoregressive(), plan.workload, plan.system, engine="des").tokens_per_s.value
    assert alone == pytest.approx(50.0, rel=1e-3)


def test_ranges_are_not_drawn_where_targets_share_a_draft() -> None:
    """The engine of shared drafts is a sampled one; what was assumed says so."""
    text = HEAD.replace("swept", "shared") + "ranges: {times.verify_ms: {low: 19.0, high: 22.0}}\n"
    assert numbers_of(parse_yaml(text, "alone.yaml")).ranges
    shared = numbers_of(parse_yaml(text + "devices: {num_targets: 2}\n", "shared.yaml"))
    assert not shared.ranges
    assert any("ranges are not drawn" in line for line in shared.assumptions)
    with pytest.raises(BadInput, match="must hold the number itself"):
        numbers_of(parse_yaml(text.replace("19.0", "21.0") + "devices: {num_targets: 2}\n", "wrong.yaml"))
