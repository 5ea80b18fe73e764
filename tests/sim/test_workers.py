"""Work is done in order, wherever it runs, and comes out the same."""

from __future__ import annotations

import json
import os
import pickle

import pytest

from sim.errors import BadInput
from sim.search import search
from sim.search_space import SearchSpace
from sim.workers import Workers
from tests.sim.toy import markov, record_of, system_of, workload_of

AT_ONCE = 0.0  # seconds of work left that are worth another process


def process_of(piece: int) -> tuple[int, int]:
    return piece, os.getpid()


def refuse(piece: int) -> int:
    raise BadInput("piece", "must not be", piece)


def answer_of(workers: Workers, engine: str) -> str:
    record = record_of(*markov(3), num_prompts=8, length=16, seed=1)
    system = system_of(record, residuals=(0.8, 1.0, 1.2))
    space = SearchSpace((1, 2, 3), (2, 6))
    result = search(space, workload_of(record), system, engine=engine, seed=4, workers=workers)
    rows = [(p.to_dict(), result.contrasts[p.policy].to_dict()) for p in result.ranked]
    return json.dumps([rows, result.recommended.policy.name])


def test_small_work_stays_in_this_process():
    assert Workers(2).map(process_of, [1, 2, 3]) == [(n, os.getpid()) for n in (1, 2, 3)]


def test_what_is_left_goes_to_other_processes():
    pieces = Workers(2, worthwhile_s=AT_ONCE).map(process_of, list(range(5)))
    assert [piece for piece, _ in pieces] == list(range(5))
    assert pieces[0][1] == os.getpid() and os.getpid() not in {process for _, process in pieces[1:]}


@pytest.mark.parametrize("engine", ["exact", "vectorized"])
def test_results_do_not_depend_on_the_number_of_workers(engine):
    assert answer_of(Workers(1), engine) == answer_of(Workers(2, worthwhile_s=AT_ONCE), engine)


def test_a_cluster_gives_the_same():
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        assert answer_of(Workers(cluster=cluster.scheduler_address), "exact") == answer_of(Workers(1), "exact")


def test_refusals_come_through_and_impossible_workers_are_refused():
    with pytest.raises(BadInput, match="piece: must not be, got 1"):
        Workers(2).map(refuse, [1, 2])
    with pytest.raises(BadInput, match="num_workers: must be an integer >= 1, got 0"):
        Workers(0)
    pytest.importorskip("distributed")
    with pytest.raises(BadInput, match="cluster: no Dask scheduler answers there"):
        Workers(cluster="nowhere").map(process_of, [1])


def test_a_record_is_sent_without_what_was_computed_along_the_way():
    record = record_of(*markov(3), num_prompts=8, length=16, seed=1)
    size = len(pickle.dumps(record))
    search(SearchSpace((1, 2), (4,)), workload_of(record), system_of(record))
    assert len(pickle.dumps(record)) == size
    assert pickle.loads(pickle.dumps(record)).lengths.tolist() == record.lengths.tolist()


@pytest.mark.parametrize("worthwhile_s", [AT_ONCE, 1e9])
def test_it_is_told_how_far_it_is(worthwhile_s: float) -> None:
    told: list[tuple[int, int]] = []
    workers = Workers(2, worthwhile_s=worthwhile_s, on_done=lambda done, total: told.append((done, total)))
    assert workers.map(abs, [-1, -2, -3]) == [1, 2, 3]
    assert told == [(1, 3), (2, 3), (3, 3)]
