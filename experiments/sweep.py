"""The `sweep` section of a file: settings to try one after another, each an explicit list of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.strict_yaml import Document
from sim.errors import BadInput

SWEEP = "sweep"
FIXED = ("schema", "name", SWEEP)  # what a sweep cannot change


@dataclass(frozen=True)
class Point:
    """One value of every swept setting, and the file with these in place."""

    values: Mapping[str, Any]
    document: Document

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={in_words(value)}" for key, value in self.values.items())


def in_words(value: Any) -> str:
    """A swept value as a table shows it: like YAML, without quotes and braces."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={in_words(inner)}" for key, inner in value.items())
    return " ".join(map(in_words, value)) if isinstance(value, list) else str(value)


def points(document: Document) -> list[Point]:
    """Every combination of the values listed, the last key changing fastest. A key is the full key of a setting, such
    as `times.draft_step_ms`, or of a whole section, whose values are then mappings.

    Raises `BadInput` if there is no sweep, or naming the key that is not swept as a list of values.
    """
    lists = document.data.get(SWEEP)
    if not isinstance(lists, Mapping) or not lists:
        raise BadInput(document.place((SWEEP,)), "must list the values of one setting at least", lists)
    for key, values in lists.items():
        _check(key, values, document)
    plain = document.without(SWEEP)
    return [_point(dict(zip(lists, values, strict=True)), plain, document) for values in product(*lists.values())]


def refuse_sweep(document: Document) -> None:
    """Raises `BadInput` on a file with a sweep: it is not one question but several."""
    if SWEEP in document.data:
        raise BadInput(document.place((SWEEP,)), "is answered by `saguaro sweep`; leave it out to ask for one point")


def _check(key: str, values: Any, document: Document) -> None:
    place = document.place((SWEEP, key))
    if key.split(".")[0] in FIXED or not all(key.split(".")):
        raise BadInput(place, "must be the full key of a setting, such as times.draft_step_ms")
    if not isinstance(values, list) or not values:
        raise BadInput(place, "must be a list of one value at least", values)
    if any(value in values[:number] for number, value in enumerate(values)):
        raise BadInput(place, "must list every value once", values)


def _point(values: dict[str, Any], plain: Document, swept: Document) -> Point:
    for key, value in values.items():
        plain = plain.with_value(key.split("."), value, swept.place((SWEEP, key)))
    return Point(values, plain)
