"""Closed forms against reference numbers."""

from __future__ import annotations

import pytest

from sim import theory


@pytest.mark.parametrize(
    ("a", "K", "tokens"),
    [(0.8, 4, 3.3616), (0.8, 8, 4.3289), (0.5, 4, 1.9375), (0.01, 5, 1.0101), (1.0, 3, 4), (0, 3, 1)],
)
def test_expected_tokens_per_round(a, K, tokens):
    assert theory.expected_tokens_per_round(a, K) == pytest.approx(tokens, abs=5e-5)


def test_best_speculation_length_with_free_width():
    speedups = {K: theory.sd_speedup(theory.expected_tokens_per_round(0.8, K), 0.1 * K) for K in range(1, 15)}
    assert max(speedups, key=speedups.__getitem__) == 6
    assert speedups[6] == pytest.approx(2.470, abs=5e-4)


@pytest.mark.parametrize(("hit", "speedup"), [(0, 2.101), (0.5, 2.586), (0.9, 3.171), (1, 3.362)])
def test_theorem_7_toy(hit, speedup):
    """Verification 10, drafting 6, a = .8, K = 4; the primary is faster than the verification."""
    tokens = theory.expected_tokens_per_round(0.8, 4)
    assert theory.ssd_speedup(hit, tokens, tokens, 0.6, 0.6) == pytest.approx(speedup, abs=5e-4)


def test_stationary_hit_rate_balances_the_flows():
    after_hit, after_miss = 0.8, 0.5
    p = theory.stationary_hit_rate(after_hit, after_miss)
    assert p == pytest.approx(p * after_hit + (1 - p) * after_miss)


@pytest.mark.parametrize(
    ("a", "r", "shape"),
    [
        (0.8, 0.54, [4.17, 3.61, 3.12, 2.70, 2.34, 2.02, 1.75, 4.30]),
        (0.6, 0.42, [7.5, 5.2, 3.7, 2.6, 1.8, 1.2, 0.9, 1.2]),
    ],
)
def test_geometric_shapes(a, r, shape):
    computed = theory.geometric_fan_out_shape(7, 24, a, r)
    assert sum(computed) == pytest.approx(24)
    assert computed == pytest.approx(shape, abs=0.06)
