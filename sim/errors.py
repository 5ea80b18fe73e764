"""What a user did wrong, said in one line, and what went wrong by itself."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Set
from numbers import Integral, Real
from typing import Any

LARGEST = sys.float_info.max  # no finite number is above it


class RunFailed(RuntimeError):
    """A run could not go on, and not because of its input. The command line prints it and exits with code 1."""


class Interrupted(RuntimeError):
    """Someone stopped a run, which can go on. The command line prints it and exits with code 130."""


class BadInput(ValueError):
    """Input that breaks a rule: a file, a setting, a record. The command line prints it and exits with code 2."""

    def __init__(self, name: str, rule: str, value: object = None) -> None:
        """`name` is what is wrong (a file, a key), `rule` what it must satisfy, `value` what was given instead."""
        got = "" if value is None else f", got {value!r}"
        super().__init__(f"{name}: {rule}{got}")
        self._given = (name, rule, value)

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, str, object]]:
        """Copies are made from what was given; an exception's own way would pass the finished line as the name."""
        return type(self), self._given


def require_count(name: str, value: object, minimum: int) -> int:
    """The value as a plain integer. Raises `BadInput` unless it is one (NumPy's are, True and False are none) and at
    least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise BadInput(name, f"must be an integer >= {minimum}", value)
    return int(value)


def require_number(
    name: str, value: object, minimum: float = -LARGEST, maximum: float = LARGEST, *, above: bool = False
) -> float:
    """The value as a plain number. Raises `BadInput` unless it is one (NumPy's are, True, False and NaN are none) and
    in the range, whose lower end counts unless `above`; infinity is in it if `maximum` is."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = int(value) if isinstance(value, Integral) else float(value)
        if minimum <= number <= maximum and not (above and number == minimum):
            return number
    raise BadInput(name, _rule(minimum, maximum, above=above), value)


def _rule(minimum: float, maximum: float, *, above: bool) -> str:
    finite = "finite " if maximum == LARGEST else ""
    low = f" {'>' if above else '>='} {minimum:g}" if minimum > -LARGEST else ""
    high = f" and <= {maximum:g}" if maximum < LARGEST else ""
    return f"must be a {finite}number{low}{high}"


def require_entries(name: str, values: object) -> tuple[Any, ...]:
    """The values as a tuple. Raises `BadInput` unless they are listed in an order: a word or a mapping is no list."""
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise BadInput(name, "must be a list", values)
    return tuple(values)


def require_mapping(
    name: str, value: object, known: Collection[str] | None = None, required: Collection[str] = ()
) -> Mapping[Any, Any]:
    """The value itself. Raises `BadInput` unless it is a mapping with all of the `required` keys, and with none beside
    the `known` ones if any are told."""
    if not isinstance(value, Mapping):
        raise BadInput(name, "must be a mapping of names to values", value)
    missing = [key for key in required if key not in value]
    if missing:
        raise BadInput(f"{name}.{missing[0]}", "this key is missing")
    unknown = [] if known is None else [key for key in value if key not in known]
    if unknown:
        raise BadInput(f"{name}.{unknown[0]}", f"no such key; known: {', '.join(known or ())}")
    return value
