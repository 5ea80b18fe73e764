"""Wrong input is refused by `BadInput` where it comes in: nothing passes silently, nothing ends in another error."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from sim.adaptive import adaptive_from_dict
from sim.beliefs import AffineTime, ExpectedTimes
from sim.errors import BadInput, require_count, require_number
from sim.hill_climbing import HillClimbing
from sim.latency import LatencyModel, OperationLatency
from sim.load import ClosedLoop, OpenLoop, Poisson
from sim.memory import Memory
from sim.parametric import HitCurve, ParametricAgreement, conditional_from_cumulative
from sim.placement import Placement
from sim.policy import PolicyTable, Speculative, SpeculativeSpeculative, policy_from_dict, policy_table_from_dict
from sim.proposal import downweighted_mass, downweighted_proposal, plain_proposal
from sim.replay import Replay
from sim.replications import rate_of, until
from sim.running_statistics import RunningStatistics
from sim.simulate import ENGINES, predict, simulate
from sim.streams import Streams, replication_seeds
from sim.system import HostTerm, System
from sim.trace import Lane, Operation
from tests.sim.strategies import batched
from tests.sim.toy import markov, record_of, system_of, workload_of

IN_JSON = (math.nan, "3", "x", True, None, [1], {})  # no numbers
NO_NUMBERS = (*IN_JSON, 1j, np.bool_(True))
NO_COUNTS = (*NO_NUMBERS, 1.5, -1, math.inf)
NO_AMOUNTS = (*NO_NUMBERS, -0.5, math.inf, -math.inf)  # of numbers >= 0
NO_LISTS = (3, "x", True, None, {}, {1})
NO_MAPPINGS = (3, math.nan, "x", True, None, [1])
NO_OBJECTS = (*NO_MAPPINGS, {})

VERIFY, GLUE = Operation.VERIFY, Operation.GLUE
KEY = (Lane.TARGET, VERIFY)
CURVE = HitCurve(0.4, 0.5)
RECORD = record_of(*markov(3), num_prompts=3, length=6, seed=4)
SYSTEM = system_of(RECORD)
WORKLOAD = workload_of(RECORD)
SSD = SpeculativeSpeculative(2, (1, 1, 1), (1, 1, 1))
TIMES = ExpectedTimes(AffineTime(0.01), AffineTime(0.002), AffineTime(0.002), AffineTime(0.002))


def parametric(**given) -> ParametricAgreement:
    fields = {"prompt_tokens": 4, "new_tokens": 8, "acceptance": (0.5,), "after_hit": (CURVE,), "after_miss": (CURVE,)}
    return ParametricAgreement(**(fields | given))


def running(**given) -> RunningStatistics:
    return RunningStatistics(**({"speculation_lengths": (1, 2), "budgets": (0, 4), "times": TIMES} | given))


def table(knots, residuals=(1.0,), batched=None, operation=VERIFY) -> OperationLatency:
    return OperationLatency(operation, knots, residuals, {} if batched is None else batched)


def in_order(first, second):
    return table({1: ((first, 1.0), (second, 1.0))})


def keyed(value, content):
    """The content under the value, where it can be a key."""
    return {value: content} if value.__hash__ else [value]


def rate(**given):
    return until(lambda seeds: ([1.0] * len(seeds), [1.0] * len(seeds)), **({"seed": 0} | given))


TABLES = (
    {"kind": "sd", "entries": [[1, {"kind": "ar"}]]},
    {"kind": "table", "foo": 1, "entries": [[1, {"kind": "ar"}]]},
    {"entries": [["1", {"kind": "ar"}]]},
    {"entries": [[1, {"kind": "table", "entries": [[1, {"kind": "ar"}]]}]]},
)
ADAPTIVES = tuple(
    running().to_dict() | {key: value} for key in ("times", "after_hit", "after_miss", "foo") for value in NO_OBJECTS
)

COUNTS = {
    "prompt_tokens": lambda v: parametric(prompt_tokens=v),
    "new_tokens": lambda v: parametric(new_tokens=v),
    "num_texts": lambda v: parametric(num_texts=v),
    "width": lambda v: table(keyed(v, ((0, 1.0),))),
    "context": lambda v: table({1: ((v, 1.0),)}),
    "rows of a batch": lambda v: table({1: ((0, 1.0),)}, batched=keyed(v, {1: ((0, 1.0),)})),
    "ceiling": lambda v: rate(ceiling=v),
    "minimum": lambda v: rate(minimum=v),
    "seed of a rate": lambda v: rate(seed=v),
    "seed of streams": Streams.of,
    "seed of replications": lambda v: replication_seeds(v, 3),
    "seed of a trace": lambda v: simulate(SSD, WORKLOAD, SYSTEM, v),
    "seed of vectorized": lambda v: predict(SSD, WORKLOAD, SYSTEM, engine="vectorized", seed=v, ceiling=2),
    "seed of des": lambda v: predict(SSD, WORKLOAD, SYSTEM, engine="des", seed=v, ceiling=2),
    "speculation_length": Speculative,
    "speculation_length of SSD": lambda v: SpeculativeSpeculative(v, (1,) * 3, (1,) * 3),
    "fan-out": lambda v: SpeculativeSpeculative(1, (1, v), (1, 1)),
    "start of a table's entry": lambda v: PolicyTable(((1, Speculative(1)), (v, Speculative(2)))),
    **{
        name: (lambda v, name=name: Placement(**{name: v}))
        for name in ("num_draft_devices", "num_targets", "distribution_bytes")
    },
    "max_new_tokens": lambda v: replace(WORKLOAD, max_new_tokens=v),
    "batch_size": lambda v: replace(WORKLOAD, batch_size=v),
    "token": lambda v: replace(WORKLOAD, prompts=((1, v),)),
    "stop token": lambda v: replace(WORKLOAD, stop_ids=(v,)),
    "entry of a grid": lambda v: running(speculation_lengths=(v,)),
    "budget of a grid": lambda v: HillClimbing((1,), (v,)),
    "interval": lambda v: running(interval=v),
    "switches_at_once": lambda v: running(switches_at_once=v),
    "rest": lambda v: HillClimbing((1,), (2,), rest=v),
    "concurrency": lambda v: ClosedLoop(v, 4),
    "num_requests": lambda v: ClosedLoop(1, v),
    "rows of a load": lambda v: OpenLoop(Poisson(1.0), v, 4),
    "prompt of a shape": lambda v: ClosedLoop(1, 4, shapes=((v, 1),)) if v is not None else ClosedLoop(None, 1),
    "tokens of a traced arrival": lambda v: OpenLoop(((0.0, 0, v if v is not None else -1),), 4),
    "seed of a load": lambda v: list(ClosedLoop(1, 2).requests(Replay(RECORD, WORKLOAD), v)),
}
AMOUNTS = {
    "prefactor": lambda v: HitCurve(v, 1.0),
    "exponent": lambda v: HitCurve(1.0, v),
    "sampling_temperature": lambda v: parametric(sampling_temperature=v),
    "acceptance": lambda v: parametric(acceptance=(0.5, v)),
    "cumulative": lambda v: conditional_from_cumulative((1.0, v)),
    "time of a verification": lambda v: table({1: ((0, v),)}),
    "time of a glue pass": lambda v: table({1: ((0, v),)}, operation=GLUE),
    "residual": lambda v: table({1: ((0, 1.0),)}, (1.0, v)),
    "residual in situ": lambda v: replace(SYSTEM, in_situ={"ar": {KEY: (1.0, v)}}),
    "host_s": lambda v: replace(SYSTEM, host_s=SYSTEM.host_s | {HostTerm.HIT: v}),
    "relative_half_width": lambda v: rate(relative_half_width=v),
    "transfer_latency_s": lambda v: Placement(transfer_latency_s=v),
    "target_kv_bytes_per_token": lambda v: Memory(target_kv_bytes_per_token=v),
    "temperature": lambda v: replace(WORKLOAD, temperature=v),
    "downweight": lambda v: replace(SSD, downweight=v),
    "base_s": AffineTime,
    "host_s of times": lambda v: replace(TIMES, host_s=v),
    "margin": lambda v: running(margin=v),
    "acceptance of a controller": lambda v: running(acceptance=v),
    "arrival": lambda v: OpenLoop(((v,),), 4),
    "rate": lambda v: Poisson(v),
}
OTHERS = {
    "contention": (lambda v: replace(SYSTEM, contention=SYSTEM.contention | {Lane.DRAFT: v}), (*NO_AMOUNTS, 0.9)),
    "probability": (lambda v: parametric(acceptance=(v,)), (1.5,)),
    "no width": (lambda v: rate(relative_half_width=v), (0,)),
    "rows of one": (lambda v: table({1: ((0, 1.0),)}, batched={v: {1: ((0, 1.0),)}}), (0, 1)),
    "width of no token": (lambda v: table({v: ((0, 1.0),)}), (0,)),
    "sizes": (lambda v: parametric(new_tokens=v, num_texts=v), (0,)),
    "acceptances": (lambda v: parametric(acceptance=v), (*NO_LISTS, ())),
    "curves after a hit": (
        lambda v: parametric(after_hit=v),
        (*NO_LISTS, (), (3,), ({"prefactor": 1, "exponent": 1},)),
    ),
    "curves after a miss": (lambda v: parametric(after_miss=v), (*NO_LISTS, (), (None,))),
    "cumulatives": (conditional_from_cumulative, NO_LISTS),
    "knots": (table, (*NO_OBJECTS, {1: ()}, {1: 3}, {1: "x"}, {1: (3,)}, {1: ((0,),)}, {1: ((0, 1.0, 2.0),)})),
    "batched": (lambda v: table({1: ((0, 1.0),)}, batched=v), ([1], 3, "x", {2: {}}, {2: 3}, {2: {1: ()}})),
    "descending contexts": (lambda v: in_order(5, v), (0, 4)),
    "doubled contexts": (lambda v: in_order(5, v), (5,)),
    "residuals": (lambda v: table({1: ((0, 1.0),)}, v), (*NO_LISTS, ())),
    "a verification of no time": (lambda v: table({1: ((0, v),)}), (0, 0.0)),
    "residuals of no time": (lambda v: table({1: ((0, 1.0),)}, v), ((0.0,), (0, 0))),
    "residuals of no time in situ": (lambda v: replace(SYSTEM, in_situ={"sd": {KEY: v}}), ((0.0,), (), "x", 3)),
    "operation": (lambda v: table({1: ((0, 1.0),)}, operation=v), (3, "flurb", None)),
    "latencies": (LatencyModel, (*NO_OBJECTS, {KEY: 3}, {3: table({1: ((0, 1.0),)})})),
    "another operation": (LatencyModel, ({(Lane.DRAFT, GLUE): table({1: ((0, 1.0),)})},)),
    "contention, incomplete": (lambda v: replace(SYSTEM, contention=v), (*NO_OBJECTS, {Lane.DRAFT: 1.0})),
    "host_s, incomplete": (lambda v: replace(SYSTEM, host_s=v), (*NO_OBJECTS, {HostTerm.HIT: 0.0})),
    "in_situ": (lambda v: replace(SYSTEM, in_situ=v), (*NO_MAPPINGS, {"SSD": {}}, {"ar": 3})),
    "in_situ, unknown operation": (
        lambda v: replace(SYSTEM, in_situ={"ssd": {v: (1.0,)}}),
        ((Lane.TARGET, Operation.PREFILL), "x", 3),
    ),
    "overlaps": (lambda v: replace(SYSTEM, overlaps=v), (0, 1, "true", None)),
    "identity": (lambda v: replace(SYSTEM, identity=v), NO_MAPPINGS),
    **{
        name: (lambda v, name=name: replace(SYSTEM, **{name: v}), NO_OBJECTS)
        for name in ("latency", "agreement", "placement", "memory")
    },
    "downweight": (lambda v: replace(SSD, downweight=v), (0, 1.5)),
    "memory of a controller": (lambda v: running(memory=v), (*NO_AMOUNTS, 0.5)),
    "fan-outs": (lambda v: SpeculativeSpeculative(2, v, (1, 1, 1)), (*NO_LISTS, ())),
    "policy of a table": (lambda v: PolicyTable(((1, v),)), (*NO_OBJECTS, PolicyTable(((1, SSD),)), running())),
    "entries of a table": (PolicyTable, (*NO_LISTS, (), [1], ((1,),), ((1, SSD, SSD),), "ab")),
    "policy, in words": (policy_from_dict, (*NO_OBJECTS, {"kind": []}, {"kind": {}}, {"kind": "ar", 3: 4})),
    "table, in words": (
        policy_table_from_dict,
        (
            *NO_OBJECTS,
            {"entries": 3},
            {"entries": [3]},
            {"entries": [[1]]},
            {"entries": [[1, 3]]},
            {"kind": "sd"},
            *TABLES,
        ),
    ),
    "adaptive, in words": (
        adaptive_from_dict,
        (*NO_OBJECTS, {"kind": []}, {"kind": "hill_climbing"}, *ADAPTIVES),
    ),
    "grid": (lambda v: running(budgets=v), (*NO_LISTS, ())),
    "no candidate": (lambda v: running(most_candidates=v), (0, "3", True, 1.5)),
    **{
        f"{name} of a controller": (lambda v, name=name: running(**{name: v}), NO_OBJECTS)
        for name in ("times", "after_hit", "after_miss")
    },
    "expected time": (lambda v: replace(TIMES, verify=v), NO_OBJECTS),
    "placement, in words": (Placement.from_dict, (*NO_MAPPINGS, {"foo": 1}, {"num_targets": None}, {"split": []})),
    "memory, in words": (Memory.from_dict, (*NO_MAPPINGS, {"foo": 1}, {"target_kv_bytes_per_token": None})),
    "bandwidth": (lambda v: Placement(transfer_bytes_per_s=v), (*NO_NUMBERS, 0, -1)),
    "room": (lambda v: Memory(draft_bytes=v), (*NO_NUMBERS, 0, -1)),
    "shapes": (lambda v: ClosedLoop(1, 4, shapes=v), (*NO_LISTS[:-2], (3,), ((0, 1, 2),), ((0, 0),))),
    "arrivals": (lambda v: OpenLoop(v, 4), (*NO_LISTS, (), (3,), ((),), ((0, 0, 1, 1),))),
    "unequal numbers of replications": (lambda v: rate_of([1.0, 2.0], v), ([1.0], [1.0] * 3)),
}


@pytest.mark.parametrize("build", COUNTS.values(), ids=COUNTS)
def test_counts_are_integers(build):
    build(2)
    build(np.int64(2))
    for value in NO_COUNTS:
        with pytest.raises(BadInput):
            build(value)


@pytest.mark.parametrize("build", AMOUNTS.values(), ids=AMOUNTS)
def test_amounts_are_finite_numbers(build):
    for valid in (0.5, np.float64(0.5), np.float32(0.5), 1):
        build(valid)
    for value in NO_AMOUNTS:
        with pytest.raises(BadInput):
            build(value)


@pytest.mark.parametrize(("build", "values"), OTHERS.values(), ids=OTHERS)
def test_what_is_of_another_kind_is_refused(build, values):
    for value in values:
        with pytest.raises(BadInput):
            build(value)


def test_numbers_of_numpy_become_plain_ones():
    """So that what is built of them can be written as JSON."""
    knots = {np.int64(1): ((np.int64(0), np.float32(1.5)), (np.int64(64), np.float64(2.0)))}
    model = LatencyModel({KEY: table(knots, np.array([0.5, 1.5]), {np.int64(2): knots})})
    assert LatencyModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    agreement = parametric(num_texts=np.int64(2), acceptance=np.array([0.5, 0.25], dtype=np.float32))
    assert ParametricAgreement.from_dict(json.loads(json.dumps(agreement.to_dict()))) == agreement
    assert type(require_count("n", np.int64(3), 0)) is int
    assert type(require_number("x", 3, 0)) is int


def test_ranges_are_told():
    with pytest.raises(BadInput, match=r"^x: must be a finite number > 0, got 0$"):
        require_number("x", 0, 0, above=True)
    with pytest.raises(BadInput, match=r"^x: must be a number >= 0 and <= 1, got 2$"):
        require_number("x", 2, 0, 1)
    assert require_number("x", math.inf, 0, math.inf) == math.inf
    with pytest.raises(BadInput, match=r"^x: must be a finite number, got 1000"):
        require_number("x", 10**400)


def test_a_seed_is_named():
    with pytest.raises(BadInput, match=r"^seed: must be an integer >= 0, got -1"):
        simulate(SSD, WORKLOAD, SYSTEM, -1)


# ---------------------------------------------------------------------------------------------------------------- files

KNOTS = ("latency", "target.verify", "knots_num_tokens_context_s")
BATCHED = ("latency", "target.verify", "batched_knots_rows_num_tokens_context_s")
PARAMETRIC = ("agreement", "parametric")
IN_FILES = [
    *(((name,), NO_OBJECTS) for name in ("contention", "host_s", "latency", "agreement")),
    *(((name,), NO_MAPPINGS) for name in ("identity", "in_situ_residual_ratios", "placement", "memory")),
    (("schema",), (*NO_OBJECTS, 0, 2, 1.0)),
    (("overlaps",), (3, 0, 1, "x", None, [1], {})),
    (("contention", "target"), (*IN_JSON, 0.5, math.inf)),
    (("host_s", "hit"), (*IN_JSON, -1, math.inf)),
    *((key, NO_OBJECTS) for key in (KNOTS[:2], KNOTS, (*KNOTS, 0), BATCHED, (*BATCHED, 0))),
    ((*KNOTS, 0, 0), (*IN_JSON, 1.5, 0, -1, math.inf)),
    ((*KNOTS, 0, 1), (*IN_JSON, 1.5, -1, math.inf, 4096)),
    ((*KNOTS, 0, 2), (*IN_JSON, 0, -1, math.inf)),
    ((*BATCHED, 0, 0), (*IN_JSON, 2.7, 1, 0, math.inf)),
    ((*BATCHED, 0, 3), (*IN_JSON, 0, -1, math.inf)),
    ((*KNOTS[:2], "residual_ratios"), (3, "x", True, None, {}, [], [math.nan], ["1"], [-1], [0])),
    (("in_situ_residual_ratios", "ssd"), (*NO_MAPPINGS, {"target.prefill": [1]}, {"verify": [1]}, {"a.b": [1]})),
    (("in_situ_residual_ratios", "SSD"), ({},)),
    (("in_situ_residual_ratios", "sd"), tuple({"target.verify": v} for v in (3, "x", [], [math.nan], [0], ["1"]))),
    (("latency", "draft.flurb"), ({},)),
    *(((*PARAMETRIC, name), IN_JSON) for name in ("prompt_tokens", "new_tokens", "num_texts")),
    ((*PARAMETRIC, "num_texts"), (1.5, 0, math.inf)),
    ((*PARAMETRIC, "sampling_temperature"), (*IN_JSON, -1, math.inf)),
    ((*PARAMETRIC, "acceptance"), (3, "x", True, None, {}, [], [2], ["0.5"])),
    (
        (*PARAMETRIC, "after_hit"),
        (3, None, {}, [], [3], [{}], [{"prefactor": 1}], [{"prefactor": math.nan, "exponent": 1}]),
    ),
    ((*PARAMETRIC, "after_miss", 0, "exponent"), (*IN_JSON, -1, math.inf)),
    *(
        ((*place, "foo"), (1,))
        for place in (
            (),
            ("agreement",),
            PARAMETRIC,
            (*PARAMETRIC, "after_hit", 0),
            ("contention",),
            ("host_s",),
            ("latency",),
            KNOTS[:2],
            ("in_situ_residual_ratios",),
            ("placement",),
            ("memory",),
        )
    ),
]


def written(path) -> dict:
    replace(batched(SYSTEM, 0.001), agreement=parametric(num_texts=2), in_situ={"ssd": {KEY: (0.9, 1.1)}}).write(path)
    return json.loads(path.read_text())


def changed(data: dict, keys: tuple, value: object) -> dict:
    data = copy.deepcopy(data)
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return data


@pytest.mark.parametrize(("keys", "values"), IN_FILES, ids=lambda entry: ".".join(map(str, entry))[:60])
def test_a_wrong_entry_of_a_system_file_is_named(tmp_path, keys, values):
    path = tmp_path / "system.json"
    data = written(path)
    System.read(path)
    named = [key for key in keys if isinstance(key, str)][-1]
    for value in values:
        path.write_text(json.dumps(changed(data, keys, value)))
        with pytest.raises(BadInput, match=r"system\.json: ") as caught:
            System.read(path)
        assert named in str(caught.value), value


def test_numbers_beyond_floats_and_names_that_are_none(tmp_path):
    path = tmp_path / "system.json"
    text = json.dumps(written(path))
    for old, new in (("[1, 0, ", "[1e400, 0, "), ("[1, 0, ", "[1, 1e400, "), ("[1, 0, ", f"[1, 0, {10**400}, ")):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(BadInput, match=r"system\.json: latency\.target\.verify"):
            System.read(path)
    for name in (3, None, ["x"], "", "nowhere.parquet", "/"):
        path.write_text(json.dumps(changed(json.loads(text), ("agreement",), {"file": name, "sha256": ""})))
        with pytest.raises(BadInput):
            System.read(path)


def test_files_without_the_later_keys_are_read(tmp_path):
    path = tmp_path / "system.json"
    replace(SYSTEM, agreement=parametric()).write(path)
    data = json.loads(path.read_text())
    for key in ("placement", "memory"):
        del data[key]
    for entry in data["latency"].values():
        del entry[BATCHED[-1]]
    for key in ("num_texts", "sampling_temperature"):
        del data["agreement"]["parametric"][key]
    path.write_text(json.dumps(data))
    read = System.read(path)
    assert (read.placement, read.memory, read.agreement) == (Placement(), Memory(), parametric())
    assert read.latency == SYSTEM.latency


# -------------------------------------------------------------------------------------------------------- engines, laws


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_no_policy_is_refused(engine):
    for value in (*NO_OBJECTS, SSD.to_dict(), SpeculativeSpeculative):
        with pytest.raises(BadInput, match="policy"):
            predict(value, WORKLOAD, SYSTEM, engine=engine)
        with pytest.raises(BadInput, match="policy"):
            simulate(value, WORKLOAD, SYSTEM)


def test_totals_that_are_none_are_no_rate():
    """A certain rate of 0 would be told of them."""
    for tokens, seconds in (
        ([1.0, math.nan], [1.0, 1.0]),
        ([1.0, 1.0], [1.0, math.nan]),
        ([1.0, 1.0], [1.0, math.inf]),
    ):
        with pytest.raises(BadInput, match="of a replication: must be a finite number"):
            rate_of(tokens, seconds)


@pytest.mark.parametrize("downweight", [1.0, 0.5, 1e-9, 1e-17, 1e-300])
def test_downweighting_all_of_q_changes_nothing(downweight):
    """Where the candidates hold all of q, and all are down-weighted: also as C goes to 0."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(7), size=200), rng.dirichlet(np.ones(7), size=200)
    overlap = np.minimum(p, q).sum(1)
    plain, proposal = plain_proposal(p, q, overlap), downweighted_proposal(p, q, overlap, 7, downweight)
    assert proposal.top == pytest.approx(plain.top, rel=1e-6)
    assert proposal.overlap_low == pytest.approx(overlap, rel=1e-6)
    assert downweighted_mass(q, 7, downweight) == pytest.approx(np.full(200, downweight), rel=1e-6)
