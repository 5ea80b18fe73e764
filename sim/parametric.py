"""Agreement from summary numbers, for those without a token-level record: acceptance by position, hit curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput, require_count, require_entries, require_mapping, require_number
from sim.policy import Drafting, Proposer
from sim.theory import miss_rate
from sim.trace import Source

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
UNBOUNDED_FAN_OUT = 4096  # the curves say something about any fan-out; this bounds the tables made from them


@dataclass(frozen=True)
class HitCurve:
    """Hit rate 1 - c F^-r of a fan-out F (Definition 11 with its prefactor c); 0 at F = 0."""

    prefactor: float
    exponent: float

    def __post_init__(self) -> None:
        for name in ("prefactor", "exponent"):
            object.__setattr__(self, name, require_number(f"hit curve: {name}", getattr(self, name), 0))

    def hit_rate(self, fan_out: int) -> float:
        return 1.0 - miss_rate(fan_out, self.exponent, self.prefactor)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "hit curve") -> HitCurve:
        """Inverse of `dataclasses.asdict`. Raises `BadInput` with `name` before the key."""
        known = [entry.name for entry in fields(cls)]
        values = require_mapping(name, data, known, known)
        return cls(**{key: require_number(f"{name}.{key}", value, 0) for key, value in values.items()})


@dataclass(frozen=True)
class ParametricAgreement(Agreement):
    """`num_texts` texts of one length on which every round is like every other.

    `acceptance[j]` is the conditional probability that draft token j is accepted once it is tested, `after_hit[k]` and
    `after_miss[k]` the hit curves after k acceptances in rounds of either source; the last entry of each stands for all
    that follow. Rounds are independent: what texts have in easy and hard passages is not in these numbers.
    """

    prompt_tokens: int
    new_tokens: int
    acceptance: tuple[float, ...]
    after_hit: tuple[HitCurve, ...]
    after_miss: tuple[HitCurve, ...]
    sampling_temperature: float = 0.0
    num_texts: int = 1  # texts beyond the first give a batch its rows

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "num_texts"):
            object.__setattr__(self, name, require_count(name, getattr(self, name), 1))
        temperature = require_number("sampling_temperature", self.sampling_temperature, 0)
        object.__setattr__(self, "sampling_temperature", temperature)
        for name in ("acceptance", "after_hit", "after_miss"):
            entries = require_entries(name, getattr(self, name))
            if not entries:
                raise BadInput(name, "must have at least one entry")
            object.__setattr__(self, name, entries)
        probabilities = [require_number(f"acceptance[{j}]", p, 0, 1) for j, p in enumerate(self.acceptance)]
        object.__setattr__(self, "acceptance", tuple(probabilities))
        for name in ("after_hit", "after_miss"):
            for index, curve in enumerate(getattr(self, name)):
                if not isinstance(curve, HitCurve):
                    raise BadInput(f"{name}[{index}]", "must be a hit curve", curve)

    @property
    def identity(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            "dataset": "parametric",
            "temperature": self.sampling_temperature,
            "stop_ids": [],
            "max_new_tokens": self.new_tokens,
        }

    @cached_property
    def prompt_length(self) -> IntArray:  # type: ignore[override]
        return np.full(self.num_texts, self.prompt_tokens)

    @cached_property
    def stopped(self) -> NDArray[np.bool_]:  # type: ignore[override]
        return np.zeros(self.num_texts, dtype=bool)

    @cached_property
    def lengths(self) -> IntArray:
        return np.full(self.num_texts, self.new_tokens)

    @property
    def num_candidates(self) -> int:
        return UNBOUNDED_FAN_OUT

    def text(self, prompt: int) -> tuple[int, ...]:
        """Token ids are not known; zeros stand for them."""
        return (0,) * self.new_tokens

    def check(self, drafting: Drafting) -> None:
        """Raises `BadInput` on draft tokens that are not drawn from q: these numbers do not say how they fare."""
        rule = "needs a token-level agreement record, which `saguaro profile` writes; summary numbers do not tell it"
        if drafting.downweight != 1:
            raise BadInput("downweight below 1", rule, drafting.downweight)
        if drafting.proposer is not Proposer.DRAFT_MODEL:
            raise BadInput(f"fallback {drafting.proposer.value}", rule)

    def acceptance_table(self, draft_index: int, drafting: Drafting) -> FloatArray:
        self.check(drafting)
        return self._everywhere(self.acceptance[min(draft_index, len(self.acceptance) - 1)])

    def hit_table(self, fan_out: int, accept_count: int, drafting: Drafting, *, rejected: bool) -> FloatArray:
        self.check(drafting)
        curves = self.after_hit if drafting.source is Source.HIT else self.after_miss
        return self._everywhere(curves[min(accept_count, len(curves) - 1)].hit_rate(fan_out))

    def _everywhere(self, probability: float) -> FloatArray:
        return np.full((self.num_texts, self.new_tokens), probability)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ParametricAgreement:
        """Inverse of `to_dict`. Raises `BadInput` naming the key."""
        required = [entry.name for entry in fields(cls) if entry.default is MISSING]
        require_mapping("parametric", data, [entry.name for entry in fields(cls)], required)
        curves = {
            name: tuple(
                HitCurve.from_dict(curve, f"{name}[{index}]")
                for index, curve in enumerate(require_entries(name, data[name]))
            )
            for name in ("after_hit", "after_miss")
        }
        return cls(**{**data, **curves})


def conditional_from_cumulative(cumulative: Sequence[float]) -> tuple[float, ...]:
    """Conditional acceptance by draft position from its cumulative form (share of rounds that accept more than j).

    Raises `BadInput` where the cumulative form rises or leaves [0, 1].
    """
    conditional = []
    before = 1.0
    for index, value in enumerate(require_entries("cumulative", cumulative)):
        if not 0 <= require_number(f"cumulative[{index}]", value) <= before:
            rule = f"cumulative acceptance must not rise and lie in [0, 1]; the entry before is {before:g}"
            raise BadInput(f"cumulative[{index}]", rule, value)
        conditional.append(value / before if before > 0 else 0.0)
        before = value
    return tuple(conditional)
