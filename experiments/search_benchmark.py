"""Speed of an exhaustive exact search on this machine: `saguaro bench search`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from experiments.benchmark import SPACE, benchmark_system, benchmark_workload, machine
from sim.search import search
from sim.workers import Workers, num_cores


def bench_search(progress: Callable[[str], None], *, num_workers: int | None = None) -> dict[str, Any]:
    """Policies of the simulator benchmark's space, and the seconds from nothing known to the recommendation, in this
    process alone and with `num_workers` (the cores of this machine unless given)."""
    figures: dict[str, Any] = {"machine": machine()}
    for name, workers in (("one_worker", Workers(1)), ("all_workers", Workers(num_workers or num_cores()))):
        progress(f"search with {workers.num} workers")
        system = benchmark_system()
        fresh = replace(system, agreement=replace(system.agreement))  # type: ignore[type-var]
        start_s = time.perf_counter()
        found = search(SPACE, benchmark_workload(), fresh, workers=workers)
        seconds = time.perf_counter() - start_s
        figures[name] = {
            "num_workers": workers.num,
            "num_policies": found.num_policies,
            "seconds": round(seconds, 2),
            "policies_per_s": round(found.num_policies / seconds, 1),
            "recommended": found.recommended.policy.name,
            "num_ties": len(found.ties),
        }
    return figures
