"""What a plan starts from: a system and its workload, measured or made of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from calibration.doubts import doubts_about
from experiments.config import SearchConfig
from experiments.numbers import Numbers, read_numbers
from experiments.recorded_workload import recorded_workload
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.latency import Beyond
from sim.system import System
from sim.workload import Workload


@dataclass(frozen=True)
class Plan:
    """A system, what it decodes, what had to be assumed, and what to doubt before all else. Only a file of numbers says
    what to search, and what is only known to lie in a range."""

    system: System
    workload: Workload
    search: SearchConfig | None = None
    assumptions: tuple[str, ...] = ()
    numbers: Numbers | None = None
    doubts: tuple[str, ...] = ()


def read_plan(source: Path, batch_size: int | None = None, beyond: str | None = None) -> Plan:
    """From a system.json, as `saguaro fit` writes it, or a YAML file of numbers. `batch_size` of a system.json is 1
    unless given; a file of numbers says its own. `beyond` takes the place of what a system.json says of latencies that
    were not profiled; numbers are functions of every size."""
    if source.suffix in (".yaml", ".yml"):
        if batch_size is not None:
            raise BadInput(
                "--batch-size", "goes with a system.json; a file of numbers says text.batch_size", batch_size
            )
        if beyond is not None:
            raise BadInput("--beyond", "goes with a system.json; numbers cover every size that occurs", str(beyond))
        return plan_from(read_numbers(source))
    system = System.read(source)
    if beyond is not None:
        system = replace(system, latency=replace(system.latency, beyond=Beyond(beyond)))
    doubts = doubts_about(system.agreement) if isinstance(system.agreement, AgreementRecord) else []
    workload = replace(recorded_workload(system.agreement), batch_size=batch_size or 1)
    return Plan(system, workload, doubts=tuple(doubts))


def plan_from(numbers: Numbers) -> Plan:
    """What a file of numbers describes."""
    return Plan(numbers.system, numbers.workload, numbers.search, numbers.assumptions, numbers)


def best_engine(workload: Workload, system: System) -> str:
    """The surest engine that knows the workload to its end: the exact one leaves out the ends of batches, where
    speculating policies lose most."""
    if system.placement.num_targets > 1:
        return "des"
    return "exact" if workload.batch_size == 1 else "vectorized"
