"""What a run has finished, piece by piece, so that a killed one goes on where it was."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from calibration.profile import differences, read_samples, write_samples
from experiments.output import sync, sync_folder
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.latency import LatencySample
from sim.trace import Trace

T = TypeVar("T")
PART = "part"  # what is being written; a killed run leaves it half done


@dataclass(frozen=True)
class Kind(Generic[T]):
    """How values of a type are stored at a path, as a file or a folder, and read back as they were."""

    write: Callable[[T, Path], None]
    read: Callable[[Path], T]


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _write_json(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, allow_nan=False))


TRACE: Kind[Trace] = Kind(Trace.write_tables, Trace.read)
AGREEMENT: Kind[AgreementRecord] = Kind(AgreementRecord.write, AgreementRecord.read)
LATENCY: Kind[list[LatencySample]] = Kind(write_samples, read_samples)
JSON: Kind[Any] = Kind(_write_json, _read_json)


class Ledger:
    """Values that were expensive to make, each stored under its name in the moment it is finished.

    They lie in a folder for each session, a session being one attempt at the run: `folder/0/measured/2/17/1`. A value
    is there whole or not at all, for it is written elsewhere and moved. Without a folder nothing is stored. `on_found`
    is told the seconds that a value took when it was made, each time that it is read instead.
    """

    def __init__(self, folder: Path | None = None, on_found: Callable[[float], None] = lambda seconds: None) -> None:
        self._folder, self._on_found = folder, on_found
        self._session = 0 if folder is None else len(_sessions(folder))
        self._prefix = ""

    def within(self, part: str) -> Ledger:
        """The same ledger for a part of the run, whose names are told from those of other parts."""
        own = copy(self)
        own._prefix = f"{self._prefix}{part}/"
        return own

    def once(self, name: str, kind: Kind[T], make: Callable[[], T]) -> T:
        """The value of that name: as an earlier session stored it, else made now and stored."""
        if self._folder is None:
            return make()
        name = self._prefix + name
        found = self._find(name)
        if found is not None:
            self._on_found(_read_json(_seconds_of(found)))
            return kind.read(found)
        start_s = time.perf_counter()
        value = make()
        self._store(self._folder, name, kind, value, time.perf_counter() - start_s)
        return value

    def same(self, name: str, value: Mapping[str, Any]) -> None:
        """Raises `BadInput` with every differing entry if an earlier session stored another value."""
        plain = json.loads(json.dumps(value))
        found = differences(self.once(name, JSON, lambda: plain), plain)
        if found:
            raise BadInput("--resume", f"must go on with what the run was begun with; {found}")

    def session_of(self, name: str) -> int:
        """In which attempt at the run a value was made."""
        found = None if self._folder is None else self._find(self._prefix + name)
        return self._session if found is None or self._folder is None else int(found.relative_to(self._folder).parts[0])

    def _find(self, name: str) -> Path | None:
        assert self._folder is not None
        paths = (self._folder / str(session) / name for session in range(self._session + 1))
        return next((path for path in paths if path.exists()), None)

    def _store(self, folder: Path, name: str, kind: Kind[T], value: T, seconds: float) -> None:
        part, path = folder / PART, folder / str(self._session) / name
        _remove(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind.write(value, part)
        _write_json(seconds, _seconds_of(path))
        sync(part)
        sync(_seconds_of(path))
        part.rename(path)
        sync_folder(path.parent)


NOWHERE = Ledger()


def _sessions(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.name.isdecimal()]


def _seconds_of(path: Path) -> Path:
    """Where it stands how long a value took; it counts only where the value is."""
    return path.with_name(f"{path.name}.seconds")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def piece_name(measurement: str, repeat: int, batch: int, policy: int) -> str:
    """Of one policy over one batch of prompts."""
    return f"{measurement}/{repeat}/{batch}/{policy}"
