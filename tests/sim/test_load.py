"""What arrives: the same for every policy of a seed, at the times and in the shapes that were asked for."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from sim.errors import BadInput
from sim.load import (
    LUCK_ENTRIES,
    MOST_VARIANTS,
    ClosedLoop,
    OpenLoop,
    Poisson,
    Shape,
    TracedArrival,
    num_variants,
)
from sim.policy import Autoregressive, PolicyTable, Speculative
from sim.replay import Replay
from sim.serving import serve_trace
from tests.sim.served import served, ssd
from tests.sim.toy import markov, record_of, system_of, workload_of

RECORD = record_of(*markov(3), num_prompts=5, length=12, seed=4)
REPLAY = Replay(RECORD, workload_of(RECORD))


def arrivals_of(policy, load, seed: int) -> str:
    """Hash of arrival times, prompts and texts of everything that was served."""
    trace = serve_trace(policy, load, workload_of(RECORD), served(system_of(RECORD)), seed)
    rows = [(s.index, s.arrival_s, s.prompt_length, s.tokens) for s in trace.sequences]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def test_every_policy_of_a_seed_meets_the_same_requests():
    load = OpenLoop(Poisson(20.0), max_batch_size=4, num_requests=60)
    table = PolicyTable(((1, ssd(3, 2)), (2, Autoregressive())))
    policies = (Autoregressive(), Speculative(3), ssd(4, 1), table)
    assert len({arrivals_of(policy, load, seed=7) for policy in policies}) == 1
    assert arrivals_of(Autoregressive(), load, seed=8) != arrivals_of(Autoregressive(), load, seed=7)


def test_draws_do_not_depend_on_how_many_are_asked_for():
    for load, longer in (
        (ClosedLoop(2, 40), ClosedLoop(9, 3000)),
        (OpenLoop(Poisson(1.0), 2, 40), OpenLoop(Poisson(1.0), 9, 3000)),
    ):
        assert list(load.requests(REPLAY, 1)) == list(islice(longer.requests(REPLAY, 1), 40))
    assert list(load.arrival_times(1)) == list(islice(longer.arrival_times(1), 40))
    assert len(list(longer.requests(REPLAY, 1))) == len(list(longer.arrival_times(1))) == 3000


def test_rates_scale_time_and_streams_are_apart():
    slow, fast = (np.array(list(OpenLoop(Poisson(rate), 1, 2000).arrival_times(3))) for rate in (1.0, 4.0))
    assert np.array_equal(slow, 4 * fast)
    requests = [list(OpenLoop(Poisson(rate), 1, 50).requests(REPLAY, 3)) for rate in (1.0, 4.0)]
    assert requests[0] == requests[1]


def test_poisson_intervals():
    """Mean and squared coefficient of variation of 20,000 exponential intervals within 5 standard errors (1/sqrt(n) and
    sqrt(8/n)): a false alarm has probability below 2e-6. A constant interval is told apart."""
    intervals = np.diff(list(OpenLoop(Poisson(2.0), 1, 20_001).arrival_times(5)))
    assert abs(intervals.mean() / 0.5 - 1) < 5 / np.sqrt(20_000)
    assert abs((intervals.std() / intervals.mean()) ** 2 - 1) < 5 * np.sqrt(8 / 20_000)


def test_prompts_and_lucks_are_drawn_evenly():
    """A chi-squared of 4 degrees of freedom is above 40 with probability 4e-8."""
    requests = list(ClosedLoop(1, 5000).requests(REPLAY, 2))
    counts = Counter(request.prompt for request in requests)
    assert sum((counts[prompt] - 1000) ** 2 / 1000 for prompt in range(5)) < 40
    assert all(request.luck % 5 == request.prompt for request in requests)
    variants = {request.luck // 5 for request in requests}
    assert 500 < len(variants) <= num_variants(REPLAY) == MOST_VARIANTS


def test_tables_are_bounded_by_the_record():
    wide = Replay(*(lambda r: (r, workload_of(r)))(record_of(*markov(3), num_prompts=40, length=64, seed=1)))
    assert num_variants(wide) == LUCK_ENTRIES // (40 * 64)


def test_a_trace_is_served_as_it_says():
    lines = ((0.0, 2, 5), (0.1, None, None), (0.1, 0, 1), (0.4, 4, 12))
    load = OpenLoop(lines, max_batch_size=2)
    trace = serve_trace(ssd(2, 1), load, workload_of(RECORD), served(system_of(RECORD)), 0)
    drawn = [request.prompt for request in load.requests(REPLAY, 0)]
    assert [drawn[0], *drawn[2:]] == [2, 0, 4]
    assert [s.arrival_s for s in trace.sequences] == [0.0, 0.1, 0.1, 0.4]
    assert [len(s.tokens) for s in trace.sequences] == [5, 12, 1, 12]
    assert [s.tokens for s in trace.sequences] == [
        RECORD.text(prompt)[:length] for prompt, length in zip(drawn, (5, 12, 1, 12), strict=True)
    ]
    assert load.rate_per_s == pytest.approx(3 / 0.4) and load.num_requests == 4
    assert load.arrivals[0] == TracedArrival(0.0, 2, 5)


def test_shapes_are_taken_in_turn():
    load = ClosedLoop(2, 5, shapes=(Shape(1, 3), Shape(output_tokens=2)))
    requests = list(load.requests(REPLAY, 0))
    assert [r.output_tokens for r in requests] == [3, 2, 3, 2, 3]
    assert [r.prompt for r in requests[::2]] == [1, 1, 1]
    free = list(ClosedLoop(2, 5).requests(REPLAY, 0))
    assert [r.prompt for r in requests[1::2]] == [r.prompt for r in free[1::2]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), r"rate_per_s: must be a finite number > 0, got 0.0"),
        (lambda: ClosedLoop(0, 5), "load.concurrency: must be an integer >= 1, got 0"),
        (lambda: ClosedLoop(1, 0), "load.num_requests: must be an integer >= 1"),
        (lambda: ClosedLoop(1, 1, max_batch_size=0), "load.max_batch_size: must be an integer >= 1"),
        (lambda: OpenLoop(Poisson(1.0), 0, 5), "load.max_batch_size"),
        (lambda: OpenLoop(Poisson(1.0), 1), "load.num_requests: must be given for Poisson"),
        (lambda: OpenLoop((), 1), "load.arrivals: must hold at least 1"),
        (lambda: OpenLoop(((0.0,),), 1, 2), "load.arrivals: must hold at least 2"),
        (lambda: OpenLoop(((1.0,), (0.5,)), 1), "load.arrivals: must be in order of time"),
        (lambda: OpenLoop(((float("nan"),),), 1), "load.arrivals: arrival_s: must be a finite number >= 0"),
        (lambda: list(ClosedLoop(1, 1, shapes=((5, None),)).requests(REPLAY, 0)), r"load: prompt: must be in 0\.\.4"),
        (lambda: list(ClosedLoop(1, 1, shapes=((0, 13),)).requests(REPLAY, 0)), r"output_tokens: must be in 1\.\.12"),
    ],
)
def test_impossible_loads_are_refused(make, message):
    with pytest.raises(BadInput, match=message):
        make()


def test_loads_are_written_as_json():
    assert ClosedLoop(3, 9).to_dict()["max_batch_size"] == 3
    assert OpenLoop(Poisson(2.0), 4, 9).to_dict() == {
        "kind": "open",
        "rate_per_s": 2.0,
        "num_requests": 9,
        "max_batch_size": 4,
        "arrivals": "poisson",
        "trace_sha256": None,
    }
    hashes = {OpenLoop(((0.0, prompt),), 4).to_dict()["trace_sha256"] for prompt in (1, 1, 2)}
    assert len(hashes) == 2
