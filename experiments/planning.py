"""What a plan starts from: a system and its workload, measured or made of numbers."""

from __future__ import annotations

from collections.abc import Sequence
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


def is_numbers(source: Path) -> bool:
    """Whether a plan's source is a file of numbers."""
    return source.suffix in (".yaml", ".yml")


def read_plan(
    source: Path, batch_size: int | None = None, beyond: str | None = None, settings: Sequence[str] = ()
) -> Plan:
    """From a system.json, as `saguaro fit` writes it, or a YAML file of numbers. `batch_size` of a system.json is 1
    unless given, that of a file of numbers its own. `beyond` takes the place of what a system.json says of latencies
    that were not profiled; numbers are functions of every size. `settings` take the place of a file's numbers."""
    if is_numbers(source):
        if beyond is not None:
            raise BadInput("--beyond", "goes with a system.json; numbers cover every size that occurs", str(beyond))
        return plan_from(read_numbers(source, settings, batch_size))
    if settings:
        raise BadInput("--set", "gives numbers of a YAML file; a system.json was measured", settings[0])
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
