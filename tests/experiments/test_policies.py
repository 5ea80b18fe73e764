"""Policies from text: single ones, tables, adaptive ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.planning import Plan
from experiments.policies import load_policy
from sim.errors import BadInput
from sim.hill_climbing import HillClimbing
from sim.policy import (
    Autoregressive,
    Fallback,
    LateBuild,
    PolicyTable,
    Speculative,
    SpeculativeSpeculative,
    policy_from_dict,
)
from sim.running_statistics import RunningStatistics
from sim.simulate import simulate
from tests.sim.toy import markov, record_of, system_of, workload_of

RECORD = record_of(*markov(3), num_prompts=6, length=30, seed=4)
PLAN = Plan(
    system_of(RECORD, verify_s=0.01, verify_per_token_s=0.001, host_s=0.0005, contention=1.5), workload_of(RECORD)
)


@pytest.mark.parametrize(
    "policy",
    [
        Autoregressive(),
        Speculative(4),
        SpeculativeSpeculative(2, (3, 2, 1), (1,), "none"),
        SpeculativeSpeculative(1, (3, 2), (1, 1), Fallback.NGRAM, 0.5, LateBuild.ABANDON),
    ],
)
def test_policy_from_text_and_from_file(tmp_path: Path, policy) -> None:
    text = json.dumps(policy.to_dict())
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    assert load_policy(text, PLAN) == load_policy(str(path), PLAN) == policy == policy_from_dict(policy.to_dict())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{kind: sd}", "--policy, line 1: speculation_length: this key is missing|--policy: speculation_length"),
        ("{kind: sd, speculation_length: true}", "speculation_length: must be a valid integer, got True"),
        ("{kind: sd, speculation_lenght: 4}", "did you mean speculation_length"),
        ("{kind: sd, speculation_length: 4, speculation_length: 5}", "duplicate key"),
        ("{kind: tree}", "kind: must be one of ar, sd, ssd, table, running_statistics, hill_climbing, got 'tree'"),
        ("{speculation_length: 4}", "kind: must be one of ar, sd, ssd"),
        ("{kind: [sd]}", "kind: must be one of ar, sd, ssd"),
        ("{", "--policy.*is not one valid YAML document"),
        ("nowhere.yaml", "nowhere.yaml: no such file"),
        (
            "{kind: ssd, speculation_length: 2, fan_out_after_hit: [1, 1], fan_out_after_miss: [1, 1, 1]}",
            "--policy: fan_out_after_hit: must have 3 entries",
        ),
        (
            "{kind: ssd, speculation_length: 1, fan_out_after_hit: [1, 1], fan_out_after_miss: [1, 1], fallback: x}",
            "fallback: must be 'draft', 'draft_missing', 'ngram', 'filler' or 'none', got 'x'",
        ),
    ],
)
def test_bad_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_policy(text, PLAN)


def test_a_table_by_batch_size() -> None:
    table = PolicyTable(((1, SpeculativeSpeculative(1, (2, 2), (2, 2))), (4, Speculative(2)), (16, Autoregressive())))
    assert load_policy(json.dumps(table.to_dict()), PLAN) == table
    with pytest.raises(BadInput, match=r"--policy: policy table: must start at batch size 1 and rise, got \[2\]"):
        load_policy("{kind: table, entries: [[2, {kind: ar}]]}", PLAN)
    with pytest.raises(BadInput, match=r"entries\.0\.1"):
        load_policy("{kind: table, entries: [[1, {kind: sd}]]}", PLAN)


def test_an_adaptive_choice_is_told_the_times_of_the_plan() -> None:
    chosen = load_policy("{kind: running_statistics, speculation_lengths: [0, 1, 2, 4], budgets: [0, 5]}", PLAN)
    assert isinstance(chosen, RunningStatistics)
    assert chosen.times.verify.at(3) == pytest.approx(0.013)
    assert chosen.times.glue.at(3) == pytest.approx(1.5 * 0.002)
    assert (chosen.times.host_s, chosen.times.contention) == (0.0005, 1.5)
    assert load_policy(json.dumps(chosen.to_dict()), PLAN) == chosen
    trace = simulate(chosen, PLAN.workload, PLAN.system)
    assert sum(r.num_emitted for r in trace.rounds) == 6 * 29


def test_hill_climbing_needs_no_times() -> None:
    chosen = load_policy("{kind: hill_climbing, speculation_lengths: [1, 2], budgets: [4]}", PLAN)
    assert chosen == HillClimbing((1, 2), (4,), most_candidates=RECORD.num_candidates)
    with pytest.raises(BadInput, match=r"--policy: .*paatience"):
        load_policy("{kind: hill_climbing, speculation_lengths: [1], budgets: [4], paatience: 3}", PLAN)
    with pytest.raises(BadInput, match=r"--policy: .*budgets"):
        load_policy("{kind: running_statistics, speculation_lengths: [1]}", PLAN)
