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


@pytest.mark.parametrize(
    ("a", "c", "m", "K", "speedup"),
    [(0.8, 0.1, 0.24, 3, 1.461), (0.5, 0.3, 0.0, 1, 1.154), (0.5, 0.3, 0.3, 0, 1.0), (0.8, 0.1, 0.0, 6, 2.470)],
)
def test_best_speculation_length_when_width_costs(a, c, m, K, speedup):
    """Draft step c and extra verification time m per token, both in AR steps."""
    speedups = [
        theory.sd_speedup(theory.expected_tokens_per_round(a, k), c * k, extra_verify_time=m * k) for k in range(15)
    ]
    assert max(range(15), key=speedups.__getitem__) == K
    assert speedups[K] == pytest.approx(speedup, abs=5e-4)


def test_accepted_over_drafted_falls_while_tokens_per_round_rise():
    rates = [theory.accepted_over_drafted(0.8, K) for K in range(1, 9)]
    tokens = [theory.expected_tokens_per_round(0.8, K) for K in range(1, 9)]
    assert rates == sorted(rates, reverse=True) and tokens == sorted(tokens)
    assert (rates[0], rates[-1]) == pytest.approx((0.80, 0.416), abs=5e-4)
    assert theory.accepted_over_drafted(0.8, 4) == pytest.approx(0.5904)


@pytest.mark.parametrize("hit_rate", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("draft_time", [0.2, 0.9])
def test_corollary_8_same_primary_and_backup_is_never_slower_than_sd(hit_rate, draft_time):
    tokens = theory.expected_tokens_per_round(0.7, 4)
    ssd = theory.ssd_speedup(hit_rate, tokens, tokens, draft_time, draft_time)
    sd = theory.sd_speedup(tokens, draft_time)
    assert ssd == pytest.approx(sd) if hit_rate == 0 else ssd > sd


def test_corollary_9_bounds_hold_for_a_fast_primary_and_a_free_backup():
    for p in (0.1, 0.5, 0.9):
        for tokens_on_miss in (1.0, 1.5):
            ssd = theory.ssd_speedup(p, 3.0, tokens_on_miss, primary_time=0.8, backup_time=0.0)
            low, high = theory.ssd_over_sd_bounds(p, 3.0, tokens_sd=2.8, draft_time=0.6)
            assert low <= ssd / theory.sd_speedup(2.8, 0.6) <= high


def test_definition_11_without_a_prefactor_never_hits_at_fan_out_one():
    assert theory.miss_rate(1, exponent=0.5) == 1.0
    assert theory.miss_rate(1, exponent=0.5, prefactor=0.4) == 0.4
    assert theory.miss_rate(0, exponent=0.5, prefactor=0.4) == 1.0


@pytest.mark.parametrize(("a", "r"), [(0.8, 0.54), (0.6, 0.42), (0.3, 1.2)])
def test_theorem_12_maximises_the_hit_rate_of_theorem_18(a, r):
    """No transfer of a small branch share between two accept counts improves the continuous optimum."""
    shape = theory.geometric_fan_out_shape(4, 20, a, r)
    best = theory.hit_rate_of_fan_out(shape, a, r)
    for giver in range(5):
        for taker in range(5):
            moved = list(shape)
            moved[giver] -= 0.01 * shape[giver]
            moved[taker] += 0.01 * shape[giver]
            assert theory.hit_rate_of_fan_out(moved, a, r) <= best + 1e-12


def test_theorem_15_fails_with_the_rejected_token_left_out():
    """Counter-example: weights (10, 1, .999, .01), p = (.70, .10, .15, .05), F = 2, C from 1 to .1."""
    p, weights = (0.70, 0.10, 0.15, 0.05), (10, 1, 0.999, 0.01)
    q = [w / sum(weights) for w in weights]

    def hits(num_downweighted: int, leave_out_rejected: bool) -> list[float]:
        return [
            theory.hit_given_rejection(
                p, q, theory.downweighted(q, num_downweighted, C), 2, leave_out_rejected=leave_out_rejected
            )
            for C in (1, 0.6, 0.5, 0.3, 0.1)
        ]

    assert hits(2, True) == pytest.approx([0.629, 0.450, 0.324, 0.417, 0.860], abs=6e-4)
    assert hits(3, True) == pytest.approx([0.6295, 0.632, 0.634, 0.640, 0.670], abs=6e-4), "F + 1 tokens: monotone here"
    kept = hits(2, False)
    assert kept == sorted(kept), "the theorem itself holds"


def test_theorem_19_down_weighting_costs_no_acceptance_here():
    p, q = (0.48, 0.48, 0.02, 0.02), (0.49, 0.49, 0.01, 0.01)
    for C, hit in ((1.0, 0.5), (47 / 147, 1.0)):
        sampling = theory.downweighted(q, 2, C)
        assert theory.acceptance_of(p, sampling) == pytest.approx(0.98)
        assert theory.hit_given_rejection(p, q, sampling, 2, leave_out_rejected=True) == pytest.approx(hit)


def test_corollary_16_is_theorem_7_at_batch_one_and_falls_with_the_batch():
    arguments = (0.8, 3.0, 1.2, 0.7, 0.7)
    speedups = [theory.batched_ssd_speedup(b, *arguments) for b in (1, 2, 4, 8)]
    assert speedups[0] == pytest.approx(theory.ssd_speedup(*arguments))
    assert speedups == sorted(speedups, reverse=True)


@pytest.mark.parametrize(
    ("primary_time", "p", "b"),
    [(0.6, 0.75, 1.96), (0.6, 0.87, 1.60), (0.8, 0.75, 1.36), (0.8, 0.87, 1.16), (1, 0.87, 0.91)],
)
def test_theorem_17_is_where_corollary_16_crosses(primary_time, p, b):
    """At b* a free backup of one token per round equals the primary as its own backup."""
    critical = theory.critical_batch_size(p, 5.6, 1.0, primary_time)
    assert critical == pytest.approx(b, abs=6e-3)
    slow = theory.batched_ssd_speedup(critical, p, 5.6, 5.6, primary_time, primary_time)
    fast = theory.batched_ssd_speedup(critical, p, 5.6, 1.0, primary_time, 0.0)
    assert slow == pytest.approx(fast)


def test_a_backup_so_fast_that_every_batch_prefers_it_has_no_crossing_above_one():
    assert theory.critical_batch_size(0.5, 1.0, 1.0, 0.5) <= 1
