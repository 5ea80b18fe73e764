"""Speed of the simulator's engines on this machine, beside that of the bare library: `saguaro bench sim`.

The figures are medians of interleaved repeats in one session; on a shared machine only their ratios travel.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from sim import timeline, vectorized
from sim.agreement import AgreementRecord
from sim.latency import NUM_RESIDUALS, LatencyModel, OperationLatency
from sim.policy import Fallback, Policy, SpeculativeSpeculative, uniform_fan_out
from sim.recursion import expectations
from sim.search_space import SearchSpace, candidates
from sim.streams import replication_seeds
from sim.system import HostTerm, System
from sim.trace import Lane, Operation
from sim.workload import Workload

NUM_PROMPTS, LENGTH, PROMPT_TOKENS = 20, 256, 64
VOCABULARY, NUM_CANDIDATES = 64, 33
SEED = 20260311
NUM_PROCESSES = 2
POLICY = SpeculativeSpeculative(5, uniform_fan_out(5, 18), uniform_fan_out(5, 18), Fallback.DRAFT)
SPACE = SearchSpace(tuple(range(1, 9)), tuple(range(4, 33)))  # uniform, geometric, exact; draft and none


@dataclass(frozen=True)
class Sizes:
    """How much of everything a benchmark does."""

    num_repeats: int = 5
    num_policies: int = 1200
    des_rounds: int = 100_000
    vectorized_rounds: int = 10_000_000
    long_run_rounds: int = 1_000_000


REDUCED = Sizes(num_repeats=2, num_policies=60, des_rounds=5_000, vectorized_rounds=50_000, long_run_rounds=20_000)


def bench_sim(sizes: Sizes, progress: Callable[[str], None]) -> dict[str, Any]:
    """Policies and rounds per second of every engine, the bare library's rounds, memory, the machine."""
    system, workload = _system(), benchmark_workload()
    policies = _benchmark_policies(sizes.num_policies)
    seeds = _Seeds(workload, system)
    rates: dict[str, list[float]] = {}
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn"), _warm_up) as pool:
        list(pool.map(_predict, [policies[:1]] * NUM_PROCESSES))
        for repeat in range(sizes.num_repeats):
            progress(f"repeat {repeat + 1} of {sizes.num_repeats}")
            for name, rate in (
                ("exact_policies_per_s", lambda: _exact_rate(pool, policies)),
                ("bare_simpy_rounds_per_s", lambda: _bare_rate(sizes.des_rounds)),
                ("des_rounds_per_s", lambda: _des_rate(seeds.for_rounds(sizes.des_rounds), workload, system)),
                (
                    "vectorized_rounds_per_s",
                    lambda: _vectorized_rate(seeds.for_rounds(sizes.vectorized_rounds), workload, system),
                ),
            ):
                rates.setdefault(name, []).append(rate())
    progress(f"memory over {sizes.long_run_rounds:,} rounds")
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        growth = fresh.submit(_growth_over, seeds.for_rounds(sizes.long_run_rounds)).result()
    return {
        **{name: round(float(np.median(values)), 1) for name, values in rates.items()},
        "des_over_bare_simpy": round(
            float(np.median(np.divide(rates["des_rounds_per_s"], rates["bare_simpy_rounds_per_s"]))), 3
        ),
        "peak_rss_bytes": max(
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        * 1024,
        "rss_growth_bytes": growth,
        "long_run_rounds": sizes.long_run_rounds,
        "num_policies": len(policies),
        "num_processes_exact": NUM_PROCESSES,
        "all_repeats": {name: [round(value, 1) for value in values] for name, values in rates.items()},
        "machine": machine(),
    }


# ------------------------------------------------------------------------------------------------------- what is timed


def _exact_rate(pool: ProcessPoolExecutor, policies: Sequence[Policy]) -> float:
    """Half of the lengths in each process: policies of one length share their laws."""
    chunks = [[p for p in policies if p.speculation_length % 4 in part] for part in ((0, 1), (2, 3))]
    start_s = time.perf_counter()
    num = sum(pool.map(_predict, chunks))
    return num / (time.perf_counter() - start_s)


def _warm_up() -> None:
    """Imports and the system are made before anything is timed."""
    _system()


@cache
def _system() -> System:
    return benchmark_system()


def _predict(policies: Sequence[Policy]) -> int:
    """What an agreement remembers of laws once asked for belongs to the prediction: every call takes a fresh record."""
    system = replace(_system(), agreement=replace(_system().agreement))  # type: ignore[type-var]
    return len(expectations(policies, benchmark_workload(), system))


def _des_rate(seeds: Sequence[int], workload: Workload, system: System) -> float:
    start_s = time.perf_counter()
    runs = timeline.totals(POLICY, workload, system, seeds)
    return float(sum(run.num_rounds.sum() for run in runs)) / (time.perf_counter() - start_s)


def _vectorized_rate(seeds: Sequence[int], workload: Workload, system: System) -> float:
    start_s = time.perf_counter()
    mean = vectorized.replicate(POLICY, workload, system, seeds)
    return float(mean.num_rounds.sum()) * len(seeds) / (time.perf_counter() - start_s)


def _bare_rate(num_rounds: int) -> float:
    """Two SimPy processes that hand each other an event and let time pass: the least that a round can cost."""
    env = simpy.Environment()
    asked, answered = env.event(), env.event()

    def target() -> Iterator[simpy.Event]:
        nonlocal asked, answered
        for _ in range(num_rounds):
            answered = env.event()
            asked.succeed()
            yield answered
            yield env.timeout(1.0)

    def draft() -> Iterator[simpy.Event]:
        nonlocal asked, answered
        for _ in range(num_rounds):
            yield asked
            asked = env.event()
            answered.succeed()
            yield env.timeout(0.9)

    env.process(target())  # type: ignore[arg-type]
    env.process(draft())  # type: ignore[arg-type]
    start_s = time.perf_counter()
    env.run()
    return num_rounds / (time.perf_counter() - start_s)


def _growth_over(seeds: Sequence[int]) -> int:
    """By how much the resident size of a new process grows from a short event simulation to the end of a long one."""
    workload, system = benchmark_workload(), _system()
    timeline.totals(POLICY, workload, system, seeds[: max(1, len(seeds) // 20)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timeline.totals(POLICY, workload, system, seeds)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


class _Seeds:
    """How many replications make a number of rounds."""

    def __init__(self, workload: Workload, system: System) -> None:
        self.rounds_of_one = float(expectations([POLICY], workload, system)[0].num_rounds.sum())

    def for_rounds(self, num_rounds: int) -> list[int]:
        return replication_seeds(SEED, max(1, round(num_rounds / self.rounds_of_one)))


# ------------------------------------------------------------------------------------------------------ what it runs on


def benchmark_workload() -> Workload:
    return Workload("benchmark", ((0,) * PROMPT_TOKENS,) * NUM_PROMPTS, LENGTH, temperature=1.0)


def benchmark_system(tree_step_s: float = 6e-4) -> System:
    """Operations of a few milliseconds with a spread of 10 %, for one to eight rows, around `benchmark_record`."""
    rng = np.random.default_rng(SEED)

    def table(operation: Operation, base_s: float, per_token_s: float) -> OperationLatency:
        def of_rows(num_rows: int) -> dict[int, tuple[tuple[int, float], ...]]:
            widths = (1, 2, 9, 64)
            return {w: tuple((c, base_s + num_rows * (per_token_s * w + 1e-6 * c)) for c in (0, 1024)) for w in widths}

        residuals = tuple(rng.normal(1.0, 0.1, NUM_RESIDUALS).clip(0.5))
        return OperationLatency(operation, of_rows(1), residuals, {8: of_rows(8)})

    return System(
        latency=LatencyModel(
            {
                (Lane.TARGET, Operation.VERIFY): table(Operation.VERIFY, 4e-3, 1e-4),
                (Lane.DRAFT, Operation.DRAFT_STEP): table(Operation.DRAFT_STEP, 5e-4, 0.0),
                (Lane.DRAFT, Operation.GLUE): table(Operation.GLUE, 6e-4, 1e-5),
                (Lane.DRAFT, Operation.TREE_STEP): table(Operation.TREE_STEP, tree_step_s, 1e-5),
            }
        ),
        contention=dict.fromkeys(Lane, 1.05),
        host_s=dict.fromkeys(HostTerm, 2e-4),
        agreement=benchmark_record(),
        identity={"source": "benchmark"},
    )


def benchmark_record(num_prompts: int = NUM_PROMPTS, length: int = LENGTH) -> AgreementRecord:
    """Texts drawn from random distributions p, scored by q = a mixture of p and noise; the same on every machine."""
    rng = np.random.default_rng(SEED)
    num_rows = num_prompts * length
    p = rng.dirichlet(np.full(VOCABULARY, 0.05), num_rows)
    q = 0.7 * p + 0.3 * rng.dirichlet(np.full(VOCABULARY, 0.05), num_rows)
    token = (rng.random(num_rows)[:, None] >= p.cumsum(1)).sum(1).clip(max=VOCABULARY - 1)
    order = np.argsort(-q, axis=1, kind="stable")
    row = np.arange(num_rows)
    top = order[:, :NUM_CANDIDATES]
    prompt = tuple(int(t) for t in rng.integers(0, VOCABULARY, PROMPT_TOKENS))
    return AgreementRecord(
        identity={
            "dataset": "benchmark",
            "temperature": 1.0,
            "stop_ids": [],
            "max_new_tokens": length,
            "vocab_size": VOCABULARY,
        },
        prompt_length=np.full(num_prompts, PROMPT_TOKENS),
        prompt_tokens=(prompt,) * num_prompts,
        stopped=np.zeros(num_prompts, dtype=bool),
        prompt=np.repeat(np.arange(num_prompts), length),
        position=np.tile(np.arange(length), num_prompts),
        token=token,
        log_p=np.log(p[row, token]),
        log_q=np.log(q[row, token]),
        rank=np.argsort(order, axis=1)[row, token],
        overlap=np.minimum(p, q).sum(1),
        top_token=top,
        top_p=np.take_along_axis(p, top, 1),
        top_q=np.take_along_axis(q, top, 1),
    )


def _benchmark_policies(num: int) -> list[Policy]:
    """SSD policies of the space, spread over it."""
    everything = [
        policy for policy in candidates(SPACE, benchmark_record()) if isinstance(policy, SpeculativeSpeculative)
    ]
    picked = np.linspace(0, len(everything) - 1, min(num, len(everything))).astype(int)
    return [everything[index] for index in picked]


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "num_cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("numpy", "simpy")},
    }
