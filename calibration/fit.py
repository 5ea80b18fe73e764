"""Fit a system to a profile: latency tables, contention and host times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calibration.host_fit import fit_host_times, fit_in_situ
from calibration.latency_fit import slowdown, tables
from calibration.profile import Profile
from calibration.slow_moments import usual_runs
from sim.errors import BadInput
from sim.latency import LatencyModel
from sim.system import HostTerm, System
from sim.trace import Lane, Trace


def fit(profile: Profile) -> System:
    """The system that the profile's samples, short runs and agreement record speak of; short runs that met a slow
    moment of the machine are left out (`calibration.slow_moments`).

    Raises `BadInput` if the short runs lack a kind of round.
    """
    latency = LatencyModel(tables(profile.latency))
    overlaps = profile.identity["concurrency"] != "serial"
    contention = {lane: slowdown(profile.latency, latency, lane) for lane in Lane}
    slower = contention if overlaps else dict.fromkeys(Lane, 1.0)
    runs = usual_runs(profile.traces)
    in_situ = fit_in_situ(runs, latency, slower)
    host_s = fit_host_times(runs, latency, in_situ, slower)
    missing = [term.value for term in HostTerm if term not in host_s]
    if missing:
        raise BadInput("profile", f"its short runs must hold rounds of every kind; none of: {', '.join(missing)}")
    return System(latency, contention, host_s, profile.agreement, profile.identity, overlaps, in_situ)


def at_speed_of(system: System, traces: Sequence[Trace]) -> System:
    """The system as fast as the machine was during `traces`: host times and residuals in situ are taken from them.

    They are few: `calibration.slow_moments.usual_runs` shares out what slow moments among them cost. What does not
    occur in them stays as it was.
    """
    slower = {lane: system.slowdown(lane, beside=True) for lane in Lane}
    seen = fit_in_situ(traces, system.latency, slower)
    kinds = system.in_situ.keys() | seen.keys()
    in_situ = {kind: {**system.in_situ.get(kind, {}), **seen.get(kind, {})} for kind in kinds}
    host_s = {**system.host_s, **fit_host_times(traces, system.latency, in_situ, slower)}
    return replace(system, host_s=host_s, in_situ=in_situ)
