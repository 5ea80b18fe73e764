"""Memory of a policy: counts by hand, and that a reason names what does not fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.memory import MOST_ROWS, Memory
from sim.placement import Placement, Split
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.trace import Lane

SSD = SpeculativeSpeculative(4, (3, 2, 2, 1, 2), (2, 2, 1, 1, 1))
SMALL = SpeculativeSpeculative(1, (1, 1), (2,), Fallback.NONE)


def total(memory: Memory, policy, batch_size: int, context: int, lane: Lane, sampled: bool = False, **placement):
    placed = Placement(**placement)
    demands = memory.demands(policy, batch_size, context, placed, sampled=sampled)
    return sum(demand.num_bytes for demand in demands if demand.lane is lane)


def test_every_row_reserves_its_look_ahead():
    """1,000 token slots: 10 rows of 99 tokens under AR, which feeds one token; K = 4 reserves 5: 9 rows."""
    memory = Memory(target_bytes=1000, target_kv_bytes_per_token=1)
    rows = [memory.most_rows(policy, 99, Placement(), sampled=False) for policy in (Autoregressive(), Speculative(4))]
    assert rows == [10, 9]
    assert memory.most_rows(Speculative(4), 996, Placement(), sampled=False) == 0


def test_counts_by_hand():
    memory = Memory(target_kv_bytes_per_token=10, draft_kv_bytes_per_token=1)
    assert total(memory, SSD, 2, 100, Lane.TARGET) == 2 * 105 * 10
    assert total(memory, SSD, 2, 100, Lane.DRAFT) == 2 * 105 + 2 * 10 * 4
    sampled = {"sampled": True, "distribution_bytes": 1000}
    assert total(memory, SSD, 2, 100, Lane.TARGET, **sampled) == 2 * 105 * 10 + 2 * 4 * 1000
    assert total(memory, SSD, 2, 100, Lane.DRAFT, **sampled) == 2 * 105 + 2 * 10 * 4 * 1001


def test_without_a_draft_there_is_nothing_on_the_draft_device():
    memory = Memory(draft_kv_bytes_per_token=1)
    assert total(memory, Autoregressive(), 3, 100, Lane.DRAFT) == 0
    assert total(memory, Speculative(4), 3, 100, Lane.DRAFT) == 3 * 105


@pytest.mark.parametrize(("split", "rows"), [(Split.BRANCHES, 5), (Split.ROWS, 3)])
def test_draft_devices_share_branches_or_rows(split, rows):
    """5 rows of 105 slots and 10 branches of 4: two devices keep half of the branches of every row, or 3 rows whole."""
    memory = Memory(draft_kv_bytes_per_token=1)
    assert total(memory, SSD, 5, 100, Lane.DRAFT) == 5 * 105 + 5 * 10 * 4
    branches = 5 * 5 if split is Split.BRANCHES else 3 * 10
    two = total(memory, SSD, 5, 100, Lane.DRAFT, num_draft_devices=2, split=split)
    assert two == rows * 105 + branches * 4


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(4), SSD], ids=lambda policy: policy.name)
def test_a_draft_device_holds_the_rows_of_every_target(policy, split):
    memory = Memory(target_kv_bytes_per_token=10, draft_kv_bytes_per_token=1)
    placed = {"sampled": True, "distribution_bytes": 100, "num_draft_devices": 2, "split": split}
    for lane, times in ((Lane.TARGET, 1), (Lane.DRAFT, 3)):
        one, three = (total(memory, policy, 5, 100, lane, **placed, num_targets=n) for n in (1, 3))
        assert three == times * one and (one > 0 or policy == Autoregressive())


def test_a_reason_counts_the_targets():
    memory = Memory(draft_bytes=500.0, draft_kv_bytes_per_token=1)
    assert memory.most_rows(Speculative(4), 95, Placement(), sampled=False) == 5
    shared = Placement(num_targets=2)
    assert memory.most_rows(Speculative(4), 95, shared, sampled=False) == 2
    reason = memory.why_infeasible(Speculative(4), 3, 95, shared, sampled=False)
    assert "KV of 2 targets x 3 x (95 tokens of context + 5 ahead) 600 B" in reason


def test_a_reason_names_the_device_and_its_parts():
    memory = Memory(draft_bytes=3e6, draft_kv_bytes_per_token=1e3)
    placement = Placement(distribution_bytes=128_000)
    assert memory.why_infeasible(SSD, 1, 100, placement, sampled=False) is None
    reason = memory.why_infeasible(SSD, 1, 100, placement, sampled=True)
    assert reason is not None
    assert reason.startswith("draft memory: 5.26 MB needed, 3 MB there (KV of 1 x (100 tokens of context + 5 ahead)")
    assert "distributions of 1 x 10 branches of 4 tokens 5.12 MB" in reason


@given(
    policy=st.sampled_from([Autoregressive(), Speculative(3), SSD, SMALL]),
    room=st.floats(1, 1e6),
    context=st.integers(0, 500),
)
def test_the_largest_batch_fits_and_one_row_more_does_not(policy, room, context):
    memory = Memory(room, room, 3, 2)
    placement = Placement(distribution_bytes=7)
    most = memory.most_rows(policy, context, placement, sampled=True)
    if most:
        assert memory.why_infeasible(policy, most, context, placement, sampled=True) is None
    assert memory.why_infeasible(policy, most + 1, context, placement, sampled=True) is not None


def test_unlimited_memory_limits_nothing_and_is_read_back():
    assert Memory().most_rows(SSD, 1000, Placement(), sampled=True) == MOST_ROWS
    memory = Memory(draft_bytes=5.0)
    assert Memory.from_dict(memory.to_dict()) == memory and memory.to_dict()["target_bytes"] is None
    with pytest.raises(BadInput, match=r"memory.draft_bytes: must be a number > 0, got -1"):
        Memory(draft_bytes=-1)
    with pytest.raises(BadInput, match=r"memory.target_kv_bytes_per_token: must be a finite"):
        Memory(target_kv_bytes_per_token=math.inf)


@pytest.mark.parametrize("value", [True, "1", None, math.nan, -1])
@pytest.mark.parametrize("name", ["target_bytes", "draft_bytes", "target_kv_bytes_per_token"])
def test_a_memory_of_wrong_types_or_values_is_named(name, value):
    with pytest.raises(BadInput, match=f"memory.{name}: must be "):
        Memory(**{name: value})
