"""SSD that prepares one outcome only: everything is accepted."""

from __future__ import annotations

from sim.policy import Fallback, SpeculativeSpeculative


def all_accepted_only(
    speculation_length: int, num_bonus_tokens: int = 1, fallback: Fallback = Fallback.DRAFT
) -> SpeculativeSpeculative:
    """The draft goes on as if its whole speculation were accepted, with its likeliest bonus tokens; anything else is a
    miss.

    That is what AMUSD ("Asynchronous Multi-Device Speculative Decoding", arXiv 2410.17375) keeps of a draft that never
    stops: on a mismatch it drops what it has made and starts again. AMUSD verifies whatever has been drafted by then;
    here the length is fixed. A policy like others: every engine predicts it, and the executor runs it.
    """
    fan_out = (0,) * speculation_length + (num_bonus_tokens,)
    return SpeculativeSpeculative(speculation_length, fan_out, fan_out, fallback)
