"""Who speculates when nothing was prepared: in the first round and after a miss."""

from __future__ import annotations

from executor.drafting import Drafter
from executor.speculation_cache import Speculation
from sim.ngram import ngram_proposal
from sim.policy import Drafting, Fallback


def fall_back(kind: Fallback, drafter: Drafter, num_tokens: int, drafting: Drafting) -> Speculation:
    """At most `num_tokens` tokens.

    `draft`: the draft model drafts while the target waits. `ngram`: what followed the last tokens earlier, if anything
    did. `filler`: tokens drawn uniformly. `none`: nothing.
    """
    match kind:
        case Fallback.DRAFT | Fallback.DRAFT_MISSING:
            return drafter.draft(num_tokens, drafting)
        case Fallback.NGRAM:
            tokens = ngram_proposal(drafter.committed, num_tokens)
        case Fallback.FILLER:
            tokens = drafter.filler(num_tokens)
        case Fallback.NONE:
            tokens = ()
    return Speculation(drafting.source, tokens, proposer=drafting.proposer)
