"""Verification of sampled siblings by rejection: what a tree of sampled tokens accepts at one node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Siblings:
    """What becomes of siblings tested one after another: `chances[i]` that sibling i is the accepted one, `bonus` (V,)
    the law of the token if none is, `none` the probability of that."""

    chances: FloatArray
    none: float
    bonus: FloatArray


def verified_siblings(target_probs: FloatArray, draft_probs: FloatArray, siblings: Sequence[int]) -> Siblings:
    """Recursive rejection (SpecInfer, arXiv 2305.09781; without replacement: 2402.14160) of siblings that were drawn
    one after another from `draft_probs` (V,) without replacement, in this order.

    Each is tested with what the ones before left of the target's law and of the draft's: after a rejection (p - q)+
    takes the place of p, and q loses the token drawn. Lossless whatever the draft. One sibling is token verification.
    """
    p, q = np.asarray(target_probs, dtype=float), np.asarray(draft_probs, dtype=float)
    chances, left = np.zeros(len(siblings)), 1.0
    for index, token in enumerate(siblings):
        if q[token] <= 0:
            raise BadInput("siblings", "must be tokens that the draft's law can still give", token)
        passed = min(1.0, p[token] / q[token])
        chances[index], left = left * passed, left * (1 - passed)
        p = _normalised(np.maximum(0.0, p - q), p)
        q = _normalised(np.where(np.arange(len(q)) == token, 0.0, q), q)
    return Siblings(chances, left, p)


def drawn_siblings(draft_probs: FloatArray, num_siblings: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of siblings drawn without replacement, and its probability. For small vocabularies."""
    for siblings in permutations(np.flatnonzero(draft_probs).tolist(), num_siblings):
        chance, left = 1.0, 1.0
        for token in siblings:
            chance *= draft_probs[token] / left
            left -= draft_probs[token]
        yield siblings, float(chance)


def acceptance_of_siblings(target_probs: FloatArray, draft_probs: FloatArray, num_siblings: int) -> float:
    """Probability that one of so many sampled siblings is accepted; sum min(p, q) for one."""
    drawn = drawn_siblings(draft_probs, num_siblings)
    return sum(chance * (1 - verified_siblings(target_probs, draft_probs, tokens).none) for tokens, chance in drawn)


def _normalised(law: FloatArray, otherwise: FloatArray) -> FloatArray:
    """What is left where nothing is never needed."""
    total = law.sum()
    return law / total if total > 1e-15 else otherwise
