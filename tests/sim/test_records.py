"""Latency tables, systems, traces, workloads and placements, and what predictions say about themselves."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from experiments.recorded_workload import recorded_workload
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.latency import LatencyModel, OperationLatency, equally_likely, latest_of, sum_of_independent
from sim.placement import Placement
from sim.policy import Autoregressive, Speculative, SpeculativeSpeculative
from sim.recursion import outcome_hit_mass
from sim.simulate import ENGINES, predict, predict_all, predicted_speedup, simulate
from sim.system import System
from sim.trace import Operation, Source, StopReason, Trace
from sim.workload import Sampling, Workload, sampling_to_dict
from tests.sim.strategies import batched
from tests.sim.toy import cut_at, markov, record_of, system_of, workload_of

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
    with pytest.raises(BadInput, match="must be a finite number > 0"):
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


def test_mean_of_the_latest_against_sampling():
    """One million draws; the standard error is below 1e-3, the tolerance 5e-3."""
    rng = np.random.default_rng(2)
    first = rng.normal(10, 1, 40)
    parts = [rng.normal(3.3, 0.6, 40) for _ in range(3)]
    drawn = sum(part[rng.integers(0, 40, 1_000_000)] for part in parts)
    sampled = np.maximum(first[rng.integers(0, 40, 1_000_000)], drawn).mean()
    assert latest_of([first, sum_of_independent(parts)]).mean() == pytest.approx(sampled, abs=5e-3)
    assert latest_of([first, sum_of_independent(parts)]).mean() > max(first.mean(), drawn.mean()) + 0.1


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


@pytest.mark.parametrize("num_rows", [1, 2])
def test_perfetto_arrows_lead_from_a_build_to_the_verification_that_it_hit(num_rows):
    record = record_of(*markov(1), num_prompts=4, length=16, seed=1)
    system = system_of(record) if num_rows == 1 else batched(system_of(record), 0.001)
    workload = replace(workload_of(record), batch_size=num_rows)
    trace = simulate(SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1)), workload, system)
    events = trace.to_perfetto()["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    boxes = {(e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    starts, ends = ([e for e in events if e["ph"] == phase] for phase in "sf")
    hits = {r.end_s for r in trace.rounds if r.source is Source.HIT}  # rows of a batch end together
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == list(range(len(hits))) and hits
    for start, end in zip(starts, ends, strict=True):
        build, verify = boxes[start["tid"], start["ts"]], boxes[end["tid"], end["ts"]]
        assert tracks[start["tid"]].startswith("draft") and build["name"] in ("glue", "tree_step")
        assert tracks[end["tid"]].startswith("target") and verify["name"] == "verify"
        assert end["bp"] == "e" and build["ts"] + build["dur"] <= verify["ts"] + 1e-6


def test_perfetto_counters_count_every_round_once():
    record = record_of(*markov(1), num_prompts=3, length=16, seed=1)
    for policy in (Speculative(2), SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1))):
        trace = simulate(policy, workload_of(record), system_of(record))
        counters = [e for e in trace.to_perfetto()["traceEvents"] if e["ph"] == "C"]
        accepted = [e["args"]["accepted"] for e in counters if e["name"] == "accepted per round"]
        assert accepted == [r.num_accepted for r in trace.rounds]
        hits = [e["args"]["hit"] for e in counters if e["name"] == "hit"]
        assert hits == [int(r.source is Source.HIT) for r in trace.rounds if r.source is not Source.SYNCHRONOUS]


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contention": {"target": 0.1, "draft": 1.0}}, "contention.target: must be a finite number >= 1, got 0.1"),
        ({"contention": {"target": 1.0}}, "contention.draft: this key is missing"),
        ({"overlaps": "no"}, "overlaps: must be true or false"),
        ({"latency": {"target.verify": {}}}, "latency.target.verify: .*knots_num_tokens_context_s: this key is"),
        ({"latency": {"moon.verify": {}}}, r"latency.moon.verify: must be a lane \(target, draft\)"),
        ({"host_s": {"ar": "fast"}}, "host_s.sd: this key is missing"),
        (
            {"host_s": {"ar": 0, "sd": 0, "hit": -0.1, "miss": 0, "undrafted_miss": 0}},
            "host_s.hit: must be a finite number >= 0",
        ),
        ({"agreement": {}}, "agreement.file: this key is missing"),
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
        ("trace.json", b"[]", "trace.json: schema: must be one of 1, 2, 3"),
        ("trace.json", b'{"schema": 4}', "trace.json: schema: must be one of 1, 2, 3"),
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


NOT_A_NUMBER = (True, "1", None, math.nan)


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, -1])
@pytest.mark.parametrize("name", ["transfer_latency_s", "transfer_bytes_per_s", "distribution_bytes", "num_targets"])
def test_a_placement_of_wrong_types_or_values_is_named(name, value):
    with pytest.raises(BadInput, match=f"placement.{name}: must be "):
        Placement(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("distribution_bytes", 4.0), ("num_draft_devices", 2.0), ("split", 3)])
def test_a_placement_counts_in_integers(name, value):
    with pytest.raises(BadInput, match=f"placement.{name}: must be "):
        Placement(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dataset", (None, 3)),
        ("prompts", (None, "text", 3, (), ((1,), ()), (1, 2), ("ab",), ((1, True),), ((1.0,),), ((-1,),))),
        ("max_new_tokens", (*NOT_A_NUMBER, 2.0, -1)),
        ("batch_size", (*NOT_A_NUMBER, 2.0, 0)),
        ("temperature", (*NOT_A_NUMBER, math.inf, -0.5)),
        ("stop_ids", (None, 3, "3", ("3",), (True,), (math.nan,), (-1,))),
        ("sampling", (None, Sampling(), [Sampling()], (Sampling(), Sampling()), (0.5,), ({"top_k": 2},))),
        ("stop_strings", (None, "ab", ["ab"], ("",), (3,), (b"ab",), ("a\ufffd",))),
    ],
)
def test_a_workload_of_wrong_types_or_values_is_named(name, values):
    given = {"dataset": "toy", "prompts": ((1, 2),), "max_new_tokens": 4}
    assert Workload(**given).identity()["batch_size"] == 1
    for value in values:
        with pytest.raises(BadInput, match=rf"workload.{name}(\[\d\])?: must "):
            Workload(**given | {name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (*NOT_A_NUMBER, math.inf, -0.5)),
        ("top_k", (*NOT_A_NUMBER, 2.0, -1)),
        ("top_p", (*NOT_A_NUMBER, 0, 1.1)),
        ("min_p", (*NOT_A_NUMBER, -0.1, 1.1)),
        ("repetition_penalty", (*NOT_A_NUMBER, 0, -1, math.inf)),
        ("seed", (math.nan, "3", True, 2.0, -1)),
    ],
)
def test_settings_of_wrong_types_or_values_are_named(name, values):
    for value in values:
        with pytest.raises(BadInput, match=f"sampling.{name}: must be "):
            Sampling(**{name: value})


def test_settings_are_resolved_in_one_place():
    plain = Workload("toy", ((1,), (2,)), 4, temperature=0.7)
    assert [plain.sampling_of(index) for index in (0, 1)] == [Sampling(0.7)] * 2
    assert plain.identity()["sampling"] == []
    own = (Sampling(0.7, seed=1), Sampling(0.7, seed=2))
    assert replace(plain, sampling=own).identity() == plain.identity()  # a seed is no law
    mixed = Workload("toy", ((1,), (2,)), 4, sampling=(Sampling(), Sampling(0.9, top_k=4)))
    assert mixed.temperature == 0.9 and replace(mixed, max_new_tokens=5).sampling == mixed.sampling
    assert [entry["temperature"] for entry in mixed.identity()["sampling"]] == [0.0, 0.9]
    assert mixed.select([0]) == Workload("toy", ((1,),), 4, sampling=(Sampling(),))
    assert mixed.select([1, 1]).laws == (Sampling(0.9, top_k=4),)
    with pytest.raises(BadInput, match=r"workload.temperature: must be left out .* 0.9, got 0.5"):
        Workload("toy", ((1,), (2,)), 4, temperature=0.5, sampling=mixed.sampling)


# ---------------------------------------------------------------------------------------------------------- predictions


def test_other_settings_than_those_of_the_record_are_refused(tmp_path):
    """A record of an earlier release has none; a prediction is of one law, whatever the seeds."""
    record = record_of(*markov(1), num_prompts=3, length=12, seed=1)
    rules = replace(workload_of(record), prompts=((0,),) * 3)
    settings = Sampling(record.temperature, top_k=3, repetition_penalty=1.2)
    trimmed = replace(record, identity=record.identity | {"sampling": [sampling_to_dict(settings)]})
    trimmed.write(tmp_path / "record.parquet")
    assert AgreementRecord.read(tmp_path / "record.parquet").sampling == settings
    of_settings = replace(rules, sampling=(settings, replace(settings, seed=3), settings))
    for given, workload in ((record, rules), (trimmed, of_settings)):
        assert predict(Speculative(2), workload, system_of(given)).tokens_per_s.value > 0
        assert outcome_hit_mass(given, 2, 2, Source.MISS).shape == (3, 3)
        assert recorded_workload(given).laws == workload.laws
    mixed = replace(rules, sampling=(settings, settings, Sampling(record.temperature)))
    for given, workload in ((record, of_settings), (trimmed, rules), (trimmed, mixed), (record, mixed)):
        for run in (simulate, predict):
            with pytest.raises(BadInput, match=r"workload.sampling: must be, for all prompts, the settings of the"):
                run(Speculative(2), workload, system_of(given))
    for wrong in ([sampling_to_dict(settings)] * 2, [{"top_q": 1}], [{"temperature": 0.1}], 3):
        with pytest.raises(BadInput, match=r"identity.sampling: must hold at most one set"):
            replace(record, identity=record.identity | {"sampling": wrong})


def test_other_stop_strings_than_those_of_the_record_are_refused():
    record = record_of(*markov(1), num_prompts=3, length=12, seed=1)
    stopping = replace(record, identity=record.identity | {"stop_strings": ["a", "b"]}, stopped=np.ones(3, dtype=bool))
    workload = replace(workload_of(record), stop_strings=("b", "a"))
    reasons = {s.stop_reason for s in simulate(Speculative(2), workload, system_of(stopping)).sequences}
    assert reasons == {StopReason.STOP_STRING}
    assert recorded_workload(stopping).stop_strings == ("a", "b")
    for given, rules in ((record, workload), (stopping, workload_of(record))):
        with pytest.raises(BadInput, match=r"workload.stop_strings: must be"):
            simulate(Speculative(2), rules, system_of(given))


def test_a_token_that_the_draft_cannot_give_is_never_accepted():
    """log q is -inf where a setting cuts the token from q; nothing else may be infinite."""
    record = record_of(*markov(1), num_prompts=3, length=12, seed=1)
    cut = replace(record, log_q=np.full_like(record.log_q, -np.inf))
    workload = workload_of(cut)
    trace = simulate(Speculative(2), workload, system_of(cut))
    assert trace.rounds and not any(r.num_accepted for r in trace.rounds)
    for column, value in (("log_p", -np.inf), ("log_q", np.inf), ("log_q", np.nan)):
        with pytest.raises(BadInput, match=f"{column}, row 0: must be finite"):
            replace(record, **{column: np.full_like(record.log_q, value)})


def test_other_stop_tokens_than_those_of_the_record_are_refused():
    """Texts of the record end at token 5; under other rules they would be others."""
    record = cut_at(record_of(*markov(1), num_prompts=4, length=12, seed=1), stop=5)
    system, workload = system_of(record), workload_of(record)
    assert workload.stop_ids == (5,)
    message = r"workload.stop_ids: must be \[5\], those that end the texts of the agreement record, got \[\]"
    without = replace(workload, stop_ids=())
    for engine in ENGINES:
        predict(Speculative(2), workload, system, engine=engine)
        with pytest.raises(BadInput, match=message):
            predict(Speculative(2), without, system, engine=engine)
    for refused in (lambda: simulate(Autoregressive(), without, system), lambda: predict_all([], without, system)):
        with pytest.raises(BadInput, match=message):
            refused()


def test_a_prediction_that_reached_its_ceiling_says_so_without_a_warning():
    record = record_of(*markov(1), num_prompts=6, length=12, seed=1)
    system, workload = system_of(record, residuals=(0.5, 1.5)), workload_of(record)
    for engine in ("vectorized", "des"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prediction = predict(Speculative(2), workload, system, engine=engine, relative_half_width=1e-6, ceiling=20)
        assert prediction.notes[0].startswith("20 replications, the ceiling, know tokens/s to")


def test_tokens_per_s_are_those_of_one_target():
    """Under AR two targets do not meet: each is as fast as one alone, and the prediction says that it is one's rate."""
    record = record_of(*markov(1), num_prompts=6, length=12, seed=1)
    one = system_of(record)
    two = replace(one, placement=Placement(num_targets=2))
    alone, shared = (predict(Autoregressive(), workload_of(record), s, engine="des") for s in (one, two))
    assert shared.tokens_per_s.value == pytest.approx(alone.tokens_per_s.value)
    assert (alone.notes, shared.notes) == ((), ("tokens/s are per target; 2 targets share the draft",))
    assert [p.to_dict()["num_targets"] for p in (alone, shared)] == [1, 2]


