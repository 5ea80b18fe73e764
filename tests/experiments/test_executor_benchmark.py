"""The benchmark of the executor, at a small size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import executor_benchmark
from experiments.executor_benchmark import COMPARED, Sizes, bench_executor, table
from sim.errors import BadInput

SMALL = Sizes(num_tokens=6, prompt_tokens=16, context=24, budget_s=0.0, batch_sizes=(1, 2))
SPEEDUPS = {"ssd_over_sd", "ssd_over_ar", "sd_over_ar"}


@pytest.fixture(scope="module")
def figures():
    return bench_executor(SMALL, lambda doing: None, ("stdlib", "missing"), concurrency="serial")


def test_every_ratio_is_there_with_its_interval(figures) -> None:
    ratios = [figures[name] for name in (*COMPARED, "round_efficiency_on_hits")]
    for name in ("verify_over_ar_step", "verify_over_ar_step_before"):
        assert list(figures[name]) == [str(length) for length in range(1, 9)]
        ratios += figures[name].values()
    assert set(figures["speedups"]) == {"stdlib"}
    assert set(figures["speedups"]["stdlib"]) == {"1", "2"}
    for by_temperature in figures["speedups"]["stdlib"].values():
        assert set(by_temperature) == {"0", "1"}
        for of_policies in by_temperature.values():
            assert set(of_policies) == SPEEDUPS
            ratios += of_policies.values()
    for ratio in ratios:
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"] and ratio["n"] >= executor_benchmark.FEWEST_UNITS
    assert 0 < figures["round_efficiency_on_hits"]["value"] < 1
    assert figures["machine"]["num_cores"] >= 1 and figures["identity"]["pair"] == "stdlib"
    assert figures["policies"]["2"]["ssd"]["speculation_length"] == executor_benchmark.SPECULATION_LENGTH
    json.dumps(figures, allow_nan=False)


def test_all_ways_to_decode_give_the_same_texts(figures) -> None:
    ways = {way for pair in COMPARED.values() for way in pair}
    assert figures["num_texts_as_generate"] == dict.fromkeys(ways, figures["num_texts"])


def test_a_further_pair_that_is_missing_is_named_and_the_first_must_be_there(figures) -> None:
    assert "missing" in figures["not_run"]["missing"] and figures["other_pairs"] == {}
    with pytest.raises(BadInput, match="missing"):
        bench_executor(SMALL, lambda doing: None, ("missing", "stdlib"), concurrency="serial")


def test_the_table_says_what_was_measured(figures) -> None:
    rows = table(figures)
    names = [name for name, *_ in rows]
    assert len(set(names)) == len(names)
    assert {"stdlib: SD over assisted generation", "stdlib, batch 2, T=1: SSD over AR"} <= set(names)
    assert all(len(row) == 4 for row in rows)


def test_units_go_through_all_works_in_turns_until_the_time_is_up() -> None:
    done: list[tuple[str, int]] = []
    works = {name: lambda unit, name=name: done.append((name, unit)) for name in "abc"}
    times_s, results = executor_benchmark._in_turns(works, num_units=10, budget_s=0.0)
    assert "".join(name for name, _ in done) == "abc" + "abc" + "bca" + "cab"
    assert all(len(values) == len(results[name]) == 3 for name, values in times_s.items())
    assert len(executor_benchmark._in_turns(works, num_units=2, budget_s=60.0)[0]["a"]) == 2


def test_a_ratio_of_medians_does_not_mind_an_outlier() -> None:
    below = np.tile([1.0, 1.1, 0.9], 10)
    above = 3 * below
    above[4] = 1000
    ratio = executor_benchmark._ratio_of_medians(above, below)
    assert ratio.value == pytest.approx(3) and 2.4 < ratio.low <= ratio.high < 3.7 and ratio.n == 30
