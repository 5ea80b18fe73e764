"""A system: everything the simulator knows about one model pair on one machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement, AgreementRecord
from sim.errors import BadInput, require_mapping, require_number
from sim.latency import (
    Beyond,
    LatencyModel,
    OutsideProfile,
    checked_residuals,
    lane_and_operation,
    latest_of,
    sum_of_independent,
)
from sim.memory import Memory
from sim.parametric import ParametricAgreement
from sim.placement import Placement
from sim.policy import SCHEMA_KINDS, Policy, SpeculativeSpeculative
from sim.trace import Lane, Operation, Source

SCHEMA = 1
_IN_SITU = "in_situ_residual_ratios"
REQUIRED = ("identity", "agreement", "host_s", "contention", "latency", "overlaps", _IN_SITU)
OPTIONAL = ("schema", "placement", "memory")  # files of an earlier release lack the last two
KindT = TypeVar("KindT", bound=StrEnum)
AnswerT = TypeVar("AnswerT")
FloatArray = NDArray[np.float64]
InSitu = Mapping[tuple[Lane, Operation], tuple[float, ...]]  # equally likely ratios to the latency model's location


class HostTerm(StrEnum):
    """Time of a round that no operation explains (hand-over, look-up, Python), by the kind of round."""

    AUTOREGRESSIVE = "ar"
    SPECULATIVE = "sd"
    HIT = "hit"  # SSD: from the later of outcome and build to the start of the verification of a prepared speculation
    MISS = "miss"  # SSD: the same after a miss, the fallback's draft steps left out; also before the first round
    UNDRAFTED_MISS = "undrafted_miss"  # SSD: the same where the fallback is not the draft model


def host_term(policy: Policy, source: Source) -> HostTerm:
    """The host time of a round whose speculation came from `source`."""
    if isinstance(policy, SpeculativeSpeculative):
        missed = HostTerm.MISS if policy.waits_for_draft(Source.MISS) else HostTerm.UNDRAFTED_MISS
        return HostTerm.HIT if source is Source.HIT else missed
    return HostTerm.SPECULATIVE if policy.speculation_length else HostTerm.AUTOREGRESSIVE


_PARTS = {"latency": LatencyModel, "agreement": Agreement, "placement": Placement, "memory": Memory}


@dataclass(frozen=True)
class System:
    """Latency of each operation alone, slow-down of each lane while the other works, host times, agreement.

    `contention[lane]` >= 1 multiplies the lane's operations while the other lane is busy. Where the roles do not
    overlap, a build runs before the verification and nothing is ever busy beside anything. `identity` says which pair,
    device and library versions it holds for. `in_situ[kind]` replaces residuals of the latency model by those seen in
    runs of a decoder: alone and again and again an operation runs faster or slower than between others. Raises
    `BadInput` naming the field that is of another type, outside its range or incomplete.
    """

    latency: LatencyModel
    contention: Mapping[Lane, float]
    host_s: Mapping[HostTerm, float]
    agreement: Agreement
    identity: dict[str, Any]
    overlaps: bool = True
    in_situ: Mapping[str, InSitu] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise BadInput(name, f"must be a {kind.__name__}", getattr(self, name))
        require_mapping("identity", self.identity)
        if not isinstance(self.overlaps, bool):
            raise BadInput("overlaps", "must be true or false", self.overlaps)
        object.__setattr__(self, "contention", _numbers("contention", self.contention, Lane, minimum=1))
        object.__setattr__(self, "host_s", _numbers("host_s", self.host_s, HostTerm, minimum=0))
        seen = require_mapping("in_situ", self.in_situ, SCHEMA_KINDS)
        in_situ = {kind: _checked_in_situ(f"in_situ.{kind}", rows, self.latency) for kind, rows in seen.items()}
        object.__setattr__(self, "in_situ", in_situ)

    def as_run_by(self, policy: Policy) -> System:
        """This system with the residuals of runs of the policy's decoder, where there are any."""
        kind = policy.to_dict()["kind"] if policy.speculation_length else "ar"
        if kind not in self._by_kind:
            tables = dict(self.latency.operations)
            for key, residuals in self.in_situ.get(kind, {}).items():
                tables[key] = replace(tables[key], residuals=residuals)
            self._by_kind[kind] = replace(self, latency=replace(self.latency, operations=tables), in_situ={})
        return self._by_kind[kind]

    def num_devices(self, *, uses_draft: bool) -> int:
        """Devices that work, the targets and, where drafts are made beside them, those of the draft."""
        return self.placement.num_targets + (self.placement.num_draft_devices if uses_draft and self.overlaps else 0)

    @cached_property
    def _by_kind(self) -> dict[str, System]:
        return {}

    def answer(self, ask: Callable[[System], AnswerT]) -> tuple[AnswerT, str | None]:
        """What `ask` makes of this system, and a note if latencies beyond the profiled range went into it.

        Raises `OutsideProfile` where that range does not suffice and may not be left, or not so far.
        """
        if self.latency.beyond is Beyond.REFUSE:
            return ask(self), None
        try:
            return ask(self._within_profile), None
        except OutsideProfile as outside:
            return ask(self), f"extrapolated beyond the profile ({outside})"

    @cached_property
    def _within_profile(self) -> System:
        return replace(self, latency=replace(self.latency, beyond=Beyond.REFUSE))

    def mean_s(
        self, lane: Lane, operation: Operation, num_tokens: float, context: Any, *, beside: bool, batch_size: int = 1
    ) -> FloatArray:
        """Mean duration at the contexts given; `beside` means while the other lane works."""
        mean_s = self.latency[lane, operation].mean_s(num_tokens, context, batch_size)
        return mean_s * self.slowdown(lane, beside=beside)

    def samples_s(
        self, lane: Lane, operation: Operation, num_tokens: float, context: float, *, beside: bool, batch_size: int = 1
    ) -> FloatArray:
        """(num_residuals,) equally likely durations."""
        samples_s = self.latency[lane, operation].samples_s(num_tokens, context, batch_size)
        return samples_s * self.slowdown(lane, beside=beside)

    def slowdown(self, lane: Lane, *, beside: bool) -> float:
        """Factor on the operations of a lane, `beside` the other lane's work or alone."""
        return self.contention[lane] if beside and self.overlaps else 1.0

    def draft_samples_s(self, num_drafted: int, context: float, batch_size: int = 1) -> FloatArray:
        """Equally likely durations of `num_drafted` >= 1 draft steps one after another, the target idle."""
        table = self.latency[Lane.DRAFT, Operation.DRAFT_STEP]
        contexts = context + np.arange(num_drafted)
        shares = self.placement.shares_of_rows(batch_size)
        return latest_of([table.sum_samples_s(1, contexts, rows) for rows in shares])

    def build_samples_s(
        self, num_drafted: float, num_branches: float, num_steps: int, context: float, batch_size: int = 1
    ) -> FloatArray:
        """Equally likely durations of the build that goes with the verification of `num_drafted` draft tokens.

        Of `batch_size` rows with `num_branches` branches each; counts and context are means where rows differ. The
        slowest draft device decides.
        """
        glue = self.latency[Lane.DRAFT, Operation.GLUE]
        tree_step = self.latency[Lane.DRAFT, Operation.TREE_STEP]
        shares = []
        for rows, branches in self.placement.shares_of_build(num_branches, batch_size):
            slots = context + num_drafted + 1 + branches * np.arange(num_steps)
            steps_s = tree_step.sum_samples_s(branches, slots, rows)
            shares.append(sum_of_independent([steps_s, glue.samples_s(num_drafted + 1, context, rows)]))
        return latest_of(shares) * self.slowdown(Lane.DRAFT, beside=True)

    def write(self, path: Path) -> None:
        """Write `path` (JSON) and, beside it, an agreement record as `<stem>.agreement.parquet`, tied by its hash."""
        data = {
            "schema": SCHEMA,
            "identity": self.identity,
            "agreement": _write_agreement(self.agreement, path.with_suffix(".agreement.parquet")),
            "host_s": {term.value: value for term, value in self.host_s.items()},
            "overlaps": self.overlaps,
            "contention": {lane.value: value for lane, value in self.contention.items()},
            "placement": self.placement.to_dict(),
            "memory": self.memory.to_dict(),
            "latency": self.latency.to_dict(),
            _IN_SITU: {
                kind: {f"{lane.value}.{operation.value}": list(row) for (lane, operation), row in rows.items()}
                for kind, rows in self.in_situ.items()
            },
        }
        path.write_text(json.dumps(data, indent=1))

    @classmethod
    def read(cls, path: Path) -> System:
        """Inverse of `write`. Raises `BadInput` naming file and key if something is missing or was exchanged."""
        if not path.is_file():
            raise BadInput(str(path), "no such system file; `saguaro fit` writes one")
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise BadInput(str(path), f"must be JSON ({error})") from None
        schema = data.get("schema") if isinstance(data, dict) else data
        if type(schema) is not int or schema != SCHEMA:
            raise BadInput(f"{path}: schema", f"must be {SCHEMA}", schema)
        for key in REQUIRED:
            if key not in data:
                raise BadInput(f"{path}: {key}", "this key is missing")
        for key in data:
            if key not in REQUIRED + OPTIONAL:
                raise BadInput(f"{path}: {key}", f"no such key; known: {', '.join(REQUIRED + OPTIONAL)}")
        agreement = _read_agreement(data["agreement"], path)
        try:
            return cls._from_dict(data, agreement)
        except BadInput as error:
            raise BadInput(str(path), str(error)) from None

    @classmethod
    def _from_dict(cls, data: dict[str, Any], agreement: Agreement) -> System:
        seen = require_mapping(_IN_SITU, data[_IN_SITU], SCHEMA_KINDS)
        host_s = require_mapping("host_s", data["host_s"])
        if HostTerm.MISS in host_s:  # files of an earlier release know one time for all misses
            host_s = {HostTerm.UNDRAFTED_MISS: host_s[HostTerm.MISS], **host_s}
        return cls(
            latency=LatencyModel.from_dict(data["latency"]),
            contention=data["contention"],
            host_s=host_s,
            agreement=agreement,
            identity=data["identity"],
            overlaps=data["overlaps"],
            placement=Placement.from_dict(data.get("placement", {})),
            memory=Memory.from_dict(data.get("memory", {})),
            in_situ={kind: _seen_in(f"{_IN_SITU}.{kind}", rows) for kind, rows in seen.items()},
        )


