"""Who speculates when nothing was prepared: in the first round and after a miss."""

from __future__ import annotations

from executor.drafting import Drafter
from executor.speculation_cache import Speculation
from sim.errors import BadInput
from sim.policy import Fallback
from sim.trace import Source


def fall_back(kind: Fallback, drafter: Drafter, num_tokens: int, source: Source) -> Speculation:
    """`draft`: the draft model drafts `num_tokens` tokens while the target waits. `none`: an empty speculation."""
    match kind:
        case Fallback.DRAFT | Fallback.DRAFT_MISSING:
            return drafter.draft(num_tokens, source)
        case Fallback.NONE:
            return Speculation(source)
        case _:
            raise BadInput("fallback", "the executor runs draft, draft_missing and none", kind.value)
