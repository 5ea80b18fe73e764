"""Closed forms, each under its stated assumptions. Paper: arXiv 2603.03251 (SSD) unless another source is named.

Notation: `acceptance` a in [0, 1] is the i.i.d. probability that a tested draft token is accepted, `speculation_length`
is K; p and q are the distributions of target and draft. Times are in units of one verification, which is taken to cost
as much as one autoregressive step, unless said otherwise. `primary` is the speculator that builds beside the
verification, `backup` the one that serves misses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# ------------------------------------------------------------------------------------------------ speculative decoding


def acceptance_of(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """sum_x min(p(x), q(x)): probability that a token drawn from q is accepted (Leviathan et al. 2023, Theorem 3.5)."""
    return sum(min(p, q) for p, q in zip(target_probs, draft_probs, strict=True))


def residual_of(target_probs: Sequence[float], draft_probs: Sequence[float]) -> tuple[float, ...]:
    """max(0, p - q) normalised: law of the bonus token after a rejection. Undefined (ValueError) where p = q."""
    excess = [max(0.0, p - q) for p, q in zip(target_probs, draft_probs, strict=True)]
    total = sum(excess)
    if total <= 0:
        raise ValueError("residual of equal distributions: nothing is ever rejected")
    return tuple(value / total for value in excess)


def expected_tokens_per_round(acceptance: float, speculation_length: int) -> float:
    """(1 - a^(K+1)) / (1 - a): accepted tokens and the bonus token, i.i.d. (Leviathan et al. 2023, eq. 1)."""
    if acceptance == 1:
        return speculation_length + 1.0
    return (1 - acceptance ** (speculation_length + 1)) / (1 - acceptance)


def acceptance_of_tokens_per_round(tokens_per_round: float, speculation_length: int) -> float:
    """Inverse of `expected_tokens_per_round`: the i.i.d. acceptance of so many tokens per round, bonus included.

    ValueError outside 1..K + 1, which no acceptance reaches.
    """
    if not 1 <= tokens_per_round <= speculation_length + 1:
        raise ValueError(f"tokens per round must be in 1..{speculation_length + 1}, got {tokens_per_round:g}")
    from scipy.optimize import brentq  # heavy, and only here

    def excess(acceptance: float) -> float:
        return expected_tokens_per_round(acceptance, speculation_length) - tokens_per_round

    return float(brentq(excess, 0.0, 1.0, xtol=1e-15))


def accepted_over_drafted(acceptance: float, speculation_length: int) -> float:
    """(E - 1) / K: falls with K although the draft is unchanged, so it does not rank values of K."""
    return (expected_tokens_per_round(acceptance, speculation_length) - 1) / speculation_length


def sd_speedup(expected_tokens: float, draft_time: float, extra_verify_time: float = 0.0) -> float:
    """SD over AR: E / (1 + T_SD), section 3. `extra_verify_time` is what K + 1 tokens cost more than one."""
    return expected_tokens / (1 + draft_time + extra_verify_time)


# ----------------------------------------------------------------------------------------------------------------- SSD


def stationary_hit_rate(hit_after_primary: float, hit_after_backup: float) -> float:
    """p = p_b / (1 + p_b - p_p): share of rounds whose speculation was a hit, in the long run (eq. 1).

    Where hits follow every hit and never a miss (p_p = 1, p_b = 0), both shares are stationary: ValueError.
    """
    if hit_after_backup == 0 and hit_after_primary == 1:
        raise ValueError("stationary hit rate: any value is stationary if p_p = 1 and p_b = 0")
    return hit_after_backup / (1 + hit_after_backup - hit_after_primary)


def ssd_speedup(
    hit_rate: float, tokens_on_hit: float, tokens_on_miss: float, primary_time: float, backup_time: float
) -> float:
    """SSD over AR: [p E_hit + (1-p) E_miss] / [p max(1, T_p) + (1-p)(1 + T_b)] (Theorem 7)."""
    tokens = hit_rate * tokens_on_hit + (1 - hit_rate) * tokens_on_miss
    return tokens / (hit_rate * max(1.0, primary_time) + (1 - hit_rate) * (1 + backup_time))


def ssd_over_sd_bounds(
    hit_rate: float, tokens_on_hit: float, tokens_sd: float, draft_time: float
) -> tuple[float, float]:
    """Bounds of SSD over SD for a primary faster than the verification and a free backup (Corollary 9).

    (1 + T_SD)(E_hit / E_SD) p <= SSD/SD <= (1 + T_SD)(E_hit / E_SD). `draft_time` is T_SD.
    """
    upper = (1 + draft_time) * tokens_on_hit / tokens_sd
    return upper * hit_rate, upper


def miss_rate(fan_out: float, exponent: float, prefactor: float = 1.0) -> float:
    """c F^-r, at most 1 (Definition 11 with a prefactor c).

    The paper's definition has c = 1. Read literally it gives no hit at all at F = 1; measured curves have c of about
    .28-.56 after a hit and .5-.85 after a miss.
    """
    return min(1.0, prefactor * fan_out**-exponent) if fan_out > 0 else 1.0


def geometric_fan_out_shape(
    speculation_length: int, budget: float, acceptance: float, exponent: float
) -> tuple[float, ...]:
    """Theorem 12: F_k = F_0 a^(k/(1+r)) for k < K, F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)), sum = budget.

    `exponent` r > 0 is that of the miss rate F^-r. Continuous: entries may be below 1, rounding is not part of it.
    At a = 0 everything goes to k = 0, at a = 1 everything to k = K, the limits of the formula.
    """
    K = speculation_length
    if acceptance <= 0:
        return (float(budget),) + (0.0,) * K
    if acceptance >= 1:
        return (0.0,) * K + (float(budget),)
    root = 1 / (1 + exponent)
    weights = [acceptance ** (k * root) for k in range(K)] + [acceptance ** (K * root) * (1 - acceptance) ** -root]
    return tuple(budget * weight / sum(weights) for weight in weights)


def hit_rate_of_fan_out(fan_out: Sequence[float], acceptance: float, exponent: float, prefactor: float = 1.0) -> float:
    """a^K h(F_K) + sum_{k<K} a^k (1-a) h(F_k) with h(F) = 1 - c F^-r: the objective of Theorem 18 for one curve."""
    K = len(fan_out) - 1
    weights = [acceptance**k * (1 - acceptance) for k in range(K)] + [acceptance**K]
    return sum(w * (1 - miss_rate(f, exponent, prefactor)) for w, f in zip(weights, fan_out, strict=True))


# --------------------------------------------------------------------------------------------------- Saguaro sampling


def downweighted(draft_probs: Sequence[float], num_tokens: int, downweight: float) -> tuple[float, ...]:
    """q': q with its `num_tokens` most likely tokens multiplied by C = `downweight`, renormalised (Definition 14)."""
    order = sorted(range(len(draft_probs)), key=lambda x: (-draft_probs[x], x))
    top = set(order[:num_tokens])
    weights = [q * downweight if x in top else q for x, q in enumerate(draft_probs)]
    return tuple(weight / sum(weights) for weight in weights)


