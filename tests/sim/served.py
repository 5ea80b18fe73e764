"""Toy systems that serve: tables of rows and prefills, and runs whose tally and trace can be compared."""

from __future__ import annotations

from dataclasses import replace

from sim.latency import LatencyModel, OperationLatency
from sim.policy import Fallback, SpeculativeSpeculative
from sim.serving import ServedRun, Slo, Tally
from sim.system import System
from sim.trace import Lane, Operation
from tests.sim.toy import workload_of


def ssd(K: int, F: int, fallback: Fallback = Fallback.DRAFT, **options) -> SpeculativeSpeculative:
    after_miss = (F,) * (K + 1) if fallback is not Fallback.NONE else (F,)
    return SpeculativeSpeculative(K, (F,) * (K + 1), after_miss, fallback, **options)


def served(system: System, *, target_s: float = 0.0, draft_s: float = 0.0, most_rows: int = 64) -> System:
    """The system with prefills of constant time, and with batches that take what one row does where it has none."""
    tables = {
        key: table if table.batched else replace(table, batched={most_rows: table.knots})
        for key, table in system.latency.operations.items()
    }
    for lane, seconds in ((Lane.TARGET, target_s), (Lane.DRAFT, draft_s)):
        knots = {1: ((0, seconds),), 4096: ((0, seconds),)}
        tables[lane, Operation.PREFILL] = OperationLatency(Operation.PREFILL, knots, (1.0,))
    return replace(system, latency=LatencyModel(tables))


def run_of(policy, load, system: System, seed: int = 0, *, warm_up: float = 0.2, record: bool = True, **limits):
    """A run that has ended, with its tally and, if recorded, its trace."""
    tally = Tally(load.num_requests, int(warm_up * load.num_requests), Slo(**limits))
    run = ServedRun(policy, load, workload_of(system.agreement), system, seed, tally=tally, record=record)
    run.run()
    return run
