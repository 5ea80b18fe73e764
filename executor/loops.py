"""The three decoders. They say who waits for whom; everything else happens in the roles.

The rows of a batch advance together: one verification for all of them, in which each accepts what it accepts. A row
that ends leaves, and the others go on. The prefill is treated as a verification of nothing: its outcomes are the first
tokens. Every round runs under the policy that is chosen for it, so a batch may go from one decoder to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from executor.observation import DraftWork, Observer
from executor.recorder import RowRound
from executor.sequence import OpenBatch, Question, Request
from executor.speculation_cache import NO_SPECULATION, Speculation
from executor.target import Target
from sim.decider import check_succession
from sim.policy import Policy
from sim.trace import Source, Span

Choose = Callable[[int], Policy]  # number of rows -> the policy of their next round


class Draft(Protocol):
    """The draft role, in this process or in another."""

    @property
    def work(self) -> DraftWork:
        """For the round that it answered last. Filled in as far as it is known; a build's time is where the batch began
        with `tells_builds`."""

    def begin(self, requests: Sequence[Request], *, tells_builds: bool = False) -> None:
        """Start the prefill of a batch; need not wait for its end."""

    def wait(self) -> None:
        """Return when the prefill is done."""

    def speculate(self, question: Question) -> dict[int, Speculation]:
        """The next round's speculation of each row that goes on, at most `remaining` - 1 tokens. Under SSD the draft
        then builds on its own."""

    def take_notice(self) -> None:
        """Fill in what has become known of its builds."""

    def spans(self) -> list[Span]:
        """What it did for the batch."""


def autoregressive(choose: Choose, batch: OpenBatch, target: Target) -> None:
    """AR: one target pass per token, whatever the policy says. No draft is needed."""
    outcomes = target.prefill(batch.requests)
    batch.commit(outcomes, dict.fromkeys(outcomes, NO_SPECULATION))
    target.recorder.begin_decoding()
    while batch.rows:
        policy = choose(len(batch.rows))
        _verify(target, policy, dict.fromkeys(batch.rows, NO_SPECULATION), batch)


def speculative(
    choose: Choose, batch: OpenBatch, target: Target, draft: Draft, observer: Observer | None = None
) -> None:
    """SD: the target waits while the draft drafts, the draft waits while the target verifies. SSD: having answered the
    outcomes, the draft prepares answers to the next ones while the target verifies. Rounds of AR pass without the
    draft, which hears of them with the next question.
    """
    _begin(batch, target, draft, tells_builds=observer is not None)
    before: Policy | None = None
    while batch.rows:
        policy = choose(len(batch.rows))
        if policy.speculation_length:
            speculations = draft.speculate(batch.question(policy))  # look-ups on hits; the build starts on return
            _check_in_hand(before, policy, speculations)
            work = draft.work
        else:
            speculations, work = dict.fromkeys(batch.rows, NO_SPECULATION), DraftWork()
        _verify(target, policy, speculations, batch)
        if observer is not None:
            draft.take_notice()
            observer.end_round(policy, *target.recorder.last_round(), work)
        before = policy


def _begin(batch: OpenBatch, target: Target, draft: Draft, *, tells_builds: bool) -> None:
    """Both prefills, side by side where the roles run side by side."""
    draft.begin(batch.requests, tells_builds=tells_builds)
    try:
        outcomes = target.prefill(batch.requests)
    finally:
        draft.wait()
    batch.commit(outcomes, dict.fromkeys(outcomes, NO_SPECULATION))
    target.recorder.begin_decoding()


def _check_in_hand(before: Policy | None, policy: Policy, speculations: Mapping[int, Speculation]) -> None:
    """Raises `BadInput` if a speculation was prepared under a policy that this one must not follow."""
    prepared = any(s.source in (Source.HIT, Source.REDRAFTED) for s in speculations.values())
    if prepared and before is not None and before != policy:
        check_succession(before, policy)


def _verify(target: Target, policy: Policy, speculations: Mapping[int, Speculation], batch: OpenBatch) -> None:
    """One verification, committed and recorded as a round of every row."""
    rows = batch.rows
    target.keep(rows)
    contexts, name = target.contexts(rows), policy.name
    outcomes = target.verify(speculations)
    counts = batch.commit(outcomes, speculations)
    target.recorder.end_round(
        RowRound(row, speculations[row].source, len(speculations[row].tokens), *counts[row], context, name)
        for row, context in zip(rows, contexts, strict=True)
    )
    batch.audit(target.model)
