"""The three decoders. They say who waits for whom; everything else happens in the roles.

The rows of a batch advance together: one verification for all of them, in which each accepts what it accepts. A row
that ends leaves, and the others go on. The prefill is treated as a verification of nothing: its outcomes are the first
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from executor.recorder import RowRound
from executor.sequence import OpenBatch, Request, Verified
from executor.speculation_cache import Speculation
from executor.target import Target
from sim.policy import Speculative, SpeculativeSpeculative
from sim.trace import Outcome, Source, Span

NO_SPECULATION = Speculation(Source.SYNCHRONOUS)


class Draft(Protocol):
    """The draft role, in this process or in another."""

    def begin(self, policy: Speculative | SpeculativeSpeculative, requests: Sequence[Request]) -> None:
        """Start the prefill of a batch; need not wait for its end."""

    def wait(self) -> None:
        """Return when the prefill is done."""

    def speculate(self, verified: Mapping[int, Verified]) -> dict[int, Speculation]:
        """The next round's speculation of each row that goes on, at most `remaining` - 1 tokens. Under SSD the draft
        then builds on its own."""

    def spans(self) -> list[Span]:
        """What it did for the batch."""


def autoregressive(batch: OpenBatch, target: Target) -> None:
    """AR: one target pass per token."""
    outcomes = target.prefill(batch.requests)
    batch.commit(outcomes, dict.fromkeys(outcomes, NO_SPECULATION))
    target.recorder.begin_decoding()
    while batch.rows:
        _verify(target, dict.fromkeys(batch.rows, NO_SPECULATION), batch)


def speculative(policy: Speculative, batch: OpenBatch, target: Target, draft: Draft) -> None:
    """SD: the target waits while the draft drafts, the draft waits while the target verifies."""
    outcomes = _begin(policy, batch, target, draft)
    while batch.rows:
        speculations = draft.speculate(batch.verified(outcomes))
        outcomes = _verify(target, speculations, batch)


def speculative_speculative(policy: SpeculativeSpeculative, batch: OpenBatch, target: Target, draft: Draft) -> None:
    """SSD: having answered the outcomes, the draft prepares answers to the next ones while the target verifies."""
    outcomes = _begin(policy, batch, target, draft)
    while batch.rows:
        speculations = draft.speculate(batch.verified(outcomes))  # look-ups on hits; the build starts on return
        outcomes = _verify(target, speculations, batch)


def _begin(
    policy: Speculative | SpeculativeSpeculative, batch: OpenBatch, target: Target, draft: Draft
) -> dict[int, Outcome]:
    """Both prefills, side by side where the roles run side by side."""
    draft.begin(policy, batch.requests)
    try:
        outcomes = target.prefill(batch.requests)
    finally:
        draft.wait()
    batch.commit(outcomes, dict.fromkeys(outcomes, NO_SPECULATION))
    target.recorder.begin_decoding()
    return outcomes


def _verify(target: Target, speculations: Mapping[int, Speculation], batch: OpenBatch) -> dict[int, Outcome]:
    """One verification, committed and recorded as a round of every row."""
    rows = batch.rows
    target.keep(rows)
    contexts = target.contexts(rows)
    outcomes = target.verify(speculations)
    counts = batch.commit(outcomes, speculations)
    target.recorder.end_round(
        RowRound(row, speculations[row].source, len(speculations[row].tokens), *counts[row], context)
        for row, context in zip(rows, contexts, strict=True)
    )
    return outcomes
