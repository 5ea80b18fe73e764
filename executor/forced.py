"""Scripted accept counts: rounds of a known shape, for profiling without the noise of acceptance. No generation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from executor.speculation_cache import NO_SPECULATION, Speculation
from executor.target import Target
from sim.errors import BadInput, require_count, require_entries
from sim.trace import Outcome


class ForcedTarget(Target):
    """A target that accepts in round r `accept_counts[r modulo their number]` draft tokens of every row, or all that
    were drafted if they are fewer. The bonus token is its own, drawn after those; the prefill is as ever.

    Whatever the draft proposed is committed, so the text follows no law of the target. Raises `BadInput` unless there
    is at least one count, all of them integers >= 0.
    """

    def __init__(self, target: Target, accept_counts: Iterable[int]) -> None:
        super().__init__(target.model, target.recorder)
        counts = require_entries("forced_acceptance", accept_counts)
        self.accept_counts = tuple(require_count("forced_acceptance", count, 0) for count in counts)
        if not self.accept_counts:
            raise BadInput("forced_acceptance", "must hold at least one accept count")

    def _judge(self, row: int, logits: Tensor, speculation: Speculation) -> Tensor:
        if self.recorder.round < 0:
            return super()._judge(row, logits, speculation)
        num_accepted = self._num_accepted(speculation)
        bonus = super()._judge(row, logits[num_accepted : num_accepted + 1], NO_SPECULATION)
        return torch.cat((bonus, logits.amax(-1).double()))

    def _outcome(self, row: int, speculation: Speculation, numbers: list[float]) -> Outcome:
        if self.recorder.round < 0:
            return super()._outcome(row, speculation, numbers)
        num_rows = len(speculation.tokens) + 1
        self._require_finite(row, numbers[-num_rows:])
        bonus = super()._outcome(row, NO_SPECULATION, numbers[:-num_rows])
        return Outcome(self._num_accepted(speculation), bonus.bonus_token)

    def _num_accepted(self, speculation: Speculation) -> int:
        return min(self.accept_counts[self.recorder.round % len(self.accept_counts)], len(speculation.tokens))
