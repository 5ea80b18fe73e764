"""A profiling run's record: what the simulator is fitted to, and the identity that decides what it may speak about."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from calibration.digest import digest_of_inputs
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.latency import LatencySample
from sim.trace import Lane, Operation, Trace
from sim.workload import Workload

SCHEMA = 1
COLUMNS = tuple(field.name for field in fields(LatencySample))
LATER_COLUMNS = ("batch_size",)  # earlier profiles lack them: every sample is of one row


@dataclass(frozen=True)
class Profile:
    """Everything that a profiling run measured.

    `agreement` scores the target's own text by both models, one row per position; `latency` holds the raw timings of
    every operation, alone and beside a busy other lane; `traces` are short real runs of AR, SD and SSD on calibration
    prompts (they show the host's time per round); `manifest` says on what and how it was measured (`profile_manifest`).
    """

    agreement: AgreementRecord
    latency: tuple[LatencySample, ...]
    traces: tuple[Trace, ...]
    manifest: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency", tuple(self.latency))
        object.__setattr__(self, "traces", tuple(self.traces))
        check_samples(self.latency, "latency samples")

    @property
    def identity(self) -> dict[str, Any]:
        """Pair, device, precision, threads and library versions of the measurement."""
        return self.manifest["identity"]

    def write(self, folder: Path) -> None:
        """Write `manifest.json`, `agreement.parquet`, `latency.parquet` and `traces/<n>/`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.agreement.write(folder / "agreement.parquet")
        write_samples(self.latency, folder / "latency.parquet")
        for index, trace in enumerate(self.traces):
            trace.write(folder / "traces" / str(index))
        (folder / "manifest.json").write_text(json.dumps(self.manifest, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Profile:
        """Inverse of `write`. Raises `BadInput` naming the file, column and row on anything missing or impossible."""
        manifest = read_manifest(folder / "manifest.json")
        return cls(
            agreement=AgreementRecord.read(folder / "agreement.parquet"),
            latency=tuple(read_samples(folder / "latency.parquet")),
            traces=tuple(Trace.read(folder / "traces" / str(index)) for index in range(manifest["num_traces"])),
            manifest=manifest,
        )


def profile_manifest(
    identity: Mapping[str, Any],
    workload: Workload,
    settings: Mapping[str, Any],
    durations_s: Mapping[str, float],
    latency: Sequence[LatencySample],
    num_traces: int,
) -> dict[str, Any]:
    """`identity` of models and machine, resolved `settings`, and how long each part of the run took."""
    cells = {(s.lane, s.operation, s.batch_size, s.num_tokens, s.context, s.busy) for s in latency}
    manifest = {
        "schema": SCHEMA,
        "record": "calibration",
        "version": version("saguaro-planner"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": dict(identity),
        "workload": workload.identity() | {"prompts": prompt_hashes(workload)},
        "settings": dict(settings),
        "durations_s": dict(durations_s),
        "latency": {
            "num_samples": len(latency),
            "num_cells": len(cells),
            "num_blocks": len({s.block for s in latency}),
        },
        "num_traces": num_traces,
    }
    return manifest | {"digest": digest_of_inputs(manifest)}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a profile. Raises `BadInput` if it is missing, broken, or of another schema or kind of record."""
    if not path.is_file():
        raise BadInput(str(path), "no such file; `saguaro profile` writes a profile folder")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(str(path), f"is not valid JSON ({error})") from None
    expected = {"schema": SCHEMA, "record": "calibration"}
    for key, value in expected.items():
        given = manifest.get(key) if isinstance(manifest, dict) else None
        if given != value:
            raise BadInput(f"{path}: {key}", f"must be {value!r}", given)
    missing = [key for key in ("identity", "workload", "num_traces") if key not in manifest]
    if missing:
        raise BadInput(f"{path}: {missing[0]}", "this key is missing")
    if type(manifest["num_traces"]) is not int:
        raise BadInput(f"{path}: num_traces", "must be an integer", manifest["num_traces"])
    identity = manifest["identity"]
    if not isinstance(identity, dict) or "concurrency" not in identity:
        raise BadInput(f"{path}: identity", "must be a mapping that holds concurrency", identity)
    return manifest


def write_samples(samples: Sequence[LatencySample], path: Path) -> None:
    """One parquet file, a row per sample."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: [getattr(sample, name) for sample in samples] for name in COLUMNS}), path)


def read_samples(path: Path) -> list[LatencySample]:
    """Latency samples of one parquet file. Raises `BadInput` naming a missing column, or the row of a bad value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise BadInput(str(path), "no such file; `saguaro profile` writes one")
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid:
        raise BadInput(str(path), "is not a parquet file") from None
    missing = [name for name in COLUMNS if name not in (*table.column_names, *LATER_COLUMNS)]
    if missing:
        raise BadInput(f"{path}: {missing[0]}", "this column is missing")
    known = [name for name in COLUMNS if name in table.column_names]
    samples = [_to_sample(row, index, str(path)) for index, row in enumerate(table.select(known).to_pylist())]
    check_samples(samples, str(path))
    return samples


def _to_sample(row: dict[str, Any], index: int, name: str) -> LatencySample:
    for column, value in row.items():
        if value is None:
            raise BadInput(f"{name}: {column}, row {index}", "must not be empty")
    for column, kind in (("lane", Lane), ("operation", Operation)):
        if row[column] not in list(kind):
            raise BadInput(f"{name}: {column}, row {index}", f"must be one of {', '.join(kind)}", row[column])
        row[column] = kind(row[column])
    for column, value in row.items():
        types = {"busy": bool, "duration_s": float}.get(column, int)
        if column not in ("lane", "operation") and type(value) is not types:
            raise BadInput(f"{name}: {column}, row {index}", f"must be of type {types.__name__}", row[column])
    return LatencySample(**row)


def check_samples(samples: Iterable[LatencySample], name: str) -> None:
    """Raises `BadInput` naming the row and the column of the first impossible value in the samples of `name`."""
    for row, sample in enumerate(samples):
        if not (math.isfinite(sample.duration_s) and sample.duration_s > 0):
            raise BadInput(f"{name}: duration_s, row {row}", "must be a finite number > 0", sample.duration_s)
        for column, least in (("num_tokens", 0), ("context", 0), ("block", 0), ("batch_size", 1)):
            if getattr(sample, column) < least:
                raise BadInput(f"{name}: {column}, row {row}", f"must be >= {least}", getattr(sample, column))


# ------------------------------------------------------------------------------------------------- what may be compared


def prompt_hashes(workload: Workload) -> list[str]:
    """One short hash per prompt: enough to see that two records share a prompt without storing the text."""
    return [hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16] for prompt in workload.prompts]


def check_identity(profile_identity: Mapping[str, Any], run_identity: Mapping[str, Any]) -> None:
    """Raises `BadInput` with every differing field if a profile was made with other models or on another machine."""
    found = differences(profile_identity, run_identity)
    if found:
        raise BadInput("profile", f"must come from the same pair, device, precision, threads and versions; {found}")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Every leaf that two nested mappings do not share, in words; empty if they are equal."""
    ours, theirs = flattened(before), flattened(now)
    differing = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} was {ours.get(name)!r} and is {theirs.get(name)!r}" for name in differing)


def flattened(identity: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings under dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in identity.items():
        if isinstance(value, Mapping):
            leaves |= flattened(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = list(value) if isinstance(value, tuple) else value
    return leaves


def check_prompts(calibration: Iterable[str], test: Workload) -> None:
    """Raises `BadInput` if a prompt of `test` is among the calibration prompts, given by their hashes.

    A record compared with itself shows no error, whatever the model.
    """
    shared = set(calibration) & set(prompt_hashes(test))
    if shared:
        rule = "must not be validated on its own calibration prompts"
        raise BadInput("profile", rule, f"{len(shared)} of {len(test.prompts)} prompts in both")


def check_workload(manifest: Mapping[str, Any], workload: Workload) -> None:
    """Raises `BadInput` unless `workload` has the rules that the profile was measured under and none of its prompts."""
    unknown_earlier = {"batch_size": 1, "sampling": [], "stop_strings": []}
    calibration = unknown_earlier | manifest["workload"]
    check_prompts(calibration.pop("prompts"), workload)
    for name, given in workload.identity().items():
        if calibration.get(name) != given:
            raise BadInput(f"workload.{name}", f"must be {calibration.get(name)!r} as in the profile", given)
