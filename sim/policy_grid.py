"""The policies that a controller may choose from: speculation lengths times budgets, with one fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sim.errors import BadInput, require_count, require_entries
from sim.policy import (
    Autoregressive,
    Fallback,
    LateBuild,
    Policy,
    Speculative,
    SpeculativeSpeculative,
)


class PolicyGrid(Protocol):
    """What a configuration says of them. K = 0 is AR, a budget (the sum of a fan-out list) of 0 is SD.

    No entry of a fan-out list is above `most_candidates`, and lists are cut to it: a real engine knows so many of the
    draft model's likeliest tokens, an agreement record holds so many. None sets no limit.
    """

    @property
    def speculation_lengths(self) -> tuple[int, ...]: ...

    @property
    def budgets(self) -> tuple[int, ...]: ...

    @property
    def fallback(self) -> Fallback: ...

    @property
    def on_late_build(self) -> LateBuild: ...

    @property
    def most_candidates(self) -> int | None: ...


def check_grid(config: PolicyGrid) -> None:
    """Leaves the lists sorted and without repeats, fallback and late build as words of their kinds."""
    for name in ("speculation_lengths", "budgets"):
        values = {require_count(name, value, 0) for value in require_entries(name, getattr(config, name))}
        if not values:
            raise BadInput(name, "must have at least one entry")
        object.__setattr__(config, name, tuple(sorted(values)))
    for name, kinds in (("fallback", Fallback), ("on_late_build", LateBuild)):
        if getattr(config, name) not in list(kinds):
            raise BadInput(name, f"must be one of {', '.join(kinds)}", getattr(config, name))
        object.__setattr__(config, name, kinds(getattr(config, name)))
    if config.most_candidates is not None:
        most = require_count("most_candidates", config.most_candidates, 1)
        object.__setattr__(config, "most_candidates", most)


def grid_name(config: PolicyGrid) -> str:
    lengths = "/".join(map(str, config.speculation_lengths))
    budgets = "/".join(map(str, config.budgets))
    return f"K={lengths} B={budgets} {config.fallback.value}"


def policy_of(
    config: PolicyGrid, speculation_length: int, after_hit: Sequence[int], after_miss: Sequence[int]
) -> Policy:
    """AR at K = 0, SD without any branch, else SSD with the configuration's fallback and lists cut to its limit."""
    if speculation_length == 0:
        return Autoregressive()
    if not any(after_hit) and not any(after_miss):
        return Speculative(speculation_length)
    return SpeculativeSpeculative(
        speculation_length,
        _cut(after_hit, config.most_candidates),
        _cut(after_miss, config.most_candidates),
        config.fallback,
        on_late_build=config.on_late_build,
    )


def _cut(fan_out: Sequence[int], most_candidates: int | None) -> tuple[int, ...]:
    return tuple(entry if most_candidates is None else min(entry, most_candidates) for entry in fan_out)


def num_drafted_after_miss(config: PolicyGrid, speculation_length: int) -> int:
    """Of a policy of the grid; a fan-out list has one entry more."""
    return 0 if config.fallback is Fallback.NONE else speculation_length


def json_safe(value: Any) -> Any:
    """Tuples become lists and the words of an enumeration strings."""
    if isinstance(value, dict):
        return {key: json_safe(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [json_safe(entry) for entry in value]
    return str(value) if isinstance(value, str) else value
