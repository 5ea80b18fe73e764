"""Hit rates by fan-out: predictions of a record that real runs of the same law meet, and look-ups counted once each."""

import numpy as np
import pytest

from calibration.hit_rates import hit_curves
from sim.errors import BadInput
from sim.metrics import hit_rate, hit_rate_by_source
from sim.policy import Speculative, SpeculativeSpeculative
from sim.simulate import simulate
from tests.sim.toy import markov, record_of, system_of, workload_of

POLICY = SpeculativeSpeculative(2, (4, 2, 1), (4, 2, 1))


@pytest.fixture(scope="module")
def found() -> tuple[dict, list]:
    record = record_of(*markov(1), num_prompts=30, length=40, seed=2)
    workload, system = workload_of(record), system_of(record)
    traces = [simulate(POLICY, workload, system, seed) for seed in range(3)]
    return hit_curves(record, workload, POLICY, traces), traces


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


@pytest.mark.parametrize("fan_out", [1, 2])
def test_an_even_fan_out_is_met_by_its_own_runs(fan_out: int) -> None:
    """Both sides are of the same texts and the same law; four standard errors are exceeded by chance once in 15 000."""
    record = record_of(*markov(1), num_prompts=60, length=60, seed=3)
    workload, system = workload_of(record), system_of(record)
    policy = SpeculativeSpeculative(2, (fan_out,) * 3, (fan_out,) * 3)
    traces = [simulate(policy, workload, system, seed) for seed in range(3)]
    curves = hit_curves(record, workload, policy, traces)
    predicted = {c["source"]: c["hit_rates"][c["fan_outs"].index(fan_out)] for c in curves["predicted"]}
    assert {point["source"] for point in curves["measured"]} == {"hit", "miss"}
    for point in curves["measured"]:
        rate = predicted[point["source"]]
        assert abs(point["hit_rate"]["value"] - rate) < 4 * np.sqrt(rate * (1 - rate) / point["lookups"])


def test_only_a_policy_that_looks_something_up_has_hit_rates() -> None:
    record = record_of(*markov(1), num_prompts=2, length=8, seed=3)
    with pytest.raises(BadInput, match="policy: must be an SSD policy"):
        hit_curves(record, workload_of(record), Speculative(2), [])
