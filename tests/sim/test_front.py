"""Objectives, promises, batch sizes, goodput."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sim.errors import BadInput
from sim.front import Point, search_batch_sizes
from sim.goodput import goodput_of_finalists
from sim.latency import LatencyModel, OperationLatency
from sim.load import OpenLoop, Poisson
from sim.objective import Objective, num_devices, tpot_s
from sim.parametric import HitCurve, ParametricAgreement
from sim.placement import Placement
from sim.policy import Autoregressive, Speculative
from sim.search import search
from sim.search_space import SearchSpace
from sim.serving import Slo
from sim.simulate import predict
from sim.ties import simplicity
from sim.trace import Lane, Operation
from tests.sim.toy import system_of, workload_of

SPACE = SearchSpace((1, 2), (4,), ("uniform",), ("draft",))
SIZES = (1, 2, 4)
SPACE_POLICY = Speculative(1)


def exactly(workload, system) -> str:
    return "exact"


@pytest.fixture(scope="module")
def system():
    """Alike texts; every operation of four rows takes 1.5 times as long as of one."""
    curve = (HitCurve(0.4, 0.5),)
    alone = system_of(ParametricAgreement(8, 40, (0.7,), curve, curve, num_texts=4), draft_step_s=0.003)
    tables = {}
    for key, table in alone.latency.operations.items():
        batched = {4: {w: tuple((c, 1.5 * s) for c, s in knots) for w, knots in table.knots.items()}}
        tables[key] = replace(table, batched=batched)
    for lane in Lane:
        widths = {width: ((0, 0.002), (4096, 0.002)) for width in (1, 64)}
        tables[lane, Operation.PREFILL] = OperationLatency(Operation.PREFILL, widths, (1.0,))
    return replace(alone, latency=LatencyModel(tables))


def test_devices_are_those_that_work(system):
    assert num_devices(Autoregressive(), system) == 1
    assert num_devices(Speculative(2), system) == num_devices(SPACE_POLICY, system) == 2
    shared = replace(system, placement=Placement(num_targets=3, num_draft_devices=2))
    assert num_devices(Autoregressive(), shared) == 3 and num_devices(SPACE_POLICY, shared) == 5
    assert num_devices(SPACE_POLICY, replace(system, overlaps=False)) == 1


def test_per_device_the_draft_has_to_earn_its_own(system):
    """SSD is faster than AR, and less than twice as fast: per device AR wins."""
    workload = workload_of(system.agreement)
    by_rate = search(SPACE, workload, system)
    per_device = search(SPACE, workload, system, objective=Objective.THROUGHPUT_PER_DEVICE)
    gain = by_rate.best("ssd").tokens_per_s.value / by_rate.best("ar").tokens_per_s.value
    assert 1 < gain < 2
    assert by_rate.recommended.policy != Autoregressive() == per_device.recommended.policy
    assert per_device.contrasts[by_rate.recommended.policy].ratio == pytest.approx(gain / 2)


def test_a_promise_leaves_out_who_breaks_it(system):
    workload = workload_of(system.agreement)
    free = search(SPACE, workload, system)
    limit_s = tpot_s(free.best("sd"), 1)
    kept = search(SPACE, workload, system, slo_tpot_s=limit_s)
    assert {p.policy for p in free.ranked} == {p.policy for p in kept.ranked} | {p for p, _ in kept.infeasible}
    assert all(tpot_s(p, 1) <= limit_s for p in kept.ranked)
    assert any("ms per token" in reason for _, reason in kept.infeasible)
    with pytest.raises(BadInput, match="slo_tpot_s: is kept by no policy; the quickest takes"):
        search(SPACE, workload, system, slo_tpot_s=1e-6)


def test_front_holds_what_nothing_beats_in_both(system):
    workload = workload_of(system.agreement)
    found = search_batch_sizes(SPACE, workload, system, SIZES, engine_of=exactly)
    assert {point.batch_size for point in found.points} == set(SIZES)
    for point in found.points:
        beaten = [other for other in found.points if other.dominates(point)]
        assert (point in found.front) == (not beaten)
    waits = [point.tpot_s for point in found.front]
    rates = [point.throughput for point in found.front]
    assert waits == sorted(waits) and rates == sorted(rates)


def test_objective_chooses_the_batch_size(system):
    workload = workload_of(system.agreement)
    chosen = {
        objective: search_batch_sizes(SPACE, workload, system, SIZES, engine_of=exactly, objective=objective).chosen
        for objective in (Objective.TOKENS_PER_S, Objective.THROUGHPUT)
    }
    assert chosen[Objective.TOKENS_PER_S].batch_size == 1 and chosen[Objective.THROUGHPUT].batch_size == 4
    by_hand = predict(chosen[Objective.THROUGHPUT].prediction.policy, replace(workload, batch_size=4), system)
    assert chosen[Objective.THROUGHPUT].throughput == pytest.approx(by_hand.tokens_per_s.value)
    assert chosen[Objective.THROUGHPUT].tpot_s == pytest.approx(4 / by_hand.tokens_per_s.value)


def test_sizes_that_cannot_be_served_are_told(system):
    workload = workload_of(system.agreement)
    found = search_batch_sizes(SPACE, workload, system, (1, 8), engine_of=exactly)
    assert set(found.found) == {1} and "number of texts, 4" in found.refused[8]
    with pytest.raises(BadInput, match="batch_sizes: none can be served; 8: "):
        search_batch_sizes(SPACE, workload, system, (8,), engine_of=exactly)


def test_a_point_does_not_beat_its_equal(system):
    workload = workload_of(system.agreement)
    (point,) = search_batch_sizes(SPACE, workload, system, (1,), engine_of=exactly).points
    assert not point.dominates(point)
    assert replace(point, tpot_s=point.tpot_s / 2).dominates(point)
    assert isinstance(point, Point) and math.isclose(point.throughput_per_device * point.num_devices, point.throughput)


def test_goodput_ranks_the_finalists_under_the_load(system):
    """Requests that AR is too slow for: SSD keeps the promise."""
    workload = workload_of(system.agreement)
    found = search(SPACE, workload, system)
    slo = Slo(tpot_s=tpot_s(found.best("sd"), 1))
    load = OpenLoop(Poisson(1.0), 1, 300)
    served = goodput_of_finalists(found, load, slo, workload, system, seed=3)
    goods = [report.goodput_per_s.value if report.goodput_per_s else 0.0 for report in served.ranked]
    assert goods == sorted(goods, reverse=True) and goods[0] > 0
    assert {"AR", found.best("sd").policy.name, found.best("ssd").policy.name} <= {r.name for r in served.ranked}
    assert next(report for report in served.ranked if report.name == "AR").goodput_per_s.value == 0
    tied = {report.name for report in served.ties}
    assert served.recommended == min((p.policy for p in found.ranked if p.policy.name in tied), key=simplicity)
    with pytest.raises(BadInput, match="load: is served as promised by no finalist"):
        goodput_of_finalists(found, load, Slo(tpot_s=1e-9), workload, system)
