"""Short runs in which another process held a core are known by their own times, and leave the fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibration.fit import fit
from calibration.fit_report import report_fit
from calibration.profile import Profile
from calibration.slow_moments import moments, remarks, usual_runs
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


def disturbed(profile: Profile, sequences: set[int], factor: float, run: int = 0) -> Profile:
    """As many texts slow under every policy, in the first or second of its two runs."""
    traces = [slowed(t, sequences, factor) if n % 2 == run else t for n, t in enumerate(profile.traces)]
    return replace(profile, traces=tuple(traces))


def test_a_steady_profile_has_no_slow_moment(steady: Profile) -> None:
    assert not any(moment.is_slow for moment in moments(steady.traces))
    assert usual_runs(steady.traces) == list(steady.traces) and remarks(steady.traces) == []


def test_slow_moments_are_those_that_were_slow(steady: Profile) -> None:
    found = moments(disturbed(steady, {3, 4}, 3.0, run=1).traces)
    assert [(m.run, m.batch) for m in found if m.is_slow] == [(1, 3), (1, 4)]
    assert [m.level for m in found if m.is_slow] == pytest.approx([3.0, 3.0], rel=0.4)


@pytest.mark.parametrize("factor", [2.0, 3.0, 10.0])
def test_the_fit_is_that_of_the_other_moments(steady: Profile, factor: float) -> None:
    """A third of the moments: nothing that is fitted is other than if they had not been measured, and it is said."""
    slow = set(range(0, 24, 3))
    without = replace(steady, traces=tuple(without_sequences(t, slow) for t in steady.traces))
    with_slow = replace(steady, traces=tuple(slowed(t, slow, factor) for t in steady.traces))
    fitted, expected = fit(with_slow), fit(without)
    assert fitted.host_s == expected.host_s and fitted.in_situ == expected.in_situ
    assert fitted.host_s == pytest.approx(fit(steady).host_s, rel=0.25)
    assert "16 of 48 short runs met a moment" in " ".join(report_fit(with_slow, fitted).notes)


def test_kept_in_they_would_spoil_it(steady: Profile) -> None:
    """Negative control: means over all runs are far off."""
    slow = disturbed(steady, set(range(0, 24, 3)), 3.0).traces
    kept = [sum(r.end_s - r.start_s for r in t.rounds) for t in slow]
    usual = [sum(r.end_s - r.start_s for r in t.rounds) for t in steady.traces]
    assert sum(kept) > 1.2 * sum(usual)


def without_sequences(trace: Trace, gone: set[int]) -> Trace:
    return replace(
        trace,
        sequences=[s for s in trace.sequences if s.index not in gone],
        rounds=[r for r in trace.rounds if r.sequence not in gone],
        spans=[s for s in trace.spans if s.sequence not in gone],
    )


def test_of_few_moments_none_is_left_out_and_it_is_said(steady: Profile) -> None:
    few = [without_sequences(t, set(range(1, 24))) for t in steady.traces]
    slow = [slowed(t, {0}, 3.0) if n % 2 else t for n, t in enumerate(few)]
    assert usual_runs(slow) == slow
    assert "2 are too few to tell which is usual" in " ".join(remarks(slow))
    assert remarks(few) == []
