"""Probabilities of an agreement at the places after the start of a round: scalars, or by prompt and place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement, AgreementRecord
from sim.policy import Drafting, Proposer
from sim.trace import Source

FloatArray = NDArray[np.float64]

SYNCHRONOUS = Drafting(Proposer.DRAFT_MODEL, 1, (), Source.SYNCHRONOUS)


def read_after(by_position: NDArray, offset: int, beyond: float = 0.0) -> NDArray:
    """A (num_prompts, positions) table read `offset` tokens after each start."""
    missing = min(offset, by_position.shape[1])
    return np.pad(by_position[:, offset:], ((0, 0), (0, missing)), constant_values=beyond)


def accepted(agreement: Agreement, draft_index: int, offset: int) -> FloatArray:
    """Probability that draft token number `draft_index` is accepted where it stands `offset` tokens after the start of
    a round; 0 beyond the end of a text."""
    table = agreement.acceptance_table(draft_index, SYNCHRONOUS)
    return read_after(table, offset) if isinstance(agreement, AgreementRecord) else np.asarray(table[0, 0])
