"""Short runs in which another process held a core are known by their own times, and leave the fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.fit import fit
from calibration.fit_report import report_fit
from calibration.profile import Profile
from calibration.slow_moments import pieces, remarks, usual_runs
from sim.trace import Trace
from tests.calibration.test_fit import known_system, profile_of, samples_of


def slowed(trace: Trace, sequences: set[int], factor: float) -> Trace:
    """The same run; what happened while some sequences were decoded took `factor` times as long, from its start on."""
    starts = {s.index: s.decode_start_s for s in trace.sequences}

    def later(moment_s: float, sequence: int) -> float:
        return starts[sequence] + (moment_s - starts[sequence]) * (factor if sequence in sequences else 1.0)

    return replace(
        trace,
        rounds=[
            replace(r, start_s=later(r.start_s, r.sequence), end_s=later(r.end_s, r.sequence)) for r in trace.rounds
        ],
        spans=[replace(s, start_s=later(s.start_s, s.sequence), end_s=later(s.end_s, s.sequence)) for s in trace.spans],
    )


@pytest.fixture(scope="module")
def steady() -> Profile:
    system = known_system()
    return profile_of(system, samples_of(system, num_blocks=20, seed=1))


SLOW = set(range(0, 24, 4))  # a quarter of the texts, in the first of two runs of each policy


def disturbed(profile: Profile, factor: float, policies: slice = slice(None)) -> Profile:
    """Some texts slow under some policies."""
    chosen = range(len(profile.traces))[policies]
    traces = [slowed(t, SLOW, factor) if n % 2 == 0 and n in chosen else t for n, t in enumerate(profile.traces)]
    return replace(profile, traces=tuple(traces))


def without_slow(profile: Profile, policies: slice = slice(None)) -> Profile:
    chosen = range(len(profile.traces))[policies]
    traces = [without_texts(t, SLOW) if n % 2 == 0 and n in chosen else t for n, t in enumerate(profile.traces)]
    return replace(profile, traces=tuple(traces))


def without_texts(trace: Trace, gone: set[int]) -> Trace:
    return replace(
        trace,
        sequences=[s for s in trace.sequences if s.index not in gone],
        rounds=[r for r in trace.rounds if r.sequence not in gone],
        spans=[s for s in trace.spans if s.sequence not in gone],
    )


def test_a_steady_profile_has_no_slow_moment(steady: Profile) -> None:
    assert all(piece.level < 1.4 for piece in pieces(steady.traces))
    assert usual_runs(steady.traces) == list(steady.traces) and remarks(steady.traces) == []


@pytest.mark.parametrize("factor", [2.5, 10.0])
def test_slow_pieces_are_those_that_were_slow(steady: Profile, factor: float) -> None:
    found = [piece for piece in pieces(disturbed(steady, factor).traces) if piece.level > 1.5]
    assert {(p.trace, p.batch) for p in found} == {(n, b) for n in range(0, len(steady.traces), 2) for b in SLOW}
    assert np.median([p.level for p in found]) == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("factor", [2.5, 10.0])
def test_the_fit_is_that_of_the_others_with_the_cost_shared(steady: Profile, factor: float) -> None:
    """One policy of four meets all slow moments: what they cost, an eighth of its pieces, is a thirty-second of all."""
    of_ssd = slice(4, 6)
    profile = disturbed(steady, factor, of_ssd)
    fitted, expected = fit(profile), fit(without_slow(steady, of_ssd))
    shared = 1 + (factor - 1) / 32
    for term, seconds in fitted.host_s.items():
        assert seconds == pytest.approx(expected.host_s[term] * shared, rel=0.03), term
    for kind, rows in fitted.in_situ.items():
        for key, ratios in rows.items():
            assert np.mean(ratios) == pytest.approx(np.mean(expected.in_situ[kind][key]) * shared, rel=0.03), key
    assert "6 of 192 short runs met a moment" in " ".join(report_fit(profile, fitted).notes)


def test_kept_with_their_policy_they_would_spoil_its_fit(steady: Profile) -> None:
    """Negative control: without leaving them out, a policy's own times are far off."""
    slow = disturbed(steady, 10.0, slice(4, 6)).traces[4]
    taken, usual = (sum(r.end_s - r.start_s for r in t.rounds) for t in (slow, steady.traces[4]))
    assert taken > 2 * usual


def test_of_few_pieces_none_is_left_out_and_it_is_said(steady: Profile) -> None:
    few = [without_texts(t, set(range(1, 24))) for t in steady.traces]
    slow = [slowed(t, {0}, 3.0) if n % 2 else t for n, t in enumerate(few)]
    assert usual_runs(slow) == slow
    assert "fewer than 4 short runs of a policy" in " ".join(remarks(slow))


def test_batches_of_another_size_are_pieces_of_their_own_kind(steady: Profile) -> None:
    """Their rounds take another time, and that is no slow moment."""
    alone = list(steady.traces[4:5])
    larger = [replace(t, workload=t.workload | {"batch_size": 2}) for t in alone]
    both = alone + [slowed(t, set(range(24)), 5.0) for t in larger]
    assert usual_runs(both) == both
