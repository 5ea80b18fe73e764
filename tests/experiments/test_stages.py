"""Progress: a line per stage where there is no terminal, with the time left while a stage is long."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

import experiments.stages
from experiments.stages import Stages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(experiments.stages.time, "perf_counter", lambda: now[0])
    yield now


def run_stage(clock: list[float], *, seconds_per_step: float, total: int = 10, quiet: bool = False) -> list[str]:
    shown = io.StringIO()
    stages = Stages(Console(file=shown, width=120), quiet=quiet)
    with stages.counted("decode", total) as advance:
        for _ in range(total):
            clock[0] += seconds_per_step
            advance()
    assert stages.durations_s == {"decode": pytest.approx(total * seconds_per_step)}
    return shown.getvalue().splitlines()


def test_a_long_stage_says_once_how_long_it_still_takes(clock: list[float]) -> None:
    lines = run_stage(clock, seconds_per_step=2.0)
    assert lines == ["decode: 2 of 10, about 16 s left", f"{'decode':<44}    20.0 s"]


def test_a_short_stage_is_one_line(clock: list[float]) -> None:
    assert run_stage(clock, seconds_per_step=0.1) == [f"{'decode':<44}     1.0 s"]


def test_quiet_says_nothing(clock: list[float]) -> None:
    assert run_stage(clock, seconds_per_step=2.0, quiet=True) == []
