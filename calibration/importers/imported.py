"""The result of an import: numbers for a plan, each learned from a file or assumed over a plausible range."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.policy import Policy

BARE_ACCEPTANCE = ("acceptance", "acceptance_rate", "accept_rate", "spec_accept_rate", "draft_acceptance_rate")
BY_DEFINITION = (
    "must come with its definition: accepted of the tokens tested (conditional), accepted over drafted at a stated"
    " speculation length, or tokens per round with or without the bonus token"
)


@dataclass(frozen=True)
class Source:
    """A file of an engine; `is_plain` if it is of a run without speculation."""

    name: str
    text: str
    is_plain: bool = False


@dataclass(frozen=True)
class Told:
    """What files of some formats leave out and their owner knows. None: not told."""

    speculation_length: int | None = None
    fan_out: int | None = None
    batch_size: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    temperature: float | None = None

    def need(self, name: str, source: str) -> int:
        """A count that `source` leaves out. Raises `BadInput` naming the option if it was not told."""
        value = getattr(self, name)
        if value is None:
            raise BadInput(source, f"does not say the {name.replace('_', ' ')}; give --{name.replace('_', '-')}")
        return int(value)


@dataclass(frozen=True)
class Assumed:
    """A number that was not learned: what stands for it, between which ends it may lie, and why. `key` is the full key
    of a file of numbers."""

    key: str
    value: float
    low: float
    high: float
    because: str


@dataclass(frozen=True)
class Measured:
    """Tokens/s of all rows that a policy reached in a run of the files."""

    policy: Policy
    tokens_per_s: float


@dataclass(frozen=True)
class Imported:
    """What a plan can start from.

    `learned` are numbers by the full key of a file of numbers (milliseconds where the key says so), `how` says where
    they come from, `not_learned` what the files leave open. `records` are agreement records by the file names that
    `learned` has for them: none, one, or the lower and the upper end of what a dump leaves open. `measured` are runs
    that a plan from these numbers should predict.
    """

    engine: str
    learned: Mapping[str, Any]
    how: tuple[str, ...]
    not_learned: tuple[str, ...]
    assumed: tuple[Assumed, ...]
    records: Mapping[str, AgreementRecord] = field(default_factory=dict, compare=False)
    measured: tuple[Measured, ...] = ()

    def numbers(self) -> dict[str, Any]:
        """The sections of a file of numbers but for what to search, the ranges of what is assumed among them."""
        flat = dict(self.learned) | {entry.key: entry.value for entry in self.assumed}
        sections: dict[str, Any] = {}
        for key, value in flat.items():
            *path, name = key.split(".")
            place = sections
            for section in path:
                place = place.setdefault(section, {})
            place[name] = value
        sections["ranges"] = {
            entry.key: {"low": entry.low, "high": entry.high, "because": entry.because} for entry in self.assumed
        }
        return sections

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, without the records."""
        return {
            "engine": self.engine,
            "learned": dict(self.learned),
            "how": list(self.how),
            "not_learned": list(self.not_learned),
            "measured": [{"policy": run.policy.to_dict(), "tokens_per_s": run.tokens_per_s} for run in self.measured],
            "assumed": [{f.name: getattr(entry, f.name) for f in fields(entry)} for entry in self.assumed],
        }


def json_objects(source: Source) -> list[dict[str, Any]]:
    """The objects of a JSON file that holds one or a list of them, or of a JSON Lines file. Raises `BadInput` naming
    the line that is none."""
    try:
        whole = json.loads(source.text)
    except ValueError:
        lines = [(n, line) for n, line in enumerate(source.text.splitlines(), 1) if line.strip()]
        if not lines:
            raise BadInput(source.name, "is empty") from None
        whole = [_json_line(line, f"{source.name}, line {number}") for number, line in lines]
    objects = whole if isinstance(whole, list) else [whole]
    if not objects or not all(isinstance(entry, dict) for entry in objects):
        raise BadInput(source.name, "must hold JSON objects")
    return objects


def _json_line(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BadInput(place, f"is not valid JSON ({error})") from None


def refuse_bare_acceptance(data: Mapping[str, Any], name: str) -> None:
    """Raises `BadInput` on an acceptance that does not say what it is a share of."""
    for key in BARE_ACCEPTANCE:
        if data.get(key) is not None:
            raise BadInput(f"{name}: {key}", BY_DEFINITION, data[key])
