"""The benchmark of the simulator and the table of its engines, at a small size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import engine_agreement
from experiments.benchmark import Sizes, bench_sim
from experiments.engine_agreement import Case, compare_engines, to_json


def test_every_figure_is_there_and_positive() -> None:
    small = Sizes(num_repeats=1, num_policies=6, des_rounds=500, vectorized_rounds=5_000, long_run_rounds=2_000)
    said: list[str] = []
    figures = bench_sim(small, said.append)
    for name in ("exact_policies_per_s", "des_rounds_per_s", "bare_simpy_rounds_per_s", "vectorized_rounds_per_s"):
        assert figures[name] > 0 and len(figures["all_repeats"][name]) == 1
    assert figures["peak_rss_bytes"] > 1e7 and figures["rss_growth_bytes"] >= 0
    assert figures["machine"]["num_cores"] >= 1 and said


def test_engines_agree_on_every_kind_of_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few runs of short texts; false alarm 1e-3 in all (see `engine_agreement.ALARM`)."""
    monkeypatch.setattr(engine_agreement, "NUM_PROMPTS", 4)
    monkeypatch.setattr(engine_agreement, "LENGTH", 24)
    cases = compare_engines(lambda doing: None, relative_half_width=0.05)
    assert [case.policy for case in cases if not case.agrees] == []
    assert {case.system for case in cases} == {"record", "devices apart", "two draft devices", "summary numbers"}
    refused = [row for row in to_json(cases) if row["exact"] is None]
    assert refused and all(row["batch_size"] == 3 and "wait for each other" in row["refusal"] for row in refused)


def test_a_difference_and_a_missing_figure_are_no_agreement() -> None:
    case = Case("AR", 1, "record", 100.0, "", False, 101.0, 0.1, 100.0, 0.1, z=12.0)
    assert not case.agrees
    assert replace(case, z=1.0).agrees
    assert not replace(case, z=1.0, exact=None, refusal="latency of verify: was not profiled").agrees
