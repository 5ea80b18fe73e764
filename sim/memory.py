"""What a policy keeps in memory, and whether the devices have room for it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sim.errors import require_mapping, require_number
from sim.placement import Placement
from sim.policy import Policy, SpeculativeSpeculative
from sim.trace import Lane, Source

MOST_ROWS = 1 << 20  # where nothing limits the batch


@dataclass(frozen=True)
class Demand:
    """Bytes of one kind on one device; `what` says how they come about."""

    lane: Lane
    what: str
    num_bytes: float


@dataclass(frozen=True)
class Memory:
    """Room of one target and one draft device beside the weights, and the KV bytes of one token of context.

    The defaults limit nothing. What a draft distribution takes is said by the placement. Raises `BadInput` naming the
    field that is of another type or outside its range.
    """

    target_bytes: float = math.inf
    draft_bytes: float = math.inf
    target_kv_bytes_per_token: float = 0.0
    draft_kv_bytes_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("target_bytes", "draft_bytes"):
            room = require_number(f"memory.{name}", getattr(self, name), 0, math.inf, above=True)
            object.__setattr__(self, name, room)
        for name in ("target_kv_bytes_per_token", "draft_kv_bytes_per_token"):
            object.__setattr__(self, name, require_number(f"memory.{name}", getattr(self, name), 0))

    def demands(
        self, policy: Policy, batch_size: int, context: int, placement: Placement, *, sampled: bool
    ) -> list[Demand]:
        """What `batch_size` rows of `context` tokens (the longest, prompt and text) on each target take on a device of
        either lane.

        Every row reserves K + 1 slots ahead of its context, accepted or not. A draft device holds the rows of every
        target that shares it, of which it is the one with the largest share: all of them where branches are split, its
        own where rows are. Each of its branches holds K slots more, and where drafts are sampled a distribution for
        each of them; the target holds the distributions of the K tokens that it verifies.
        """
        K = policy.speculation_length
        ahead = f"({context} tokens of context + {K + 1} ahead)"
        kv_bytes = (context + K + 1) * self.target_kv_bytes_per_token
        demands = [Demand(Lane.TARGET, f"KV of {batch_size} x {ahead}", batch_size * kv_bytes)]
        if K == 0:
            return demands
        distributions = placement.distribution_bytes if sampled else 0
        demands.append(
            Demand(Lane.TARGET, f"distributions of {batch_size} x {K} draft tokens", batch_size * K * distributions)
        )
        num_targets = placement.num_targets
        targets = f"{num_targets} targets x " if num_targets > 1 else ""
        rows = placement.shares_of_rows(batch_size)[0]
        num_slots = num_targets * rows * (context + K + 1)
        demands.append(
            Demand(Lane.DRAFT, f"KV of {targets}{rows} x {ahead}", num_slots * self.draft_kv_bytes_per_token)
        )
        num_branches = _most_branches(policy)
        if num_branches:
            rows, branches = placement.shares_of_build(num_branches, batch_size)[0]
            num_drafted = num_targets * math.ceil(rows * branches) * K
            drafted = f"{targets}{rows} x {branches:g} branches of {K} tokens"
            demands.append(Demand(Lane.DRAFT, f"KV of {drafted}", num_drafted * self.draft_kv_bytes_per_token))
            demands.append(Demand(Lane.DRAFT, f"distributions of {drafted}", num_drafted * distributions))
        return demands

    def why_infeasible(
        self, policy: Policy, batch_size: int, context: int, placement: Placement, *, sampled: bool
    ) -> str | None:
        """Which device has too little room, and for what; None where everything fits."""
        for lane, room in ((Lane.TARGET, self.target_bytes), (Lane.DRAFT, self.draft_bytes)):
            parts = [
                part
                for part in self.demands(policy, batch_size, context, placement, sampled=sampled)
                if part.lane is lane and part.num_bytes
            ]
            needed = sum(part.num_bytes for part in parts)
            if needed > room:
                made_of = " + ".join(f"{part.what} {_readable(part.num_bytes)}" for part in parts)
                return f"{lane.value} memory: {_readable(needed)} needed, {_readable(room)} there ({made_of})"
        return None

    def most_rows(self, policy: Policy, context: int, placement: Placement, *, sampled: bool) -> int:
        """The largest batch of each target that fits, `MOST_ROWS` where nothing limits it, 0 where not even one row
        does."""

        def does_not_fit(batch_size: int) -> bool:
            return self.why_infeasible(policy, batch_size, context, placement, sampled=sampled) is not None

        return bisect_right(range(1, MOST_ROWS + 1), False, key=does_not_fit)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: unlimited room is None."""
        return {k: (None if math.isinf(v) else v) for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Memory:
        """Inverse of `to_dict`. Raises `BadInput` naming an unknown key."""
        given = require_mapping("memory", data, [entry.name for entry in fields(cls)])
        unlimited = [name for name in ("target_bytes", "draft_bytes") if given.get(name, 0) is None]
        return cls(**{**given, **dict.fromkeys(unlimited, math.inf)})


def _most_branches(policy: Policy) -> int:
    if not isinstance(policy, SpeculativeSpeculative):
        return 0
    return max(sum(policy.fan_out(source)) for source in (Source.HIT, Source.MISS))


def _readable(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"
