"""The rounds of a law as its definition reads: what a `RoundSampler` must give, whatever it does for speed."""

from __future__ import annotations

import numpy as np

from sim.round_law import RoundLaw, SampledRounds


def plain_rounds(law: RoundLaw, accept_uniforms: np.ndarray, hit_uniforms: np.ndarray) -> SampledRounds:
    """Draft tokens are tested one after another; where the first is rejected, or all are accepted, the look-up."""
    shape = (*accept_uniforms.shape[:-2], *law.left.shape)
    num_tested = np.minimum(law.num_drafted, law.left)
    num_accepted, is_open = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=bool)
    for j in range(law.drafting.num_drafted):
        is_open &= (drawn_at(accept_uniforms, law.starts + j) < law.accepted[j]) & (j < num_tested)
        num_accepted += is_open
    drawn = np.take_along_axis(hit_uniforms, np.minimum(law.starts + num_accepted, hit_uniforms.shape[-1] - 1), -1)
    hits = law.hits[num_accepted, np.arange(len(law.left))[:, None], law.starts]
    return SampledRounds(num_accepted, drawn < hits)


def drawn_at(uniforms: np.ndarray, position: np.ndarray) -> np.ndarray:
    """(..., width) the numbers of these positions; 1, which is below no probability, beyond the last."""
    beyond = np.pad(uniforms, [(0, 0)] * (uniforms.ndim - 1) + [(0, len(position))], constant_values=1.0)
    return beyond[..., np.minimum(position, beyond.shape[-1] - 1)]
