"""Searches of spaces too large to enumerate."""

from __future__ import annotations

import sys

import pytest

from sim.errors import BadInput
from sim.policy import Autoregressive, Speculative
from sim.search import ALL_EVALUATED, search
from sim.search_space import SearchSpace
from tests.sim.toy import markov, record_of, system_of, workload_of

SPACE = SearchSpace(tuple(range(1, 7)), tuple(range(1, 17)), fallbacks=("draft", "none", "ngram"))
REGRET = 0.005  # of tokens/s, against the enumerated space


@pytest.fixture(scope="module")
def system():
    record = record_of(*markov(3), num_prompts=12, length=24, seed=1)
    return system_of(record, verify_s=0.010, draft_step_s=0.001, tree_step_s=0.0015)


def test_chosen_trials_find_the_best_of_an_enumerable_space(system):
    pytest.importorskip("optuna")
    workload = workload_of(system.agreement)
    everything = search(SPACE, workload, system)
    chosen = search(SPACE, workload, system, largest_enumerated=100, seed=3)
    assert everything.stopped == ALL_EVALUATED and everything.num_policies < SPACE.num_combinations
    assert chosen.num_policies < 0.7 * everything.num_policies
    assert f"of {SPACE.num_combinations} combinations" in chosen.stopped
    assert chosen.fastest.tokens_per_s.value >= (1 - REGRET) * everything.fastest.tokens_per_s.value
    policies = {prediction.policy for prediction in chosen.ranked}
    assert {Autoregressive(), *map(Speculative, range(1, 7))} <= policies
    again = search(SPACE, workload, system, largest_enumerated=100, seed=3)
    assert [p.policy for p in again.ranked] == [p.policy for p in chosen.ranked]


def test_without_optuna_a_large_space_is_refused(system, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(BadInput, match=r"search space: has too many combinations .*saguaro-planner\[search\]"):
        search(SPACE, workload_of(system.agreement), system, largest_enumerated=100)
