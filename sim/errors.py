"""What a user did wrong, said in one line, and what went wrong by itself."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run could not go on, and not because of its input. The command line prints it and exits with code 1."""


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
