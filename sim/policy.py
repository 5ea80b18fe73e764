"""Decoding policies: what is decided before a run, and nothing about how long it takes.

A policy is a frozen value. The simulator and the executor run the same policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from sim.errors import BadInput, require_count, require_entries, require_mapping, require_number
from sim.theory import geometric_fan_out_shape
from sim.trace import Source

NEGLIGIBLE = 1e-12  # of a probability: what differs by less is equal
SCHEMA_KINDS = ("ar", "sd", "ssd")  # of single policies; a table of them has kind "table"


class Fallback(StrEnum):
    """Who speculates after a miss. In a batch a miss is a row whose look-up failed."""

    DRAFT = "draft"  # the draft model drafts K tokens for the whole batch, rows that had hit included, the target waits
    DRAFT_MISSING = "draft_missing"  # the same for the missing rows only; the others keep their speculation and wait
    NGRAM = "ngram"  # prompt look-up: what followed the last tokens where they occurred before (`sim.ngram`)
    FILLER = "filler"  # K tokens drawn uniformly from the vocabulary, verified with that law
    NONE = "none"  # nobody: the next round verifies no draft token


class Proposer(StrEnum):
    """From which law the draft tokens of a round come."""

    DRAFT_MODEL = "draft_model"
    NGRAM = "ngram"
    FILLER = "filler"


class LateBuild(StrEnum):
    """What happens to a build that is unfinished when the outcome is known."""

    WAIT = "wait"  # it is finished before anything else
    ABANDON = "abandon"  # if no row needs it, it ends with the operation in progress; a hit waits for its speculation


@dataclass(frozen=True)
class Drafting:
    """How the draft tokens of the rounds of one source come about, and which outcomes are prepared beside them.

    `num_drafted` is the largest number of draft tokens, before the length cap or a short n-gram lowers it. `fan_out[k]`
    bonus tokens are prepared for accept count k (() without a speculation cache). At draft index k < K the draft model
    samples from q', which multiplies q by `downweight` on its top `fan_out[k]` + 1 tokens where any are prepared.
    """

    proposer: Proposer
    num_drafted: int
    fan_out: tuple[int, ...]
    source: Source
    downweight: float = 1.0

    def num_downweighted(self, draft_index: int) -> int:
        """How many of the most likely tokens of q are down-weighted at a draft index."""
        fan_out = self.fan_out[draft_index] if draft_index < len(self.fan_out) else 0
        return fan_out + 1 if fan_out and self.downweight != 1 else 0

    def num_branches(self, num_drafted: int) -> int:
        """Branches of the build beside a round that verifies so many draft tokens."""
        return sum(self.fan_out[: num_drafted + 1])

    def is_sampled(self, temperature: float) -> bool:
        """Whether the verifier needs the distribution that each draft token was drawn from, which travels with it.

        At temperature 0 nothing is drawn; tokens of an n-gram or a filler have a law that needs no telling.
        """
        return temperature > 0 and self.proposer is Proposer.DRAFT_MODEL


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

    def drafting(self, source: Source) -> Drafting:
        return Drafting(Proposer.DRAFT_MODEL, 0, (), source)

    def waits_for_draft(self, source: Source) -> bool:
        return False

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "ar"}


@dataclass(frozen=True)
class Speculative:
    """SD: the draft proposes K tokens one after another, the target verifies them in one pass. K = 0 is AR."""

    speculation_length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculation_length", require_count("speculation_length", self.speculation_length, 0))

    @property
    def name(self) -> str:
        return f"SD K={self.speculation_length}"

    def num_drafted(self, source: Source) -> int:
        return self.speculation_length

    def fan_out(self, source: Source) -> tuple[int, ...]:
        return ()

    def drafting(self, source: Source) -> Drafting:
        return Drafting(Proposer.DRAFT_MODEL, self.speculation_length, (), source)

    def waits_for_draft(self, source: Source) -> bool:
        return self.speculation_length > 0

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "sd", "speculation_length": self.speculation_length}


@dataclass(frozen=True)
class SpeculativeSpeculative:
    """SSD: while the target verifies, the draft prepares a speculation for each likely outcome (arXiv 2603.03251).

    `fan_out_after_hit[k]` bonus tokens are prepared for accept count k in a round whose speculation was a cache hit;
    `fan_out_after_miss` likewise in a round that the fallback supplied (the first round of a sequence included). A list
    has one entry per possible accept count: K + 1, or 1 after a miss with fallback `none`, which verifies no draft.

    `downweight` is C of Saguaro sampling (Definition 14), applied to the top F_k + 1 tokens rather than F_k: the
    rejected token is left out of the prepared ones, and with F_k alone a lower C can lower the hit rate. 1 is plain
    sampling.
    """

    speculation_length: int
    fan_out_after_hit: tuple[int, ...]
    fan_out_after_miss: tuple[int, ...]
    fallback: Fallback = Fallback.DRAFT
    downweight: float = 1.0
    on_late_build: LateBuild = LateBuild.WAIT

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculation_length", require_count("speculation_length", self.speculation_length, 1))
        object.__setattr__(self, "downweight", require_number("downweight", self.downweight, 0, 1, above=True))
        for name, kinds in (("fallback", Fallback), ("on_late_build", LateBuild)):
            if getattr(self, name) not in list(kinds):
                raise BadInput(name, f"must be one of {', '.join(kinds)}", getattr(self, name))
            object.__setattr__(self, name, kinds(getattr(self, name)))
        for name, entries in (
            ("fan_out_after_hit", self.speculation_length + 1),
            ("fan_out_after_miss", self.num_drafted_after_miss + 1),
        ):
            fan_out = tuple(require_count(name, value, 0) for value in require_entries(name, getattr(self, name)))
            object.__setattr__(self, name, fan_out)
            if len(fan_out) != entries:
                raise BadInput(name, f"must have {entries} entries, one per accept count", list(fan_out))

    @property
    def num_drafted_after_miss(self) -> int:
        return 0 if self.fallback is Fallback.NONE else self.speculation_length

    def num_drafted(self, source: Source) -> int:
        """Draft tokens in a round whose speculation came from `source`, before the length cap shortens it."""
        return self.speculation_length if source is Source.HIT else self.num_drafted_after_miss

    def fan_out(self, source: Source) -> tuple[int, ...]:
        """Fan-out list of the build that runs beside a round whose speculation came from `source`."""
        return self.fan_out_after_hit if source is Source.HIT else self.fan_out_after_miss

    def proposer(self, source: Source) -> Proposer:
        """Who drafts in a round whose speculation came from `source`."""
        fallbacks = {Fallback.NGRAM: Proposer.NGRAM, Fallback.FILLER: Proposer.FILLER}
        return Proposer.DRAFT_MODEL if source is Source.HIT else fallbacks.get(self.fallback, Proposer.DRAFT_MODEL)

    def waits_for_draft(self, source: Source) -> bool:
        """Whether the target waits while the draft model drafts for a round of this source: without a speculation in
        hand, unless a fallback supplies one that costs no time."""
        return source is not Source.HIT and self.fallback in (Fallback.DRAFT, Fallback.DRAFT_MISSING)

    def drafting(self, source: Source) -> Drafting:
        """How a round whose speculation came from `source` drafts and prepares."""
        downweight = self.downweight if self.proposer(source) is Proposer.DRAFT_MODEL else 1.0
        return Drafting(self.proposer(source), self.num_drafted(source), self.fan_out(source), source, downweight)

    @property
    def name(self) -> str:
        after_hit = "/".join(map(str, self.fan_out_after_hit))
        after_miss = "/".join(map(str, self.fan_out_after_miss))
        lists = after_hit if after_hit == after_miss else f"{after_hit}|{after_miss}"
        sampling = f" C={self.downweight:g}" if self.downweight != 1 else ""
        abandoning = " abandon" if self.on_late_build is LateBuild.ABANDON else ""
        return f"SSD K={self.speculation_length} F={lists} {self.fallback.value}{sampling}{abandoning}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "ssd",
            "speculation_length": self.speculation_length,
            "fan_out_after_hit": list(self.fan_out_after_hit),
            "fan_out_after_miss": list(self.fan_out_after_miss),
            "fallback": self.fallback.value,
            "downweight": self.downweight,
            "on_late_build": self.on_late_build.value,
        }


Policy = Autoregressive | Speculative | SpeculativeSpeculative


@dataclass(frozen=True)
class PolicyTable:
    """A policy for each range of batch sizes: entry (b, policy) holds from b rows on, up to the next entry.

    Theorem 17's switch is one such table: the draft as its own fallback below a critical batch size, a fallback that
    costs nothing from there on. Several SSD policies of a table must have `downweight` 1: a speculation in hand when
    the policy changes was drawn for the fan-out list and the C of the policy before.
    """

    entries: tuple[tuple[int, Policy], ...]

    def __post_init__(self) -> None:
        entries = [_pair(index, entry) for index, entry in enumerate(require_entries("policy table", self.entries))]
        for start, policy in entries:
            if not isinstance(policy, Policy):
                raise BadInput(f"policy table: from {start} rows", "must be a single policy", policy)
        object.__setattr__(self, "entries", tuple(entries))
        starts = [start for start, _ in self.entries]
        if not starts or starts[0] != 1 or sorted(set(starts)) != starts:
            raise BadInput("policy table", "must start at batch size 1 and rise", starts)
        downweights = [policy.downweight for _, policy in self.entries if isinstance(policy, SpeculativeSpeculative)]
        if len(downweights) > 1 and any(downweight != 1 for downweight in downweights):
            raise BadInput("policy table", "must have downweight 1 where it has several SSD entries", downweights)

    @property
    def name(self) -> str:
        return "; ".join(f"from {start}: {policy.name}" for start, policy in self.entries)

    def at(self, batch_size: int) -> Policy:
        """The policy of a round with `batch_size` rows."""
        return next(policy for start, policy in reversed(self.entries) if start <= max(1, batch_size))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "table", "entries": [[start, policy.to_dict()] for start, policy in self.entries]}


def _pair(index: int, entry: object) -> tuple[int, Any]:
    pair = require_entries(f"policy table: entry {index}", entry)
    if len(pair) != 2:
        raise BadInput(f"policy table: entry {index}", "must be a batch size and a policy", list(pair))
    return require_count(f"policy table: batch size of entry {index}", pair[0], 1), pair[1]


def policy_table_from_dict(data: Mapping[str, Any]) -> PolicyTable:
    """Inverse of `PolicyTable.to_dict`. Raises `BadInput` on an unknown kind or key."""
    fields = require_mapping("policy table", data, ("kind", "entries"), ("entries",))
    if fields.get("kind", "table") != "table":
        raise BadInput("policy.kind", "must be table", fields["kind"])
    entries = [_pair(index, entry) for index, entry in enumerate(require_entries("policy table", fields["entries"]))]
    return PolicyTable(tuple((start, policy_from_dict(policy)) for start, policy in entries))


def policy_from_dict(data: Mapping[str, Any]) -> Policy:
    """Inverse of `to_dict` of a single policy. Raises `BadInput` on an unknown kind or key."""
    fields = dict(require_mapping("policy", data))
    kind = fields.pop("kind", None)
    classes = {"ar": Autoregressive, "sd": Speculative, "ssd": SpeculativeSpeculative}
    if not isinstance(kind, str) or kind not in classes:
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
    shape = geometric_fan_out_shape(num_drafted, budget, acceptance, exponent)
    floors = [int(entry) for entry in shape]
    by_remainder = sorted(range(len(shape)), key=lambda k: (floors[k] - shape[k], k))
    for k in by_remainder[: budget - sum(floors)]:
        floors[k] += 1
    return tuple(floors)


def exact_fan_out(hit_mass: Sequence[Sequence[float]], budget: int) -> tuple[int, ...]:
    """The integer fan-out of the largest hit probability within the budget (Theorem 18 with measured curves).

    `hit_mass[k][f]` is the probability that k tokens are accepted and the bonus token is among the f prepared ones;
    curves need not be concave. Branches that gain nothing are not spent: the sum may stay below `budget`.
    """
    best = np.zeros(budget + 1)  # by the number of branches that the accept counts so far may have
    chosen = []
    for curve in hit_mass:
        widths = np.arange(min(budget, len(curve) - 1) + 1)
        left = np.arange(budget + 1)[:, None] - widths
        totals = np.where(left >= 0, best[left] + np.asarray(curve)[widths], -np.inf)
        best = totals.max(1)
        chosen.append((totals > best[:, None] - NEGLIGIBLE).argmax(1))
    fan_out: list[int] = []
    for widths in reversed(chosen):
        fan_out.append(int(widths[budget - sum(fan_out)]))
    return tuple(reversed(fan_out))
