"""What the draft prepared: a speculation for each likely outcome of the verification that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sim.policy import Proposer
from sim.trace import Outcome, Source


@dataclass(frozen=True)
class Speculation:
    """Draft tokens and where they come from.

    At temperature > 0 the draft model's come with the (n, V) distributions that they were drawn from. The laws of other
    proposers are known without (`sampling.stated_probs`).
    """

    source: Source
    tokens: tuple[int, ...] = ()
    draft_probs: Tensor | None = None
    proposer: Proposer = Proposer.DRAFT_MODEL

    def first(self, num_tokens: int) -> Speculation:
        """Its first `num_tokens` tokens, all of them if it has fewer."""
        probs = None if self.draft_probs is None else self.draft_probs[:num_tokens]
        return Speculation(self.source, self.tokens[:num_tokens], probs, self.proposer)


NO_SPECULATION = Speculation(Source.SYNCHRONOUS)  # verified by a prefill and by rounds of AR


class SpeculationCache:
    """Outcome -> speculation. Lives one round; each speculation is handed out at most once.

    `outcomes` has B entries; `steps` holds the K draft steps of all branches: of each the tokens, B or more, and, at
    temperature > 0, the (B, V) distributions. An abandoned build leaves outcomes without steps.
    """

    def __init__(
        self, outcomes: Sequence[Outcome] = (), steps: Sequence[tuple[Sequence[int], Tensor | None]] = ()
    ) -> None:
        self._branch = {outcome: branch for branch, outcome in enumerate(outcomes)}
        self._has_steps = bool(steps)
        # What a hit would wait for is done now, beside the verification.
        self._tokens = list(zip(*(tokens for tokens, _ in steps), strict=True)) if steps else [()] * len(outcomes)
        self._probs = [probs for _, probs in steps if probs is not None]

    def __contains__(self, outcome: Outcome) -> bool:
        return outcome in self._branch

    @property
    def is_built(self) -> bool:
        """Whether it holds speculations."""
        return bool(self._branch) and self._has_steps

    def take(self, outcome: Outcome) -> Speculation:
        """The prepared speculation of an outcome that is in the cache; it is forgotten."""
        branch = self._branch.pop(outcome)
        rows = [probs[branch] for probs in self._probs]
        return Speculation(Source.HIT, self._tokens[branch], torch.stack(rows) if rows else None)
