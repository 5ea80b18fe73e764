"""Closed forms, each under its stated assumptions. Paper: arXiv 2603.03251 (SSD) unless another source is named.

Notation: `acceptance` a in [0, 1] is the i.i.d. probability that a tested draft token is accepted, `speculation_length`
is K; times are in units of one verification.
"""

from __future__ import annotations


def expected_tokens_per_round(acceptance: float, speculation_length: int) -> float:
    """(1 - a^(K+1)) / (1 - a): accepted tokens and the bonus token, i.i.d. (Leviathan et al. 2023, eq. 1)."""
    if acceptance == 1:
        return speculation_length + 1.0
    return (1 - acceptance ** (speculation_length + 1)) / (1 - acceptance)


def sd_speedup(expected_tokens: float, draft_time: float) -> float:
    """SD over AR: E / (1 + T_SD), where a verification costs one AR step (section 3)."""
    return expected_tokens / (1 + draft_time)


def stationary_hit_rate(hit_after_primary: float, hit_after_backup: float) -> float:
    """p = p_b / (1 + p_b - p_p): share of rounds whose speculation was a hit, in the long run (eq. 1)."""
    return hit_after_backup / (1 + hit_after_backup - hit_after_primary)


def ssd_speedup(
    hit_rate: float, tokens_on_hit: float, tokens_on_miss: float, primary_time: float, backup_time: float
) -> float:
    """SSD over AR: [p E_hit + (1-p) E_miss] / [p max(1, T_p) + (1-p)(1 + T_b)] (Theorem 7)."""
    tokens = hit_rate * tokens_on_hit + (1 - hit_rate) * tokens_on_miss
    return tokens / (hit_rate * max(1.0, primary_time) + (1 - hit_rate) * (1 + backup_time))


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
