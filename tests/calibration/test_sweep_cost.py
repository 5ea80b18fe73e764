"""What a sweep would have cost, against closed forms."""

from __future__ import annotations

import pytest

from calibration.sweep_cost import sweep_cost
from sim.search import SearchSpace, search
from sim.simulate import simulate
from tests.sim.toy import scripted_record, system_of, workload_of


def test_a_sweep_takes_every_policy_every_prompt_and_every_repeat() -> None:
    """Acceptance 0 and 10 tokens after the first: AR takes 10 rounds of 10 ms, SD as many and drafts 2 ms per token."""
    record = scripted_record(0.0, num_prompts=3, length=11)
    system, workload = system_of(record), workload_of(record)
    found = search(SearchSpace((1,), (0,), ("uniform",)), workload, system)
    cost = sweep_cost(found, num_prompts=80, num_repeats=3)
    assert cost.num_policies == len(found.ranked) == found.num_policies
    decoded_s = [
        sum(s.end_s - s.decode_start_s for s in simulate(p.policy, workload, system).sequences) / 3
        for p in found.ranked
    ]
    assert min(decoded_s) == pytest.approx(0.1)
    assert cost.seconds == pytest.approx(80 * 3 * sum(decoded_s))
    assert cost.to_dict()["num_repeats"] == 3
