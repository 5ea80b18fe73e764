"""Every file of experiments/configs answers the question that it states, by the command that it states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.exceptions import TyperException

import experiments.bench
from experiments.config import QUICKSTART, load_config, load_sweep
from experiments.numbers import numbers_of
from experiments.planning import plan_from
from experiments.run import run_in, search_space
from experiments.scripts.run_ready_configs import READY, answer_in, command_of, question_of
from experiments.searching import Question, answer
from experiments.strict_yaml import read_yaml
from experiments.swept import is_experiment, run_points, search_points
from sim.load import OpenLoop, Poisson
from sim.policy import Speculative
from sim.serving import serve
from tests.experiments.fake_bench import FakeBench
from tests.saguaro_commands import check_understood, shown_in

CONFIGS = sorted(QUICKSTART.parent.glob("*.yaml"))
BY_NAME = {path.stem: path for path in CONFIGS}
FEW = ("search.speculation_lengths=[2]", "search.budgets=[4]")
SHORT = ("workload.max_new_tokens=8", "workload.calibration_prompts=5", "workload.test_prompts=2", *FEW)
SMALL = ("text.new_tokens=24", *FEW)


def files_of(command: str, *, run_models: bool) -> list[Any]:
    """The files that a command answers: experiments, which run models, or numbers."""
    found = [path for path in CONFIGS if command_of(path)[1] == command]
    return [pytest.param(path, id=path.stem) for path in found if is_experiment(read_yaml(path)) == run_models]


@pytest.fixture
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def open_bench(config: Any, stages: Any) -> Iterator[FakeBench]:
        yield FakeBench(config)

    monkeypatch.setattr(experiments.bench, "open_bench", open_bench)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_file_says_what_it_answers_and_how_to_ask(path: Path) -> None:
    assert len(question_of(path).split()) > 4
    command = command_of(path)
    check_understood(command)
    assert any(word.endswith(f"experiments/configs/{path.name}") for word in command)
    assert {"schema", "name"} <= read_yaml(path).data.keys()


def test_a_misspelt_option_is_not_understood() -> None:
    (command,) = shown_in("# first\n#   saguaro search x.yaml --drows 3 \\\n#     --seed 1")
    assert command == ["saguaro", "search", "x.yaml", "--drows", "3", "--seed", "1"]
    with pytest.raises(TyperException, match="drows"):
        check_understood(command)


def test_every_question_of_the_list_has_a_file() -> None:
    assert set(READY) <= BY_NAME.keys()
    assert {command_of(BY_NAME[name])[1] for name in READY} == {"run", "search", "serve", "sweep"}


def test_the_answer_stands_behind_the_table_or_in_it() -> None:
    table = "┃ policy ┃ TTFT ┃ per token, ms ┃\n│ AR     │ 9    │ 11.9          │\n│ SD K=3 │ 9    │ 7.2 │\n└──┘\n"
    assert answer_in(table) == "AR: per token, ms 11.9; SD K=3: per token, ms 7.2"
    assert answer_in(table + "SD is\nthe best\ndigest of x") == "SD is the best"


@pytest.mark.parametrize("path", files_of("search", run_models=False))
def test_numbers_are_searched(path: Path) -> None:
    plan = plan_from(numbers_of(read_yaml(path).with_settings(SMALL)))
    assert plan.search is not None
    found = answer(Question(search_space(plan.search), num_draws=2), plan)
    assert found.found.num_policies > 3
    assert found.moved is not None and found.moved.num_draws == 2


@pytest.mark.parametrize("path", files_of("sweep", run_models=False))
def test_numbers_are_swept(path: Path) -> None:
    is_swept = "search.fallbacks" in read_yaml(path).data["sweep"]
    settings = SMALL if is_swept else (*SMALL, "search.fallbacks=[none]")
    swept = search_points(path, lambda line: None, settings=settings)
    assert len(swept.answers) == len(swept.rows()) >= 4
    assert swept.head[0] in swept.answers[0].point.name


@pytest.mark.parametrize("path", files_of("serve", run_models=False))
def test_numbers_are_served(path: Path) -> None:
    plan = plan_from(numbers_of(read_yaml(path).with_settings(FEW)))
    load = OpenLoop(Poisson(1.5), 4, 40)
    report = serve(Speculative(2), load, plan.workload, plan.system)
    assert report.tokens_per_s is None or report.tokens_per_s.value > 0


@pytest.mark.parametrize("path", files_of("run", run_models=True))
def test_an_experiment_is_run(path: Path, fake_machine: None, tmp_path: Path) -> None:
    config = load_config(path, reduced=True, settings=SHORT)
    summary = run_in(tmp_path / "run", config, Console(quiet=True), overwrite=False, resume=False, quiet=True)
    assert [row["policy"]["kind"] for row in summary["policies"]] == ["ar", "sd", "ssd"]


@pytest.mark.parametrize("path", files_of("sweep", run_models=True))
def test_an_experiment_is_run_at_every_point(path: Path, fake_machine: None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"reduced": True, "settings": SHORT, "quiet": True}
    swept = run_points(path, tmp_path / "sweep", Console(quiet=True), **options)
    assert len(swept.answers) == len(load_sweep(path, reduced=True)) >= 2
    assert len(load_sweep(path)) > len(swept.answers)
    assert {folder.name for folder in (tmp_path / "sweep").iterdir()} == {"point-1", "point-2"}
    again = run_points(path, tmp_path / "sweep", Console(quiet=True), resume=True, **options)
    assert again.to_dict() == swept.to_dict()
