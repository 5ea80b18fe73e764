"""Who speculates when nothing was prepared: in the first round and after a miss."""

from __future__ import annotations

from collections.abc import Mapping

from executor.drafting import Drafter
from executor.speculation_cache import Speculation
from sim.ngram import ngram_proposal
from sim.policy import Drafting, Fallback


def fall_back(
    kind: Fallback, drafter: Drafter, num_tokens: Mapping[int, int], drafting: Drafting
) -> dict[int, Speculation]:
    """For each row at most so many tokens.

    `draft`, `draft_missing`: the draft model drafts while the target waits. `ngram`: what followed the last tokens
    earlier, if anything did. `filler`: tokens drawn uniformly. `none`: nothing.
    """
    if kind in (Fallback.DRAFT, Fallback.DRAFT_MISSING):
        return drafter.draft(num_tokens, drafting)
    return {
        row: Speculation(drafting.source, _without_model(kind, drafter, row, num), proposer=drafting.proposer)
        for row, num in num_tokens.items()
    }


def _without_model(kind: Fallback, drafter: Drafter, row: int, num_tokens: int) -> tuple[int, ...]:
    if kind is Fallback.NGRAM:
        return ngram_proposal(drafter.committed[row], num_tokens)
    return drafter.filler(row, num_tokens) if kind is Fallback.FILLER else ()
