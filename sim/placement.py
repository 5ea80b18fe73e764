"""Where draft and target run, and what lies between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from sim.errors import BadInput, require_count, require_mapping, require_number

TOKEN_BYTES = 4  # a token id, an accepted count


class Split(StrEnum):
    """What several draft devices divide among them."""

    BRANCHES = "branches"  # each drafts its share of the branches of every row; every one runs the glue pass
    ROWS = "rows"  # each serves its share of the rows of a batch


@dataclass(frozen=True)
class Placement:
    """Devices, and the connection between them; the defaults are one device for each role and a connection whose time
    is already in the host times.

    `num_targets` targets share the draft devices and queue for them. A message of n bytes takes `transfer_latency_s` +
    n / `transfer_bytes_per_s`. `distribution_bytes` is the size of one draft distribution, V times the bytes of a
    probability; distributions travel where the temperature is above 0. Raises `BadInput` naming the field that is of
    another type or outside its range.
    """

    num_draft_devices: int = 1
    split: Split = Split.BRANCHES
    num_targets: int = 1
    transfer_latency_s: float = 0.0
    transfer_bytes_per_s: float = math.inf
    distribution_bytes: int = 0

    def __post_init__(self) -> None:
        if self.split not in list(Split):
            raise BadInput("placement.split", f"must be one of {', '.join(Split)}", self.split)
        object.__setattr__(self, "split", Split(self.split))
        for name, minimum in (("num_draft_devices", 1), ("num_targets", 1), ("distribution_bytes", 0)):
            object.__setattr__(self, name, require_count(f"placement.{name}", getattr(self, name), minimum))
        latency_s = require_number("placement.transfer_latency_s", self.transfer_latency_s, 0)
        bytes_per_s = self.transfer_bytes_per_s
        bytes_per_s = require_number("placement.transfer_bytes_per_s", bytes_per_s, 0, math.inf, above=True)
        object.__setattr__(self, "transfer_latency_s", latency_s)
        object.__setattr__(self, "transfer_bytes_per_s", bytes_per_s)

    def message_s(self, num_bytes: float) -> float:
        """Time of one message between target and draft."""
        return self.transfer_latency_s + num_bytes / self.transfer_bytes_per_s

    def outcome_s(self, batch_size: int = 1) -> float:
        """Time of the outcomes of `batch_size` rows from target to draft: an accepted count and a token each."""
        return self.message_s(2 * TOKEN_BYTES * batch_size)

    def speculation_bytes(self, num_tokens: float, *, sampled: bool) -> float:
        """Bytes of `num_tokens` draft tokens, with their distributions where they were sampled."""
        return num_tokens * (TOKEN_BYTES + (self.distribution_bytes if sampled else 0))

    def speculation_s(self, num_tokens: float, *, sampled: bool) -> float:
        """Time of `num_tokens` draft tokens (of all rows together) from draft to target."""
        return self.message_s(self.speculation_bytes(num_tokens, sampled=sampled))

    def shares_of_build(self, num_branches: float, batch_size: int) -> list[tuple[int, float]]:
        """(rows, branches of each row) that every draft device at work builds, for `num_branches` branches of each of
        `batch_size` rows (a mean where rows differ)."""
        if self.num_draft_devices == 1:
            return [(batch_size, num_branches)]
        if self.split is Split.ROWS:
            return [(rows, num_branches) for rows in self.shares_of_rows(batch_size)]
        if batch_size == 1:
            return [(1, branches) for branches in _even_shares(round(num_branches), self.num_draft_devices)]
        num_devices = max(1, min(self.num_draft_devices, math.floor(num_branches)))
        return [(batch_size, num_branches / num_devices)] * num_devices

    def shares_of_rows(self, batch_size: int) -> list[int]:
        """Rows that every draft device at work drafts for one after another's token; all on one where branches are
        split."""
        if self.split is Split.BRANCHES:
            return [batch_size]
        return _even_shares(batch_size, self.num_draft_devices)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: an infinite bandwidth is None."""
        data = asdict(self)
        return {k: (None if isinstance(v, float) and math.isinf(v) else v) for k, v in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Placement:
        """Inverse of `to_dict`. Raises `BadInput` naming an unknown key."""
        given = dict(require_mapping("placement", data, [entry.name for entry in fields(cls)]))
        if given.get("transfer_bytes_per_s", 0) is None:
            given["transfer_bytes_per_s"] = math.inf
        return cls(**given)


def _even_shares(num: int, num_devices: int) -> list[int]:
    base, extra = divmod(num, num_devices)
    return [share for share in (base + (device < extra) for device in range(num_devices)) if share]
