"""Latency tables, systems, traces and metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sim import metrics
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.latency import LatencyModel, OperationLatency, equally_likely, mean_of_maximum, sum_of_independent
from sim.placement import Placement
from sim.policy import SpeculativeSpeculative
from sim.simulate import predict, simulate
from sim.system import System
from sim.trace import Operation, Round, Sequence, Source, Trace
from tests.sim.strategies import batched
from tests.sim.toy import markov, record_of, system_of, workload_of

TABLE = OperationLatency(
    Operation.VERIFY, {1: ((0, 1.0), (100, 2.0)), 2: ((0, 5.0), (100, 5.0)), 4: ((0, 7.0), (100, 9.0))}, (0.9, 1.1)
)


def test_latency_interpolates_inside_its_range():
    assert TABLE.location_s(1, [0, 50, 100]) == pytest.approx([1.0, 1.5, 2.0])
    assert TABLE.location_s(3, 100) == pytest.approx(7.0)
    assert TABLE.location_s(2, 50) == pytest.approx(5.0), "a step between one and two tokens is kept"
    assert TABLE.samples_s(1, 0) == pytest.approx([0.9, 1.1])


@pytest.mark.parametrize(
    ("width", "context", "message"),
    [(5, 0, "range 1..4, got 5"), (0, 0, "range 1..4, got 0"), (1, 101, "range 0..100, got 101"), (1, -1, "got -1")],
)
def test_latency_refuses_what_was_not_measured(width, context, message):
    with pytest.raises(BadInput, match=message):
        TABLE.mean_s(width, context)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_impossible_latencies_are_refused(value):
    with pytest.raises(BadInput, match="must be finite and >= 0"):
        OperationLatency(Operation.VERIFY, {1: ((0, value),)}, (1.0,))


def test_latency_model_survives_its_dictionary_and_names_what_is_missing():
    system = system_of(record_of(*markov(1), num_prompts=1, length=4, seed=1))
    model = LatencyModel.from_dict(json.loads(json.dumps(system.latency.to_dict())))
    assert model == system.latency
    with pytest.raises(BadInput, match="target prefill: was not profiled; known: draft draft_step"):
        from sim.trace import Lane

        _ = model[Lane.TARGET, Operation.PREFILL]


def test_compressed_distributions_keep_their_mean():
    values = np.random.default_rng(1).gamma(2.0, size=1003)
    assert equally_likely(values, 40).mean() == pytest.approx(values.mean())
    parts = [np.array([1.0, 2.0]), np.array([0.0, 4.0]), values[:50]]
    assert sum_of_independent(parts).mean() == pytest.approx(sum(part.mean() for part in parts))


def test_mean_of_maximum_against_sampling():
    """One million draws; the standard error is below 1e-3, the tolerance 5e-3."""
    rng = np.random.default_rng(2)
    first = rng.normal(10, 1, 40)
    parts = [rng.normal(3.3, 0.6, 40) for _ in range(3)]
    drawn = sum(part[rng.integers(0, 40, 1_000_000)] for part in parts)
    sampled = np.maximum(first[rng.integers(0, 40, 1_000_000)], drawn).mean()
    assert mean_of_maximum(first, sum_of_independent(parts)) == pytest.approx(sampled, abs=5e-3)
    assert mean_of_maximum(first, sum_of_independent(parts)) > max(first.mean(), drawn.mean()) + 0.1


# -------------------------------------------------------------------------------------------------------------- system


def test_system_round_trip_predicts_the_same(tmp_path):
    record = record_of(*markov(1), num_prompts=4, length=12, seed=1)
    system = system_of(record, residuals=(0.8, 1.2), contention=1.1)
    system.write(tmp_path / "system.json")
    read = System.read(tmp_path / "system.json")
    policy, workload = SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1)), workload_of(record)
    assert predict(policy, workload, read).tokens_per_s == predict(policy, workload, system).tokens_per_s


def test_an_exchanged_record_is_refused(tmp_path):
    record = record_of(*markov(1), num_prompts=4, length=12, seed=1)
    system_of(record).write(tmp_path / "system.json")
    record_of(*markov(1), num_prompts=4, length=12, seed=2).write(tmp_path / "system.agreement.parquet")
    with pytest.raises(BadInput, match="its hash differs"):
        System.read(tmp_path / "system.json")


def test_a_missing_or_broken_system_is_named(tmp_path):
    with pytest.raises(BadInput, match="no such system"):
        System.read(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(BadInput, match="must be JSON"):
        System.read(tmp_path / "broken.json")
    (tmp_path / "old.json").write_text('{"schema": 0}')
    with pytest.raises(BadInput, match="schema: must be 1, got 0"):
        System.read(tmp_path / "old.json")


# --------------------------------------------------------------------------------------------------------------- trace


def two_prompts(seconds: tuple[float, float], tokens: tuple[int, int] = (11, 11)) -> Trace:
    """Two sequences of one round each, which took the seconds given."""
    trace = Trace(policy={"kind": "ar"}, workload={})
    for index in range(2):
        trace.sequences.append(Sequence(index, 3, tuple(range(tokens[index])), 0.0, 0.0, seconds[index], False))
        emitted = tokens[index] - 1
        trace.rounds.append(
            Round(index, 0, Source.SYNCHRONOUS, emitted - 1, emitted - 1, emitted, 3, 0.0, seconds[index])
        )
    return trace


def test_trace_round_trip(tmp_path):
    record = record_of(*markov(1), num_prompts=3, length=12, seed=1)
    trace = simulate(SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1)), workload_of(record), system_of(record))
    trace.write(tmp_path / "trace")
    assert Trace.read(tmp_path / "trace") == trace
    with pytest.raises(BadInput, match="no such file"):
        Trace.read(tmp_path / "other")


def test_traces_of_the_first_schema_are_read(tmp_path):
    """They know no batches, devices or arrivals: one row, the first device, all requests there from the beginning."""
    import pyarrow.parquet as pq

    record = record_of(*markov(1), num_prompts=2, length=8, seed=1)
    trace = simulate(SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1)), workload_of(record), system_of(record))
    trace.write(tmp_path)
    header = json.loads((tmp_path / "trace.json").read_text())
    (tmp_path / "trace.json").write_text(json.dumps(header | {"schema": 1}))
    for name, added in (("spans", ["batch_size", "device"]), ("sequences", ["arrival_s"])):
        pq.write_table(pq.read_table(tmp_path / f"{name}.parquet").drop_columns(added), tmp_path / f"{name}.parquet")
    assert Trace.read(tmp_path) == trace


def test_perfetto_tracks_of_a_batch_on_two_devices():
    """Rounds of rows that are decoded together lie on tracks of their own, and so do devices; no track overlaps."""
    record = record_of(*markov(1), num_prompts=5, length=8, seed=1)
    placement = Placement(num_draft_devices=2, num_targets=2)
    system = replace(batched(system_of(record), 0.001), placement=placement)
    workload = replace(workload_of(record), batch_size=2)
    trace = simulate(SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1)), workload, system)
    events = trace.to_perfetto()["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    rounds = ["rounds", "rounds 1", "rounds 2", "rounds 3"]
    assert list(names.values()) == [*rounds, "target", "target 1", "draft", "draft 1"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(trace.spans) + len(trace.rounds)
    for tid in names:
        on_track = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e["tid"] == tid)
        assert on_track and all(before[1] <= after[0] + 1e-6 for before, after in pairwise(on_track))


def test_perfetto_has_one_track_per_lane_and_every_span():
    record = record_of(*markov(1), num_prompts=2, length=8, seed=1)
    trace = simulate(SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1)), workload_of(record), system_of(record))
    events = trace.to_perfetto()["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"rounds", "target", "draft"}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(trace.spans) + len(trace.rounds)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in complete)


# ------------------------------------------------------------------------------------------------------------- metrics


def test_speedups_are_ratios_of_totals():
    """AR took 10 + 10 s, SD 5 + 20 s for equal tokens: .8, not the mean of the ratios 2 and .5."""
    ar, sd = two_prompts((10, 10)), two_prompts((5, 20))
    assert metrics.speedup([sd], [ar]).value == pytest.approx(0.8)
    assert metrics.tokens_per_s([ar]).value == pytest.approx(1.0)


def test_four_acceptance_figures_are_kept_apart():
    trace = Trace(policy={}, workload={}, sequences=[Sequence(0, 3, tuple(range(9)), 0, 0, 1, False)])
    counts = [(4, 4, 5), (4, 1, 2), (4, 0, 1)]  # drafted, accepted, emitted
    trace.rounds = [
        Round(0, i, Source.SYNCHRONOUS, drafted, accepted, emitted, 3, 0, 1)
        for i, (drafted, accepted, emitted) in enumerate(counts)
    ]
    assert metrics.mean_acceptance_length([trace]).value == pytest.approx(8 / 3)
    assert metrics.accepted_per_round([trace]).value == pytest.approx(5 / 3)
    assert metrics.accepted_over_drafted([trace]).value == pytest.approx(5 / 12)
    assert metrics.acceptance_rate([trace]).value == pytest.approx(5 / 7)
    assert metrics.survival_by_position([trace]) == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert metrics.accept_count_histogram([trace]) == {0: 1, 1: 1, 4: 1}


def test_a_speculation_that_is_drafted_anew_was_found():
    """Two rows whose rounds alternate in the trace; the second row's prepared speculations are dropped with the batch.

    Look-ups: after the first rounds a miss and a hit that is not used, then, both after a miss, a hit each.
    """
    trace = Trace(policy={}, workload={}, sequences=[Sequence(i, 3, tuple(range(4)), 0, 0, 3, False) for i in (0, 1)])
    sources = [
        (Source.FIRST, Source.FIRST),
        (Source.MISS, Source.REDRAFTED),
        (Source.HIT, Source.HIT),
        (Source.MISS, Source.REDRAFTED),
    ]
    trace.rounds = [
        Round(row, index, source, 1, 0, 1, 3, index, index + 1)
        for index, pair in enumerate(sources)
        for row, source in enumerate(pair)
    ]
    assert metrics.hit_rate([trace]).value == pytest.approx(4 / 6)
    by_source = metrics.hit_rate_by_source([trace])
    assert by_source["after_miss"].value == pytest.approx(3 / 4)
    assert by_source["after_hit"].value == pytest.approx(1 / 2)


def test_repeats_of_one_prompt_do_not_narrow_the_interval():
    """Ten repeats of the same outcome leave the interval over prompts as it was."""
    trace = two_prompts((5, 20))
    once, often = metrics.tokens_per_s([trace]), metrics.tokens_per_s([trace] * 10)
    assert (once.value, once.low, once.high) == pytest.approx((often.value, often.low, often.high))


def test_one_prompt_has_no_interval():
    trace = replace(two_prompts((5, 20)))
    trace.sequences, trace.rounds = trace.sequences[:1], trace.rounds[:1]
    estimate = metrics.tokens_per_s([trace])
    assert estimate.to_dict() == {"value": 2.0, "low": None, "high": None, "n": 1}


def test_measured_figures_of_a_simulated_trace_match_its_expectation():
    """300 prompts: hit rates by source and overlap of the trace against the recursion and the timeline's own times."""
    record = record_of(*markov(1), num_prompts=300, length=20, seed=1)
    system, workload = system_of(record), workload_of(record)
    policy = SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1))
    traces, expected = (
        [simulate(policy, workload, system, seed) for seed in range(4)],
        predict(policy, workload, system),
    )
    assert metrics.hit_rate(traces).value == pytest.approx(expected.hit_rate.value, abs=0.03)
    for source, rate in metrics.hit_rate_by_source(traces).items():
        assert rate.value == pytest.approx(expected.hit_rate_by_source[source].value, abs=0.03)
    assert metrics.overlap(traces).value == pytest.approx(1.0), "a build of 6 ms hides behind a verification of 10 ms"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contention": {"target": 0.1, "draft": 1.0}}, "contention.target: must be a finite number >= 1, got 0.1"),
        ({"contention": {"target": 1.0}}, "contention.draft: this key is missing"),
        ({"overlaps": "no"}, "overlaps: must be true or false"),
        ({"latency": {"target.verify": {}}}, "must be as `saguaro fit` writes it"),
        ({"latency": {"moon.verify": {}}}, "must be as `saguaro fit` writes it"),
        ({"host_s": {"ar": "fast"}}, "must be as `saguaro fit` writes it"),
        ({"host_s": {"ar": 0, "sd": 0, "hit": -0.1, "miss": 0}}, "host_s.hit: must be a finite number >= 0"),
        ({"agreement": {}}, "must be as `saguaro fit` writes it"),
    ],
)
def test_a_system_with_impossible_entries_is_named(tmp_path, change, message):
    path = tmp_path / "system.json"
    system_of(record_of(*markov(1), num_prompts=2, length=6, seed=1)).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput, match=message) as caught:
        System.read(path)
    assert "system.json" in str(caught.value)


def test_a_folder_or_a_foreign_file_is_no_record(tmp_path):
    with pytest.raises(BadInput, match="no such system file"):
        System.read(tmp_path)
    (tmp_path / "noise.parquet").write_bytes(b"noise")
    with pytest.raises(BadInput, match="is not a parquet file"):
        AgreementRecord.read(tmp_path / "noise.parquet")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("trace.json", b"{", "trace.json: must be JSON"),
        ("trace.json", b"[]", "trace.json: schema: must be one of 1, 2"),
        ("trace.json", b'{"schema": 3}', "trace.json: schema: must be one of 1, 2"),
        ("spans.parquet", b"noise", "spans.parquet: must be a table of a trace"),
        ("rounds.parquet", None, "rounds.parquet: no such file"),
    ],
)
def test_a_broken_trace_is_named(tmp_path, file, content, message):
    record = record_of(*markov(1), num_prompts=2, length=8, seed=1)
    simulate(SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1)), workload_of(record), system_of(record)).write(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        Trace.read(tmp_path)
