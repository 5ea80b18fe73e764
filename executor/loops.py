"""The three decoders. They say who waits for whom; everything else happens in the roles.

The prefill is treated as a verification of nothing: its outcome is the first token.
"""

from __future__ import annotations

from typing import Protocol

from executor.sequence import OpenSequence, Request
from executor.speculation_cache import Speculation
from executor.target import Target
from sim.policy import Speculative, SpeculativeSpeculative
from sim.trace import Outcome, Source

NO_SPECULATION = Speculation(Source.SYNCHRONOUS)


class Draft(Protocol):
    """The draft role, in this process or in another."""

    def begin(self, policy: Speculative | SpeculativeSpeculative, request: Request) -> None:
        """Start the prefill; need not wait for its end."""

    def wait(self) -> None:
        """Return when the prefill is done."""

    def speculate(self, outcome: Outcome, remaining: int) -> Speculation:
        """The next round's speculation, at most `remaining` - 1 tokens. Under SSD the draft then builds on its own."""


def autoregressive(request: Request, target: Target) -> OpenSequence:
    """AR: one target pass per token."""
    sequence = OpenSequence(request)
    outcome = target.prefill(request.prompt, request.temperature, request.draws())
    sequence.commit(outcome, NO_SPECULATION)
    target.recorder.begin_decoding()
    while sequence.is_open:
        _verify(target, NO_SPECULATION, sequence)
    return sequence


def speculative(policy: Speculative, request: Request, target: Target, draft: Draft) -> OpenSequence:
    """SD: the target waits while the draft drafts, the draft waits while the target verifies."""
    sequence, outcome = _begin(policy, request, target, draft)
    while sequence.is_open:
        speculation = draft.speculate(outcome, sequence.remaining)
        outcome = _verify(target, speculation, sequence)
    return sequence


def speculative_speculative(
    policy: SpeculativeSpeculative, request: Request, target: Target, draft: Draft
) -> OpenSequence:
    """SSD: having answered an outcome, the draft prepares answers to the next ones while the target verifies."""
    sequence, outcome = _begin(policy, request, target, draft)
    while sequence.is_open:
        speculation = draft.speculate(outcome, sequence.remaining)  # a look-up on a hit; the build starts on return
        outcome = _verify(target, speculation, sequence)
    return sequence


def _begin(
    policy: Speculative | SpeculativeSpeculative, request: Request, target: Target, draft: Draft
) -> tuple[OpenSequence, Outcome]:
    """Both prefills, side by side where the roles run side by side."""
    sequence = OpenSequence(request)
    draft.begin(policy, request)
    try:
        outcome = target.prefill(request.prompt, request.temperature, request.draws())
    finally:
        draft.wait()
    sequence.commit(outcome, NO_SPECULATION)
    target.recorder.begin_decoding()
    return sequence, outcome


def _verify(target: Target, speculation: Speculation, sequence: OpenSequence) -> Outcome:
    """One verification, committed and recorded as a round."""
    context = target.model.length
    outcome = target.verify(speculation)
    num_accepted, num_emitted = sequence.commit(outcome, speculation)
    target.recorder.end_round(speculation.source, len(speculation.tokens), num_accepted, num_emitted, context)
    return outcome