def test_prompts_of_a_batch_are_drawn_together():
    """12 prompts by 2 and by 3: the smallest parts that neither cuts are two of 6; over two targets, dealt in turn,
    batches of 3 hold prompts 0, 2, 4 and 1, 3, 5, and so on."""
    record = record_of(*markov(1), num_prompts=12, length=12, seed=1)
    system, workload = batched(system_of(record), 0.001), workload_of(record)
    by_two, by_three = (
        predict(Speculative(2), replace(workload, batch_size=b), system, engine="vectorized") for b in (2, 3)
    )
    assert (by_two.tokens_per_s.n, by_three.tokens_per_s.n) == (6, 4)
    speedup = predicted_speedup(by_three, by_two)
    assert speedup.n == 2
    assert speedup.value == pytest.approx(by_three.tokens_per_s.value / by_two.tokens_per_s.value)
    shared = replace(system, placement=Placement(num_targets=2))
    dealt = predict(Speculative(2), replace(workload, batch_size=3), shared, engine="des", ceiling=2)
    assert dealt.expectation.batch.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    other = predict(Speculative(2), workload_of(record.select(np.arange(3))), system_of(record.select(np.arange(3))))
    with pytest.raises(BadInput, match=r"predictions: must be of the same prompts, got \[12, 3\]"):
        predicted_speedup(by_two, other)
