"""The checks on the command line: every line says what it is, and the exit code says whether all is right."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import experiments.checks
from executor.fault_check import Aftermath
from executor.law_check import Case, Comparison, Verdict
from experiments.cli import app
from sim.policy import Autoregressive
from sim.workload import Sampling

WITHIN = Comparison(Sampling(1.0, top_k=2), 1000, 0.02, 0.05)
BEYOND = replace(WITHIN, total_variation=0.2)
LOSSLESS = Case("plain", Autoregressive())
CONTROL = Case("faulty", Autoregressive(), fault=lambda: None)
AFTERMATHS = [
    Aftermath("draft killed", "raise", "ended: it died", 0.2, None, is_right=True),
    Aftermath("draft killed", "continue", "went on as AR from round 4", 0.125, 0, is_right=True),
]


@pytest.mark.parametrize(
    ("verdicts", "words", "code"),
    [
        ([Verdict(LOSSLESS, (WITHIN, WITHIN)), Verdict(CONTROL, (BEYOND,))], ("lossless", "wrong, and caught"), 0),
        ([Verdict(LOSSLESS, (WITHIN, BEYOND))], ("NOT LOSSLESS",), 1),
        ([Verdict(CONTROL, (WITHIN,))], ("WRONG, NOT CAUGHT",), 1),
    ],
)
def test_the_law_check(verdicts, words, code, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(experiments.checks, "run_law_check", lambda progress: verdicts)
    result = CliRunner().invoke(app, ["check", "law"])
    assert result.exit_code == code
    for word in (*words, "0.0500", "temperature 1, top_k 2", "1000", "0.0001"):
        assert word in result.output
    result = CliRunner().invoke(app, ["check", "law", "--json"])
    answer = json.loads(result.stdout)
    assert answer["is_right"] == (code == 0) and answer["false_alarm_probability"] == 1e-4
    assert len(answer["cases"]) == len(verdicts)
    assert answer["cases"][0]["comparisons"][0]["threshold"] == 0.05
    assert answer["cases"][0]["comparisons"][0]["setting"]["top_k"] == 2


def test_a_narrow_terminal_shows_every_column(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    case = Case("SSD hits misses and others", Autoregressive(), fault=lambda: None)
    monkeypatch.setattr(experiments.checks, "run_law_check", lambda progress: [Verdict(case, (BEYOND,))])
    shown = CliRunner().invoke(app, ["check", "law"]).output
    assert max(map(len, shown.splitlines())) <= 80
    for word in ("case", "misses", "top_k", "1000", "total variation", "0.2000", "0.0500", "caught"):
        assert word in shown


@pytest.mark.parametrize("is_right", [True, False])
def test_the_fault_check(is_right, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    aftermaths = [AFTERMATHS[0], replace(AFTERMATHS[1], is_right=is_right)]
    monkeypatch.setattr(experiments.checks, "run_fault_check", lambda pair, progress: aftermaths)
    result = CliRunner().invoke(app, ["check", "faults"])
    assert result.exit_code == 1 - is_right
    for word in ("went on as AR from round 4", "0.12", "right", "-", "continue"):
        assert word in result.output
    assert ("WRONG" in result.output) != is_right
    answer = json.loads(CliRunner().invoke(app, ["check", "faults", "--json"]).stdout)
    assert answer["is_right"] == is_right
    assert [fault["tokens_lost"] for fault in answer["faults"]] == [None, 0]


def test_faults_of_an_unknown_pair_are_refused() -> None:
    result = CliRunner().invoke(app, ["check", "faults", "--pair", "no-such-pair"])
    assert "no-such-pair" in str(result.exception)
