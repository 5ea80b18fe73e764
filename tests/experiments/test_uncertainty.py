"""How far answers from numbers move over the ranges of what is not known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.numbers import Numbers, read_numbers
from experiments.run import search_space
from experiments.uncertainty import Uncertainty, uncertainty
from sim.errors import BadInput
from sim.policy import Autoregressive, Speculative
from sim.search import search
from sim.simulate import predict, predict_all

FIVE = Path(__file__).parents[2] / "experiments" / "configs" / "five_numbers.yaml"
NUMBERS = """
schema: 1
name: example
text: {new_tokens: 100}
acceptance: {conditional: [0.8]}
hits: {after_hit: {prefactor: 0.4, exponent: 0.5}, after_miss: {prefactor: 0.7, exponent: 0.5}}
times: {ar_ms: 10, verify_ms: 12, draft_step_ms: 1, tree_step_ms: 1, glue_ms: 1}
search: {speculation_lengths: [1, 2, 3, 4], budgets: [8], fan_out_rules: [uniform], fallbacks: [draft]}
"""
VERIFY = "ranges: {times.verify_ms: {low: 10, high: 20}}\n"


def numbers_of(tmp_path: Path, text: str) -> Numbers:
    path = tmp_path / "numbers.yaml"
    path.write_text(text)
    return read_numbers(path)


def moved_by(numbers: Numbers, policies: list, num_draws: int = 60, seed: int = 3) -> Uncertainty:
    return uncertainty(numbers, predict_all(policies, numbers.workload, numbers.system), num_draws, seed)


def test_numbers_that_are_all_known_move_nothing(tmp_path: Path) -> None:
    numbers = numbers_of(tmp_path, NUMBERS)
    assert numbers.ranges == ()
    moved = moved_by(numbers, [Speculative(4), Autoregressive()], num_draws=3)
    assert moved.intervals[:, 0] == pytest.approx(moved.intervals[:, 1])
    assert moved.best_shares.tolist() == [1, 0] and moved.mean_losses[0] == 0


def test_intervals_are_the_quantiles_of_the_only_range(tmp_path: Path) -> None:
    """Rounds of SD take 4 ms and the verification, uniform in 10..20 ms; AR is as it was."""
    numbers = numbers_of(tmp_path, NUMBERS + VERIFY)
    moved = moved_by(numbers, [Speculative(4), Autoregressive()], num_draws=400)
    stated = predict(Speculative(4), numbers.workload, numbers.system).tokens_per_s.value
    expected = [stated * 16 / (4 + verify) for verify in (19.5, 10.5)]
    assert moved.intervals[0] == pytest.approx(expected, rel=0.03)
    assert moved.intervals[1] == pytest.approx([100, 100], rel=1e-6)
    (only,) = moved.sensitivities
    assert only.tokens_per_s == pytest.approx((stated * 16 / 14, stated * 16 / 24), rel=0.01)


def test_the_share_of_draws_is_the_share_of_the_range_where_a_policy_is_best(tmp_path: Path) -> None:
    """SD with K = 1 beats AR where its round, 1 ms and the verification, is below 18 ms: 7 of 10 parts of the range.
    A binomial of 400 draws is within .1 of it but for one seed in 100,000."""
    numbers = numbers_of(tmp_path, NUMBERS + VERIFY)
    moved = moved_by(numbers, [Speculative(1), Autoregressive()], num_draws=400)
    assert moved.best_shares[0] == pytest.approx(0.7, abs=0.1)
    assert moved.best_shares.sum() == pytest.approx(1)
    assert moved.worst_losses[0] == pytest.approx(1 - 18 / 21, abs=0.02)


def test_draws_repeat_with_their_seed(tmp_path: Path) -> None:
    numbers = numbers_of(tmp_path, NUMBERS + VERIFY)
    runs = [moved_by(numbers, [Speculative(2)], 10, seed).tokens_per_s for seed in (1, 1, 2)]
    assert np.array_equal(runs[0], runs[1]) and not np.array_equal(runs[0], runs[2])


def test_five_numbers_get_an_answer_with_its_uncertainty() -> None:
    numbers = read_numbers(FIVE)
    keys = {entry.key for entry in numbers.ranges}
    assert {"times.verify_ms", "acceptance.shift"} <= keys
    assert {key for key in keys if key.startswith("hits.")} == {
        f"hits.{source}.{name}" for source in ("after_hit", "after_miss") for name in ("prefactor", "exponent")
    }
    found = search(search_space(numbers.search), numbers.workload, numbers.system)
    moved = uncertainty(numbers, found.best_of_each_length(), num_draws=4, seed=0)
    assert moved.policies[0] == found.recommended.policy
    assert all(low <= high for low, high in moved.intervals)
    assert moved.mean_losses[moved.policies.index(moved.surest)] == moved.mean_losses.min()
    assert "seed 0" in moved.in_words() and len(moved.sensitivities) == len(numbers.ranges)


def test_ends_of_batches_count_in_the_draws_too(tmp_path: Path) -> None:
    """Where draws are at the stated numbers, they are what the engine of the answer says."""
    text = NUMBERS.replace("new_tokens: 100", "new_tokens: 100, batch_size: 4")
    numbers = numbers_of(tmp_path, text)
    stated = [predict(Speculative(2), numbers.workload, numbers.system, engine="vectorized")]
    moved = uncertainty(numbers, stated, num_draws=2, seed=0)
    assert moved.tokens_per_s == pytest.approx(stated[0].tokens_per_s.value)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ("times.verify: {low: 10, high: 20}", "ranges.times.verify: must be the full key of a number"),
        ("times.verify_ms: {low: 13, high: 20}", "must hold the number itself, times.verify_ms = 12"),
        ("times.verify_ms: {low: 0, high: 20}", "must be possible at both ends, and is not at 0"),
        ("times.verify_ms: {low: 10}", "high: this key is missing"),
        ("acceptance: {low: 10, high: 20}", "must be the full key of a number"),
    ],
)
def test_ranges_that_cannot_be_are_named(tmp_path: Path, ranges: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        numbers_of(tmp_path, f"{NUMBERS}ranges: {{{ranges}}}\n")
