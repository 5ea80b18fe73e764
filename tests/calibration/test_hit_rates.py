"""Hit rates by fan-out: predictions of a record that real runs of the same law meet, and look-ups counted once each."""

import numpy as np
import pytest

from calibration.hit_rates import hit_curves
from calibration.summaries import summarize_agreement
from sim.metrics import hit_rate, hit_rate_by_source
from sim.policy import SpeculativeSpeculative
from sim.simulate import simulate
from tests.sim.toy import markov, record_of, system_of, workload_of

POLICY = SpeculativeSpeculative(2, (4, 2, 1), (4, 2, 1))


@pytest.fixture(scope="module")
def found() -> tuple[dict, list]:
    record = record_of(*markov(1), num_prompts=30, length=40, seed=2)
    workload, system = workload_of(record), system_of(record)
    traces = [simulate(POLICY, workload, system, seed) for seed in range(3)]
    return hit_curves(summarize_agreement(record, workload, POLICY), POLICY, traces), traces


def test_measured_points_are_all_look_ups(found: tuple[dict, list]) -> None:
    curves, traces = found
    overall, by_source = hit_rate(traces), hit_rate_by_source(traces)
    assert overall is not None
    totals = {"hit": [0.0, 0], "miss": [0.0, 0]}
    for point in curves["measured"]:
        assert point["fan_out"] in (1, 2, 4)
        totals[point["source"]][0] += point["lookups"] * point["hit_rate"]["value"]
        totals[point["source"]][1] += point["lookups"]
    for source, (hits, lookups) in totals.items():
        expected = by_source[f"after_{source}"]
        assert expected is not None and hits / lookups == pytest.approx(expected.value)
    assert sum(hits for hits, _ in totals.values()) / sum(n for _, n in totals.values()) == pytest.approx(overall.value)


def test_more_guesses_never_hit_less(found: tuple[dict, list]) -> None:
    for curve in found[0]["predicted"]:
        assert np.all(np.diff(curve["hit_rates"]) >= 0)
        assert all(0 <= rate <= 1 for rate in curve["hit_rates"])


def test_an_even_fan_out_is_met_by_its_own_runs() -> None:
    """Both sides are of the same law; they differ by the sampling of 4000 look-ups and by the fit of a power law."""
    record = record_of(*markov(1), num_prompts=60, length=60, seed=3)
    workload, system = workload_of(record), system_of(record)
    policy = SpeculativeSpeculative(2, (2, 2, 2), (2, 2, 2))
    traces = [simulate(policy, workload, system, seed) for seed in range(3)]
    curves = hit_curves(summarize_agreement(record, workload, policy), policy, traces)
    predicted = {c["source"]: c["hit_rates"][c["fan_outs"].index(2)] for c in curves["predicted"]}
    for point in curves["measured"]:
        assert abs(point["hit_rate"]["value"] - predicted[point["source"]]) < 0.08
