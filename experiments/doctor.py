"""What this machine has of what the program needs, and the command that installs the rest."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from experiments.bench import model_libraries
from sim.errors import BadInput

PACKAGE = "saguaro-planner"
NEEDED = ("executor",)  # extras without which nothing can be measured; the others are for some uses only
CORES_FOR_OVERLAP = 2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
DOCTOR_HEAD = ("what", "found", "is", "to do")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `is_needed`: without it models cannot be run. `remedy` is empty where nothing is to
    be done."""

    name: str
    found: str
    is_fine: bool
    is_needed: bool = True
    remedy: str = ""

    @property
    def verdict(self) -> str:
        return "fine" if self.is_fine else "missing" if self.is_needed else "absent, not needed by all"

    def row(self) -> tuple[str, str, str, str]:
        """Cells under `DOCTOR_HEAD`."""
        return self.name, self.found, self.verdict, self.remedy


def examine() -> list[Finding]:
    """Versions, cores, threads, devices and pairs."""
    return [_python(), *_packages(), *_cores(), *_devices(), *_pairs()]


def is_ready(findings: list[Finding]) -> bool:
    """Whether nothing that is needed is missing."""
    return all(finding.is_fine for finding in findings if finding.is_needed)


def to_json(findings: list[Finding]) -> dict[str, Any]:
    return {"ready": is_ready(findings), "findings": [asdict(finding) for finding in findings]}


def _python() -> Finding:
    return Finding("python", f"{platform.python_version()}, {platform.platform()}", sys.version_info >= (3, 11))


def _packages() -> Iterator[Finding]:
    """The program itself and every requirement, with the extra that asks for it."""
    yield Finding(PACKAGE, version(PACKAGE), True)
    for line in requires(PACKAGE) or ():
        requirement = Requirement(line)
        extra = _extra(requirement)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""}):
            yield _package(requirement, extra)


def _extra(requirement: Requirement) -> str | None:
    found = re.search(r"extra == ['\"]([^'\"]+)['\"]", str(requirement.marker or ""))
    return found.group(1) if found else None


def _package(requirement: Requirement, extra: str | None) -> Finding:
    wanted = f"{PACKAGE}[{extra}]" if extra else PACKAGE
    is_needed = extra is None or extra in NEEDED
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return Finding(requirement.name, "not installed", False, is_needed, f"pip install '{wanted}'")
    is_fine = requirement.specifier.contains(found, prereleases=True)
    remedy = "" if is_fine else f"pip install '{requirement.name}{requirement.specifier}'"
    return Finding(requirement.name, found, is_fine, is_needed, remedy)


def _cores() -> Iterator[Finding]:
    in_all, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    try:
        with model_libraries():
            from executor.device import num_usable_cores
        usable: int | None = num_usable_cores()
    except BadInput:
        usable = None  # the package that is missing has a finding of its own
    granted = "" if usable is None else f", {usable} after the limit of the control group"
    is_fine = (allowed if usable is None else usable) >= CORES_FOR_OVERLAP
    remedy = "" if is_fine else "allow two cores (taskset, container limits): on one, draft and target take turns"
    yield Finding("cores", f"{in_all}, {allowed} by the affinity mask{granted}", is_fine, False, remedy)
    limits = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    yield Finding("threads", ", ".join(limits) or "no variable limits them; a role on a core of its own uses one", True)


def _devices() -> Iterator[Finding]:
    try:
        with model_libraries():
            from executor.device import describe_gpus
    except BadInput:
        return
    gpus = describe_gpus()
    yield Finding("GPUs", "; ".join(gpus) or "none that torch finds", bool(gpus), False)


def _pairs() -> Iterator[Finding]:
    try:
        with model_libraries():
            from executor.pairs import load_pair
    except BadInput:
        return
    for name, is_needed in (("stdlib", True), ("smollm2", False)):
        try:
            found, is_fine = f"{len(load_pair(name).hashes)} files", True
        except (BadInput, OSError) as error:
            found, is_fine = str(error), False
        remedy = "" if is_fine else f"make {name}" if name == "smollm2" else "install the package again"
        yield Finding(f"pair {name}", found, is_fine, is_needed, remedy)