def hit_given_rejection(
    target_probs: Sequence[float],
    draft_probs: Sequence[float],
    sampling_probs: Sequence[float],
    fan_out: int,
    *,
    leave_out_rejected: bool,
) -> float:
    """Probability that the bonus token is prepared, given that a token drawn from q' = `sampling_probs` was rejected.

    The bonus token has the law (p - q')+ normalised, the rejected one (q' - p)+ normalised, independently. Prepared are
    the `fan_out` most likely tokens of q = `draft_probs`; with `leave_out_rejected` the rejected token is not among
    them, as in the paper's algorithm.

    Theorem 15 (a lower C never lowers this) holds for prepared tokens that do not depend on the rejected one. With the
    rejected token left out it fails for a down-weighting of the top F tokens: see the counter-example in the tests.
    """
    bonus = residual_of(target_probs, sampling_probs)
    rejected = residual_of(sampling_probs, target_probs)
    order = sorted(range(len(draft_probs)), key=lambda x: (-draft_probs[x], x))
    hit = 0.0
    for y, weight in enumerate(rejected):
        prepared = [x for x in order if not (leave_out_rejected and x == y)][:fan_out]
        hit += weight * sum(bonus[x] for x in prepared)
    return hit


# -------------------------------------------------------------------------------------------------------------- batches


def batched_ssd_speedup(
    batch_size: int,
    hit_rate: float,
    tokens_on_hit: float,
    tokens_on_miss: float,
    primary_time: float,
    backup_time: float,
) -> float:
    """SSD over AR per sequence for i.i.d. rows that all wait for the backup if any of them misses (Corollary 16)."""
    tokens = hit_rate * tokens_on_hit + (1 - hit_rate) * tokens_on_miss
    all_hit = hit_rate**batch_size
    return tokens / (all_hit * max(1.0, primary_time) + (1 - all_hit) * (1 + backup_time))


def critical_batch_size(hit_rate: float, tokens_on_hit: float, tokens_on_miss: float, primary_time: float) -> float:
    """b* from which a free backup (T_b = 0, E_miss tokens) beats the primary as its own backup (Theorem 17).

    b* = ln(1 + 1/T_p - E_hit / (T_p [p E_hit + (1-p) E_miss])) / ln p, for T_p <= 1 and 0 < p < 1.
    """
    mean_tokens = hit_rate * tokens_on_hit + (1 - hit_rate) * tokens_on_miss
    inside = 1 + 1 / primary_time - tokens_on_hit / (primary_time * mean_tokens)
    if inside <= 0:
        return math.inf  # even when every round waits for the slow backup, its tokens are worth the wait
    return math.log(inside) / math.log(hit_rate)