def _numbers(name: str, given: object, kinds: type[KindT], *, minimum: float) -> dict[KindT, float]:
    words = [kind.value for kind in kinds]
    values = require_mapping(name, given, words, words)
    return {kind: require_number(f"{name}.{kind.value}", values[kind], minimum) for kind in kinds}


def _seen_in(name: str, rows: object) -> InSitu:
    seen = {lane_and_operation(name, key): (key, row) for key, row in require_mapping(name, rows).items()}
    return {place: checked_residuals(f"{name}.{key}", place[1], row) for place, (key, row) in seen.items()}


def _checked_in_situ(name: str, rows: object, latency: LatencyModel) -> InSitu:
    checked = {}
    for key, residuals in require_mapping(name, rows).items():
        if key not in latency.operations:
            known = ", ".join(f"{lane.value}.{operation.value}" for lane, operation in latency.operations)
            raise BadInput(name, f"must be of operations whose latency is known: {known}", key)
        lane, operation = Lane(key[0]), Operation(key[1])
        checked[lane, operation] = checked_residuals(f"{name}.{lane}.{operation}", operation, residuals)
    return checked


def _write_agreement(agreement: Agreement, file: Path) -> dict[str, Any]:
    if isinstance(agreement, ParametricAgreement):
        return {"parametric": agreement.to_dict()}
    assert isinstance(agreement, AgreementRecord)
    agreement.write(file)
    return {"file": file.name, "sha256": _sha256(file), "num_prompts": agreement.num_prompts}


def _read_agreement(entry: object, system: Path) -> Agreement:
    """Raises `BadInput` naming the file that is to blame, the system or its record."""
    name = f"{system}: agreement"
    if isinstance(entry, dict) and "parametric" in entry:
        require_mapping(name, entry, ["parametric"])
        try:
            return ParametricAgreement.from_dict(entry["parametric"])
        except BadInput as error:
            raise BadInput(name, str(error)) from None
    written = require_mapping(name, entry, ["file", "sha256", "num_prompts"], ["file", "sha256"])
    if not isinstance(written["file"], str):
        raise BadInput(f"{name}.file", "must be the name of a file", written["file"])
    record = system.parent / written["file"]
    agreement = AgreementRecord.read(record)
    if _sha256(record) != written["sha256"]:
        raise BadInput(str(record), f"must be the record that {system} was fitted with (its hash differs)")
    return agreement


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
