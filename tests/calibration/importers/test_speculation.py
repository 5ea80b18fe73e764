"""Acceptance from what engines count."""

from __future__ import annotations

import pytest

from calibration.importers.speculation import DraftCounts, Speculation
from sim.errors import BadInput
from sim.theory import acceptance_of_tokens_per_round, expected_tokens_per_round


@pytest.mark.parametrize("length", [1, 3, 4, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.01, 0.5, 0.8, 0.999, 1.0])
def test_tokens_per_round_and_acceptance_are_inverse(acceptance: float, length: int) -> None:
    tokens = expected_tokens_per_round(acceptance, length)
    assert acceptance_of_tokens_per_round(tokens, length) == pytest.approx(acceptance, abs=1e-9)


def test_known_inversions() -> None:
    """A mean of 2.6 at K = 3 leads to .71708 if it counts the bonus token."""
    assert acceptance_of_tokens_per_round(3.3616, 4) == pytest.approx(0.8, abs=1e-12)
    assert acceptance_of_tokens_per_round(2.6, 3) == pytest.approx(0.71708, abs=5e-6)
    assert acceptance_of_tokens_per_round(1 + 2.6, 3) > 0.9


@pytest.mark.parametrize("tokens", [0.9, 5.1])
def test_tokens_that_no_acceptance_reaches_are_refused(tokens: float) -> None:
    with pytest.raises(ValueError, match=r"must be in 1\.\.5"):
        acceptance_of_tokens_per_round(tokens, 4)
    with pytest.raises(BadInput, match="tokens per round"):
        Speculation(4, tokens)


def test_counts_tell_conditional_acceptance_by_position() -> None:
    speculation = DraftCounts(1000, 3000, 1300, (800, 400, 100)).speculation("counters")
    assert speculation.conditional == pytest.approx((0.8, 0.5, 0.25))
    assert speculation.tokens_per_round == pytest.approx(2.3)


def test_later_counts_less_earlier_ones_are_what_lies_between() -> None:
    earlier, later = DraftCounts(10, 20, 8, (6, 2)), DraftCounts(110, 220, 128, (86, 42))
    assert later - earlier == DraftCounts(100, 200, 120, (80, 40))
    with pytest.raises(BadInput, match="must not go back"):
        earlier - later


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (DraftCounts(0, 0, 0, (0, 0)), "must count drafts"),
        (DraftCounts(100, 200, 130, (60, 70)), "must not rise"),
        (DraftCounts(100, 200, 210, (120, 90)), "must not rise and not exceed the drafts"),
        (DraftCounts(100, 200, 150, (60, 40)), "must add up to the accepted tokens, 150"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(counts: DraftCounts, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        counts.speculation("counters")


def test_short_drafts_are_said() -> None:
    assert DraftCounts(100, 200, 100, (60, 40)).caveats() == ()
    (said,) = DraftCounts(100, 150, 100, (60, 40)).caveats()
    assert "75 % of the full length" in said
