"""The law that draft tokens are drawn from, where a record knows it only for the likeliest tokens.

r is the law of the proposal: q of the draft model, q' of Saguaro sampling, or 1/V. A token y ~ r is accepted with
probability min(1, p(y)/r(y)); the probability that it is rejected, sum (r - p)+, is 1 - sum min(p, r) over the whole
vocabulary. Beyond the M recorded candidates that sum is only known between two bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

ROUNDING = 1e-9  # of a sum of recorded probabilities
NEVER = 1e-12  # a probability of rejection below it: what follows a rejection has no weight


@dataclass(frozen=True)
class Proposal:
    """r at n positions: `top` (n, M) at the M most likely tokens of q, p there, and bounds of sum min(p, r), (n,)."""

    top: FloatArray
    top_p: FloatArray
    overlap_low: FloatArray
    overlap_high: FloatArray

    def rejected_within(self, fan_out: int) -> tuple[FloatArray, FloatArray]:
        """(n,) bounds of the probability that a rejected token is among the `fan_out` most likely of q.

        The rejected token has the law (r - p)+ normalised. 1 where nothing is ever rejected.
        """
        inside = np.maximum(0.0, self.top[:, :fan_out] - self.top_p[:, :fan_out]).sum(1)
        most, least = 1.0 - self.overlap_low, 1.0 - self.overlap_high
        low, high = (np.minimum(1.0, inside / np.maximum(total, NEVER)) for total in (most, least))
        return np.where(most > NEVER, low, 1.0), np.where(most > NEVER, high, 1.0)


def plain_proposal(top_p: FloatArray, top_q: FloatArray, overlap: FloatArray) -> Proposal:
    """r = q, whose overlap with p is recorded."""
    return Proposal(top_q, top_p, overlap, overlap)


def downweighted_mass(top_q: FloatArray, num_tokens: int, downweight: float) -> FloatArray:
    """(n,) Z, the sum of q once its `num_tokens` most likely tokens are multiplied by `downweight` (Definition 14)."""
    top, others = top_q[:, :num_tokens].sum(1), top_q[:, num_tokens:].sum(1)
    return downweight * top + others + _beyond(top_q)


def downweighted_proposal(
    top_p: FloatArray, top_q: FloatArray, overlap: FloatArray, num_tokens: int, downweight: float
) -> Proposal:
    """r = q' with its `num_tokens` <= M most likely tokens multiplied by `downweight`, renormalised by Z.

    Beyond the candidates r = q/Z >= q, so min(p, q) <= min(p, r) <= min(p, q)/Z: the sum lies between the recorded
    overlap there and the smaller of that over Z and the mass of p there.
    """
    Z = downweighted_mass(top_q, num_tokens, downweight)
    weights = np.where(np.arange(top_q.shape[1]) < num_tokens, downweight, 1.0)
    top = top_q * weights / Z[:, None]
    inside = np.minimum(top_p, top).sum(1)
    p_beyond, q_beyond = _beyond(top_p), _beyond(top_q)
    overlap_beyond = overlap - np.minimum(top_p, top_q).sum(1)
    overlap_beyond = np.clip(overlap_beyond, 0.0, np.minimum(p_beyond, q_beyond))
    return Proposal(top, top_p, inside + overlap_beyond, inside + np.minimum(p_beyond, overlap_beyond / Z))


def uniform_proposal(top_p: FloatArray, vocab_size: int) -> Proposal:
    """r = 1/V. Beyond the candidates sum min(p, 1/V) is smallest where one token has all the mass of p that is left and
    largest where it is spread evenly."""
    num_beyond = vocab_size - top_p.shape[1]
    p_beyond = _beyond(top_p) if num_beyond else np.zeros(len(top_p))
    inside = np.minimum(top_p, 1.0 / vocab_size).sum(1)
    low, high = (np.minimum(p_beyond, num / vocab_size) for num in (min(1, num_beyond), num_beyond))
    return Proposal(np.full_like(top_p, 1.0 / vocab_size), top_p, inside + low, inside + high)


def _beyond(top: FloatArray) -> FloatArray:
    """(n,) probability of all tokens that are not among the candidates; 0 where rounding is all that is left."""
    beyond = 1.0 - top.sum(1)
    return np.where(beyond > ROUNDING, beyond, 0.0)
