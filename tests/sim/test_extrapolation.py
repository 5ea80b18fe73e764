"""Beyond the profiled range: refused unless asked for; then flagged, monotone, and never below what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.extrapolation import REACH, extended
from sim.latency import Beyond, LatencyModel, OperationLatency, OutsideProfile
from sim.load import ClosedLoop
from sim.policy import Autoregressive, Speculative, SpeculativeSpeculative
from sim.search import search
from sim.search_space import SearchSpace
from sim.serving import serve
from sim.simulate import predict, predict_all, simulate
from sim.system import System
from sim.trace import Lane, Operation
from tests.sim.strategies import MOST_ROWS, batched
from tests.sim.toy import markov, record_of, system_of, workload_of

SSD = SpeculativeSpeculative(3, (2, 2, 1, 2), (2, 1, 1, 1))


@pytest.fixture
def system() -> System:
    record = record_of(*markov(2), num_prompts=24, length=12, seed=5)
    known = system_of(record, verify_s=0.010, verify_per_token_s=0.0007, host_s=0.0003)
    return batched(known, 0.001)


def extrapolating(system: System) -> System:
    return replace(system, latency=replace(system.latency, beyond=Beyond.EXTRAPOLATE))


def narrow(system: System, widest: int) -> System:
    """Without the widths above `widest`."""

    def cut(table: OperationLatency) -> OperationLatency:
        few = {
            rows: {width: row for width, row in own.items() if width <= widest} for rows, own in table.batched.items()
        }
        return replace(table, knots={w: row for w, row in table.knots.items() if w <= widest}, batched=few)

    return replace(system, latency=LatencyModel({key: cut(table) for key, table in system.latency.operations.items()}))


# --------------------------------------------------------------------------------------------------------------- tables


ascending = st.lists(st.integers(1, 40), min_size=2, max_size=4, unique=True).map(sorted)
seconds = st.floats(1e-5, 1.0)


@st.composite
def tables(draw) -> OperationLatency:
    """Any times at all on a grid of rows, widths and contexts: noise makes them fall as well as rise."""
    rows, widths, contexts = [1, *(n + 1 for n in draw(ascending))], draw(ascending), draw(ascending)
    grid = {b: {w: tuple((c, draw(seconds)) for c in contexts) for w in widths} for b in rows}
    return OperationLatency(Operation.VERIFY, grid.pop(1), (1.0,), grid)


@settings(max_examples=60)
@given(tables(), st.data())
def test_inside_nothing_changes(table: OperationLatency, data) -> None:
    rows, widths = [1, *table.batched], list(table.knots)
    contexts = [context for context, _ in table.knots[widths[0]]]
    b = data.draw(st.integers(min(rows), max(rows)))
    w, c = (data.draw(st.floats(min(axis), max(axis))) for axis in (widths, contexts))
    assert float(table.extended.location_s(w, c, b)) == pytest.approx(float(table.location_s(w, c, b)))


@settings(max_examples=100)
@given(tables(), st.data())
def test_beyond_each_axis_times_do_not_fall_and_stay_above_the_last_knot(table: OperationLatency, data) -> None:
    last = {
        "rows": max(table.batched),
        "tokens": max(table.knots),
        "context": max(context for context, _ in next(iter(table.knots.values()))),
    }
    axis = data.draw(st.sampled_from(list(last)))
    numbers = {"rows": st.integers, "tokens": st.floats, "context": st.floats}[axis]
    less, more = sorted(data.draw(numbers(last[axis], REACH * last[axis])) for _ in range(2))

    def at(number: float) -> float:
        sizes = last | {axis: number}
        return float(table.extended.location_s(sizes["tokens"], sizes["context"], sizes["rows"]))

    assert 0 < at(last[axis]) <= at(less) * (1 + 1e-9)
    assert at(less) <= at(more) * (1 + 1e-9)


def test_a_line_goes_on_as_a_line_and_a_flat_end_does_not_hide_the_rise_before_it() -> None:
    def knots(*times_s: float) -> dict[int, tuple[tuple[int, float], ...]]:
        return {width: ((0, s), (64, s)) for width, s in zip((1, 2, 4, 8), times_s, strict=True)}

    line = OperationLatency(Operation.VERIFY, knots(0.011, 0.012, 0.014, 0.018), (1.0,)).extended
    assert float(line.location_s(100, 500)) == pytest.approx(0.110)
    flat_end = OperationLatency(Operation.VERIFY, knots(0.010, 0.010, 0.017, 0.017), (1.0,)).extended
    assert float(flat_end.location_s(15, 0)) == pytest.approx(0.017 + 7 * 0.001)
    falling = OperationLatency(Operation.VERIFY, knots(0.020, 0.018, 0.016, 0.014), (1.0,)).extended
    assert float(falling.location_s(64, 0)) == pytest.approx(0.014)


def test_less_than_was_profiled_takes_as_long_as_the_least() -> None:
    table = OperationLatency(
        Operation.TREE_STEP, {4: ((32, 0.002), (64, 0.004)), 8: ((32, 0.003), (64, 0.005))}, (1.0,)
    )
    assert float(table.extended.location_s(1, 0)) == pytest.approx(0.002)


def test_a_single_profiled_number_has_no_slope() -> None:
    """Neither more rows than one, nor more tokens, nor another context is told by one cell."""
    assert extended({1: {4: ((32, 0.01),)}}) == {1: {4: ((32, 0.01),)}}
    one_number_of_rows = OperationLatency(Operation.VERIFY, {1: ((0, 0.01), (64, 0.01))}, (1.0,)).extended
    with pytest.raises(OutsideProfile, match=r"number of rows .* range that extrapolation reaches 1\.\.1"):
        one_number_of_rows.location_s(1, 0, 2)


# ---------------------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("engine", ["vectorized", "des"])
def test_more_rows_than_profiled_are_refused_or_flagged(system: System, engine: str) -> None:
    profiled, wanted = (replace(workload_of(system.agreement), batch_size=rows) for rows in (MOST_ROWS, 3 * MOST_ROWS))
    with pytest.raises(BadInput, match=r"number of rows must be in the profiled range 1\.\.8, got"):
        predict(SSD, wanted, system, engine=engine)
    for policy in (Autoregressive(), Speculative(3), SSD):
        inside = predict(policy, profiled, extrapolating(system), engine=engine)
        assert inside.to_dict() == predict(policy, profiled, system, engine=engine).to_dict()
        found = predict(policy, wanted, extrapolating(system), engine=engine)
        assert found.notes[0].startswith("extrapolated beyond the profile (latency of ")
        assert found.to_dict()["notes"] == list(found.notes)


def test_a_round_of_more_rows_takes_no_less_time(system: System) -> None:
    table = system.latency[Lane.TARGET, Operation.VERIFY].extended
    times_s = [float(table.location_s(4, 10, rows)) for rows in (MOST_ROWS, 3 * MOST_ROWS)]
    assert times_s[1] - times_s[0] == pytest.approx(2 * MOST_ROWS * 0.001)


def test_engines_agree_on_what_lies_beyond(system: System) -> None:
    known = extrapolating(narrow(system, 2))
    workload = workload_of(known.agreement)
    for policy in (Speculative(3), SSD):
        exact = predict(policy, workload, known)
        assert exact.notes[0].startswith("extrapolated")
        for engine in ("vectorized", "des"):
            other = predict(policy, workload, known, engine=engine, relative_half_width=0.01)
            assert other.tokens_per_s.value == pytest.approx(exact.tokens_per_s.value, rel=0.03)


def test_only_the_predictions_that_need_it_are_flagged(system: System) -> None:
    known = extrapolating(narrow(system, 2))
    workload = workload_of(known.agreement)
    predictions = predict_all([Autoregressive(), Speculative(1), Speculative(3)], workload, known)
    assert [bool(p.notes) for p in predictions] == [False, False, True]
    found = search(SearchSpace((1, 3), (4,)), workload, known)
    assert not found.infeasible and {bool(p.notes) for p in found.ranked} == {True, False}
    assert search(SearchSpace((1, 3), (4,)), workload, narrow(system, 2)).infeasible


def test_nothing_is_said_farther_than_extrapolation_reaches(system: System) -> None:
    too_many = replace(workload_of(system.agreement), batch_size=REACH * MOST_ROWS + 1)
    many_texts = replace(system, agreement=system.agreement.select(np.arange(REACH * MOST_ROWS + 1) % 24))
    with pytest.raises(BadInput, match=r"range that extrapolation reaches 1\.\.128"):
        predict(Autoregressive(), too_many, extrapolating(many_texts), engine="vectorized")


def test_traces_and_served_loads_are_flagged_too(system: System) -> None:
    wanted = replace(workload_of(system.agreement), batch_size=3 * MOST_ROWS)
    assert "number of rows" in simulate(SSD, wanted, extrapolating(system)).meta["extrapolated"]
    inside = replace(wanted, batch_size=2)
    assert "extrapolated" not in simulate(SSD, inside, extrapolating(system)).meta
    tables = dict(system.latency.operations)
    for lane in Lane:
        prefill = {width: ((0, 0.01), (64, 0.01)) for width in (1, 64)}
        tables[lane, Operation.PREFILL] = OperationLatency(Operation.PREFILL, prefill, (1.0,))
    known = extrapolating(replace(system, latency=LatencyModel(tables)))
    reports = [
        serve(Autoregressive(), ClosedLoop(rows, 60, rows), workload_of(known.agreement), known)
        for rows in (MOST_ROWS, 2 * MOST_ROWS)
    ]
    assert reports[0].extrapolated is None and "number of rows" in reports[1].extrapolated


def test_the_choice_is_kept_in_the_file_and_left_out_where_it_is_the_usual_one(system: System, tmp_path) -> None:
    for known in (system, extrapolating(system)):
        known.write(tmp_path / "system.json")
        again = System.read(tmp_path / "system.json")
        assert again.latency == known.latency
        is_told = '"beyond"' in (tmp_path / "system.json").read_text()
        assert is_told == (known.latency.beyond is Beyond.EXTRAPOLATE)
    assert extrapolating(system).as_run_by(SSD).latency.beyond is Beyond.EXTRAPOLATE
    with pytest.raises(BadInput, match="beyond: must be one of refuse, extrapolate, got 'guess'"):
        LatencyModel.from_dict(system.latency.to_dict() | {"beyond": "guess"})
