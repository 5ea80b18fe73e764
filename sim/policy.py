"""Decoding policies: what is decided before a run, and nothing about how long it takes.

A policy is a frozen value. The simulator and the executor run the same policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sim.errors import BadInput
from sim.trace import Source

SCHEMA_KINDS = ("ar", "sd", "ssd")


class Fallback(StrEnum):
    """Who speculates after a miss."""

    DRAFT = "draft"  # the draft model drafts K tokens while the target waits
    NONE = "none"  # nobody: the next round verifies no draft token


def _require_count(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise BadInput(name, f"must be an integer >= {minimum}", value)


@dataclass(frozen=True)
class Autoregressive:
    """AR: one token per target forward pass."""

    @property
    def name(self) -> str:
        return "AR"

    @property
    def speculation_length(self) -> int:
        return 0

    def num_drafted(self, source: Source) -> int:
        return 0

    def fan_out(self, source: Source) -> tuple[int, ...]:
        return ()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "ar"}


@dataclass(frozen=True)
class Speculative:
    """SD: the draft proposes K tokens one after another, the target verifies them in one pass. K = 0 is AR."""

    speculation_length: int

    def __post_init__(self) -> None:
        _require_count("speculation_length", self.speculation_length, 0)

    @property
    def name(self) -> str:
        return f"SD K={self.speculation_length}"

    def num_drafted(self, source: Source) -> int:
        return self.speculation_length

    def fan_out(self, source: Source) -> tuple[int, ...]:
        return ()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "sd", "speculation_length": self.speculation_length}


@dataclass(frozen=True)
class SpeculativeSpeculative:
    """SSD: while the target verifies, the draft prepares a speculation for each likely outcome (arXiv 2603.03251).

    `fan_out_after_hit[k]` bonus tokens are prepared for accept count k in a round whose speculation was a cache hit;
    `fan_out_after_miss` likewise in a round that the fallback supplied (the first round of a sequence included). A list
    has one entry per possible accept count: K + 1, or 1 after a miss with fallback `none`, which verifies no draft.
    """

    speculation_length: int
    fan_out_after_hit: tuple[int, ...]
    fan_out_after_miss: tuple[int, ...]
    fallback: Fallback = Fallback.DRAFT

    def __post_init__(self) -> None:
        _require_count("speculation_length", self.speculation_length, 1)
        if self.fallback not in list(Fallback):
            raise BadInput("fallback", f"must be one of {', '.join(Fallback)}", self.fallback)
        object.__setattr__(self, "fallback", Fallback(self.fallback))
        for name, entries in (
            ("fan_out_after_hit", self.speculation_length + 1),
            ("fan_out_after_miss", self.num_drafted_after_miss + 1),
        ):
            fan_out = tuple(getattr(self, name))
            object.__setattr__(self, name, fan_out)
            if len(fan_out) != entries:
                raise BadInput(name, f"must have {entries} entries, one per accept count", list(fan_out))
            for value in fan_out:
                _require_count(name, value, 0)

    @property
    def num_drafted_after_miss(self) -> int:
        return self.speculation_length if self.fallback is Fallback.DRAFT else 0

    def num_drafted(self, source: Source) -> int:
        """Draft tokens in a round whose speculation came from `source`, before the length cap shortens it."""
        return self.speculation_length if source is Source.HIT else self.num_drafted_after_miss

    def fan_out(self, source: Source) -> tuple[int, ...]:
        """Fan-out list of the build that runs beside a round whose speculation came from `source`."""
        return self.fan_out_after_hit if source is Source.HIT else self.fan_out_after_miss

    @property
    def name(self) -> str:
        after_hit = "/".join(map(str, self.fan_out_after_hit))
        after_miss = "/".join(map(str, self.fan_out_after_miss))
        lists = after_hit if after_hit == after_miss else f"{after_hit}|{after_miss}"
        return f"SSD K={self.speculation_length} F={lists} {self.fallback.value}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "ssd",
            "speculation_length": self.speculation_length,
            "fan_out_after_hit": list(self.fan_out_after_hit),
            "fan_out_after_miss": list(self.fan_out_after_miss),
            "fallback": self.fallback.value,
        }


Policy = Autoregressive | Speculative | SpeculativeSpeculative


def policy_from_dict(data: dict[str, Any]) -> Policy:
    """Inverse of `to_dict`. Raises `BadInput` on an unknown kind or key."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    classes = {"ar": Autoregressive, "sd": Speculative, "ssd": SpeculativeSpeculative}
    if kind not in classes:
        raise BadInput("policy.kind", f"must be one of {', '.join(SCHEMA_KINDS)}", kind)
    try:
        return classes[kind](**fields)
    except TypeError as error:
        raise BadInput(f"policy of kind {kind}", f"has wrong fields ({error})", sorted(fields)) from None


# ------------------------------------------------------------------------------------------------------------ fan-out


def uniform_fan_out(num_drafted: int, budget: int) -> tuple[int, ...]:
    """`budget` branches spread evenly over the `num_drafted` + 1 accept counts, the remainder to the smallest k."""
    base, extra = divmod(budget, num_drafted + 1)
    return tuple(base + (k < extra) for k in range(num_drafted + 1))


def geometric_fan_out(num_drafted: int, budget: int, acceptance: float, exponent: float) -> tuple[int, ...]:
    """Theorem 12's shape rounded to integers by largest remainders, so that the sum is exactly `budget`."""
    from sim.theory import geometric_fan_out_shape

    shape = geometric_fan_out_shape(num_drafted, budget, acceptance, exponent)
    floors = [int(entry) for entry in shape]
    by_remainder = sorted(range(len(shape)), key=lambda k: (floors[k] - shape[k], k))
    for k in by_remainder[: budget - sum(floors)]:
        floors[k] += 1
    return tuple(floors)


def exact_fan_out(hit_mass: Sequence[Sequence[float]], budget: int) -> tuple[int, ...]:
    """The integer fan-out of the largest hit probability for concave curves (greedy; Theorem 18 with measured curves).

    `hit_mass[k][f]` is the probability that k tokens are accepted and the bonus token is among the f prepared ones.
    Each next branch goes to the k that gains most; branches that gain nothing are not spent: the sum may stay below
    `budget`.
    """
    fan_out = [0] * len(hit_mass)
    for _ in range(budget):
        gains = [
            curve[f + 1] - curve[f] if f + 1 < len(curve) else 0.0 for curve, f in zip(hit_mass, fan_out, strict=True)
        ]
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] <= 0.0:
            break
        fan_out[best] += 1
    return tuple(fan_out)
