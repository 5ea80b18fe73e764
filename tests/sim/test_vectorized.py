"""The vectorised engine: round by round against plain Python, mean times against the exact engine; stopping rules."""

from __future__ import annotations

import tracemalloc
import warnings
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import vectorized
from sim.errors import BadInput
from sim.latency import LatencyModel, OperationLatency
from sim.parametric import HitCurve, ParametricAgreement
from sim.placement import Placement, Split
from sim.policy import Autoregressive, Fallback, LateBuild, PolicyTable, Speculative, SpeculativeSpeculative
from sim.recursion import expectations
from sim.replay import Replay
from sim.replications import CeilingReached, rate_of, until
from sim.round_law import RoundLaw
from sim.round_times import BatchTimes, SoloTimes
from sim.streams import Streams, outcome_uniforms, replication_seeds
from sim.system import HostTerm, System, host_term
from sim.trace import Lane, Operation, Source
from tests.sim.plain_rounds import plain_rounds
from tests.sim.toy import cut_at, markov, record_of, scripted_record, system_of, workload_of

VERIFY, STEP = (Lane.TARGET, Operation.VERIFY), (Lane.DRAFT, Operation.DRAFT_STEP)
GLUE, TREE = (Lane.DRAFT, Operation.GLUE), (Lane.DRAFT, Operation.TREE_STEP)


def ssd(K: int, F: int, fallback: Fallback = Fallback.DRAFT, **options) -> SpeculativeSpeculative:
    after_miss = (F,) * (K + 1) if fallback is not Fallback.NONE else (F,)
    return SpeculativeSpeculative(K, (F,) * (K + 1), after_miss, fallback, **options)


def table(operation: Operation, rng: np.random.Generator, residuals: tuple[float, ...]) -> OperationLatency:
    """Locations that bend with tokens, context and rows."""

    def knots(scale: float) -> dict[int, tuple[tuple[int, float], ...]]:
        times = scale * np.cumsum(rng.uniform(0.001, 0.004, size=(4, 4)), axis=0)
        times = np.cumsum(times * [1, 0.1, 0.2, 0.1], axis=1)
        contexts = (0, 9, 17, 4096)
        return {
            tokens: tuple(zip(contexts, row, strict=True))
            for tokens, row in zip((1, 3, 8, 64), times.tolist(), strict=True)
        }

    return OperationLatency(operation, knots(1.0), residuals, {2: knots(1.3), 5: knots(1.5), 8: knots(2.0)})


def random_system(
    agreement, seed: int, *, spread: float = 0.0, placement: Placement | None = None, **options
) -> System:
    """Everything costs something, and each cost differs; residuals of three values, or none."""
    rng = np.random.default_rng(seed)
    residuals = (1.0,) if spread == 0 else (1 - spread, 1.0, 1 + 2 * spread)
    operations = {key: table(key[1], rng, residuals) for key in (VERIFY, STEP, GLUE, TREE)}
    return System(
        latency=LatencyModel(operations),
        contention={Lane.TARGET: 1 + rng.uniform(0, 0.5), Lane.DRAFT: 1 + rng.uniform(0, 0.5)},
        host_s={term: rng.uniform(0, 0.001) for term in HostTerm},
        agreement=agreement,
        identity={"pair": "toy"},
        placement=placement or Placement(),
        **options,
    )


# ------------------------------------------------------------------------------------------------------ plain Python


@dataclass
class Decoded:
    """What the plain decoder saw: totals by prompt, and seconds of each batch."""

    num_rounds: np.ndarray
    num_lookups: np.ndarray  # (2, num_prompts): after a hit, after a miss
    num_hits: np.ndarray
    batch_s: list[float] = field(default_factory=list)


class PlainDecoder:
    """One batch after another, one row after another, with a clock; durations are the locations, without noise."""

    def __init__(self, policy, workload, system: System, seed: int) -> None:
        self.policy, self.system = policy, system
        self.is_ssd = isinstance(policy, SpeculativeSpeculative)
        self.K = policy.speculation_length
        self.temperature = workload.temperature
        self.replay = Replay(system.agreement, workload)
        uniforms = outcome_uniforms(self.replay, Streams.of(seed).outcomes)
        sources = (Source.HIT, Source.MISS) if self.is_ssd else (Source.SYNCHRONOUS,)
        self.laws = {source: RoundLaw(self.replay, policy.drafting(source)) for source in sources}
        self.sampled = {source: plain_rounds(law, *uniforms) for source, law in self.laws.items()}
        num_prompts = self.replay.num_prompts
        self.seen = Decoded(np.zeros(num_prompts), np.zeros((2, num_prompts)), np.zeros((2, num_prompts)))

    def run(self, batch_size: int) -> Decoded:
        for start in range(0, self.replay.num_prompts, batch_size):
            prompts = range(start, min(start + batch_size, self.replay.num_prompts))
            self.seen.batch_s.append(self.decode([p for p in prompts if self.replay.lengths[p] > 1]))
        return self.seen

    def decode(self, prompts: list[int]) -> float:
        first = Source.MISS if self.is_ssd else Source.SYNCHRONOUS
        rows = {prompt: (1, first) for prompt in prompts}
        self.all_accepted: set[int] = set()
        self.now, self.build_ends, is_first = 0.0, [], True
        while rows:
            self.spend(rows, is_first=is_first)
            rows, is_first = self.advance(rows), False
        return self.now

    def advance(self, rows):
        """The rows of the next round."""
        following = {}
        self.all_accepted = set()
        for prompt, (emitted, source) in rows.items():
            self.seen.num_rounds[prompt] += 1
            accepted = int(self.sampled[source].num_accepted[prompt, emitted])
            if emitted + accepted + 1 >= self.replay.lengths[prompt]:
                continue
            following[prompt] = (emitted + accepted + 1, source)
            if 0 < accepted == self.drafted(prompt, emitted, source):
                self.all_accepted.add(prompt)
            if self.is_ssd:
                is_hit = bool(self.sampled[source].is_prepared[prompt, emitted])
                side = 0 if source is Source.HIT else 1
                self.seen.num_lookups[side, prompt] += 1
                self.seen.num_hits[side, prompt] += is_hit
                following[prompt] = (following[prompt][0], Source.HIT if is_hit else Source.MISS)
        anew = self.is_ssd and self.policy.fallback is Fallback.DRAFT
        if anew and any(source is Source.MISS for _, source in following.values()):
            return {prompt: (emitted, Source.MISS) for prompt, (emitted, _) in following.items()}
        return following

    def drafted(self, prompt, emitted, source) -> int:
        return int(self.laws[source].num_drafted[prompt, emitted])

    def branches(self, prompt, emitted, source) -> int:
        if emitted + 1 == self.replay.cap:
            return 0
        return sum(self.laws[source].drafting.fan_out[: self.drafted(prompt, emitted, source) + 1])

    def location_s(self, key, tokens, context, rows) -> float:
        return float(self.system.latency[key].location_s(tokens, context, rows))

    def spend(self, rows, *, is_first: bool) -> None:
        """Pass the time of a round, up to the outcomes at the target."""
        placement, overlaps = self.system.placement, self.system.overlaps
        if self.K and not is_first:
            self.now += placement.outcome_s(len(rows))
        known = self.now
        is_needed = any(source is Source.HIT for _, source in rows.values())
        for ends in self.build_ends if overlaps else []:
            wait = not self.is_ssd or self.policy.on_late_build is LateBuild.WAIT or is_needed
            self.now = max(self.now, ends[-1] if wait else next((end for end in ends if end >= known), known))
        self.draft_in_the_open(rows)
        terms = {host_term(self.policy, source) for _, source in rows.values()}
        missed = terms & {HostTerm.MISS, HostTerm.UNDRAFTED_MISS}
        self.now += self.system.host_s[(missed or terms).pop()]
        self.build_ends = self.build(rows)
        if not overlaps:
            self.now = max([self.now, *(ends[-1] for ends in self.build_ends)])
        if self.K:
            self.now += placement.message_s(sum(self.speculation_bytes(*row) for row in rows.items()))
        tokens = np.mean([self.drafted(prompt, *row) + 1 for prompt, row in rows.items()])
        context = np.mean([self.context(prompt, row) for prompt, row in rows.items()])
        slowdown = self.system.slowdown(Lane.TARGET, beside=bool(self.build_ends))
        self.now += slowdown * self.location_s(VERIFY, tokens, context, len(rows))

    def context(self, prompt, row) -> int:
        return int(self.replay.prompt_length[prompt]) + row[0] - 1

    def speculation_bytes(self, prompt, row) -> float:
        free = (Fallback.NGRAM, Fallback.FILLER, Fallback.NONE)
        from_draft = not self.is_ssd or row[1] is Source.HIT or self.policy.fallback not in free
        sampled = self.temperature > 0 and from_draft
        return self.system.placement.speculation_bytes(self.drafted(prompt, *row), sampled=sampled)

    def draft_in_the_open(self, rows) -> None:
        if self.is_ssd:
            if self.policy.fallback not in (Fallback.DRAFT, Fallback.DRAFT_MISSING):
                return
            rows = {prompt: row for prompt, row in rows.items() if row[1] is Source.MISS}
        took = np.zeros(self.system.placement.num_draft_devices)
        for step in range(self.K):
            part = {prompt: row for prompt, row in rows.items() if self.drafted(prompt, *row) > step}
            if not part:
                break
            unfed = [2 if not self.is_ssd and step == 0 and prompt in self.all_accepted else 1 for prompt in part]
            contexts = [self.context(*row) + step + 1 - u for row, u in zip(part.items(), unfed, strict=True)]
            for device, share in enumerate(self.system.placement.shares_of_rows(len(part))):
                took[device] += self.location_s(STEP, np.mean(unfed), np.mean(contexts), share)
        self.now += took.max()

    def build(self, rows) -> list[list[float]]:
        """Ends of the operations of every draft device."""
        building = [(prompt, row) for prompt, row in rows.items() if self.branches(prompt, *row)]
        if not building:
            return []
        tokens = np.mean([self.drafted(prompt, *row) + 1 for prompt, row in building])
        context = np.mean([self.context(*each) for each in building])
        branches = np.mean([self.branches(prompt, *row) for prompt, row in building])
        slowdown = self.system.slowdown(Lane.DRAFT, beside=True)
        devices = []
        for share, of_device in self.system.placement.shares_of_build(branches, len(building)):
            ends = [self.now + slowdown * self.location_s(GLUE, tokens, context, share)]
            for step in range(self.K):
                slots = context + tokens + of_device * step
                ends.append(ends[-1] + slowdown * self.location_s(TREE, of_device, slots, share))
            devices.append(ends)
        return devices


@st.composite
def policies(draw, fallbacks=tuple(Fallback), downweights=(1.0, 0.5)):
    K = draw(st.integers(1, 4))
    fallback = draw(st.sampled_from(fallbacks))
    fan_out = st.integers(0, 3)
    after_hit = tuple(draw(fan_out) for _ in range(K + 1))
    after_miss = tuple(draw(fan_out) for _ in range(1 if fallback is Fallback.NONE else K + 1))
    options = {"downweight": draw(st.sampled_from(downweights)), "on_late_build": draw(st.sampled_from(LateBuild))}
    speculative = SpeculativeSpeculative(K, after_hit, after_miss, fallback, **options)
    return draw(st.sampled_from([speculative, speculative, speculative, Speculative(K), Autoregressive()]))


@st.composite
def placements(draw, devices=(1, 2, 3)):
    return Placement(
        num_draft_devices=draw(st.sampled_from(devices)),
        split=draw(st.sampled_from(Split)),
        transfer_latency_s=draw(st.sampled_from((0.0, 0.0003))),
        transfer_bytes_per_s=draw(st.sampled_from((float("inf"), 1e5))),
        distribution_bytes=20,
    )


def varied(record):
    """The record with prompts of different lengths."""
    extra = np.arange(record.num_prompts)
    tokens = tuple((*row, *(1,) * index) for index, row in enumerate(record.prompt_tokens))
    return replace(record, prompt_length=record.prompt_length + extra, prompt_tokens=tokens)


@st.composite
def records(draw):
    record = record_of(*markov(draw(st.integers(0, 50))), num_prompts=7, length=draw(st.integers(1, 18)), seed=5)
    return varied(cut_at(record, 3) if draw(st.booleans()) else record)


def assert_same(totals, plain: list[Decoded], batch_size: int) -> None:
    """Equal rounds, look-ups and hits of every prompt, equal times of every batch up to rounding."""
    for name in ("num_rounds", "num_lookups", "num_hits"):
        expected = np.mean([getattr(decoded, name) for decoded in plain], axis=0)
        np.testing.assert_allclose(getattr(totals, name), expected, rtol=1e-12)
    num_prompts = len(totals.seconds)
    batch_s = np.mean([decoded.batch_s for decoded in plain], axis=0)
    sizes = np.minimum(batch_size, num_prompts - np.arange(0, num_prompts, batch_size))
    np.testing.assert_allclose(totals.seconds, np.repeat(batch_s / sizes, sizes), rtol=1e-9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    policy=policies(),
    record=records(),
    placement=placements(),
    batch_size=st.integers(1, 8),
    cap=st.integers(0, 18),
    seed=st.integers(0, 1000),
    overlaps=st.booleans(),
)
def test_rounds_and_times_are_those_of_plain_python(policy, record, placement, batch_size, cap, seed, overlaps):
    """Any policy, any batch, any placement, without noise: two seeds at once against one after another."""
    system = random_system(record, seed, placement=placement, overlaps=overlaps)
    workload = replace(workload_of(record, min(cap, record.max_new_tokens)), batch_size=batch_size)
    totals = vectorized.replicate(policy, workload, system, [seed, seed + 1])
    plain = [PlainDecoder(policy, workload, system, s).run(batch_size) for s in (seed, seed + 1)]
    assert_same(totals, plain, batch_size)


curves = st.builds(HitCurve, prefactor=st.floats(0, 1), exponent=st.floats(0, 2))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    policy=policies((Fallback.DRAFT, Fallback.DRAFT_MISSING, Fallback.NONE), (1.0,)),
    acceptance=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    after_hit=st.lists(curves, min_size=1, max_size=3),
    after_miss=st.lists(curves, min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_rounds_of_a_parametric_agreement(policy, acceptance, after_hit, after_miss, seed):
    """Acceptance depends on the place in the speculation, hits on the accepted count and the source."""
    agreement = ParametricAgreement(4, 40, tuple(acceptance), tuple(after_hit), tuple(after_miss))
    system, workload = random_system(agreement, seed), workload_of(agreement)
    totals = vectorized.replicate(policy, workload, system, [seed])
    assert_same(totals, [PlainDecoder(policy, workload, system, seed).run(1)], 1)


def test_a_step_table_too_wide_for_bytes():
    """K = 130 does not fit the smallest counts."""
    record = scripted_record(0.995, num_prompts=2, length=400)
    system = system_of(record)
    verify = system.latency[VERIFY]
    wide = replace(verify, knots={1: verify.knots[1], 256: verify.knots[64]})
    system = replace(system, latency=LatencyModel({**system.latency.operations, VERIFY: wide}))
    policy, workload = ssd(130, 0), workload_of(record)
    totals = vectorized.replicate(policy, workload, system, [3])
    assert_same(totals, [PlainDecoder(policy, workload, system, 3).run(1)], 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(policy=policies(), record=records(), batch_size=st.integers(1, 5), seed=st.integers(0, 1000))
def test_lockstep_leaves_the_rounds_of_a_row_alone(policy, record, batch_size, seed):
    """Unless a miss of one row makes the whole batch be drafted anew."""
    system, workload = random_system(record, seed), workload_of(record)
    alone = vectorized.replicate(policy, workload, system, [seed])
    together = vectorized.replicate(policy, replace(workload, batch_size=batch_size), system, [seed])
    if getattr(policy, "fallback", None) is not Fallback.DRAFT:
        for name in ("num_rounds", "num_lookups", "num_hits"):
            np.testing.assert_array_equal(getattr(together, name), getattr(alone, name))


# ------------------------------------------------------------------------------------------------------ mean times


def seconds_of(policy, workload, system, seeds) -> np.ndarray:
    """Of all prompts together, by replication."""
    return vectorized.Replications(policy, workload, system).add(seeds)[1]


def z_of(seconds: np.ndarray, expected_s: float) -> float:
    """t statistic of the mean; 0 where there is no difference but rounding."""
    difference = float(np.mean(seconds)) - expected_s
    if abs(difference) <= 1e-9 * expected_s:
        return 0.0
    return difference / (np.std(seconds, ddof=1) / np.sqrt(len(seconds)))


def straight(system: System) -> System:
    """Without bends over the context, where the exact engine interpolates."""

    def line(knots):
        (_, at_0), (context, at_context) = knots[:2]
        return ((0, at_0), (100 * context, at_0 + 100 * (at_context - at_0)))

    operations = {
        key: replace(table, knots={tokens: line(knots) for tokens, knots in table.knots.items()})
        for key, table in system.latency.operations.items()
    }
    return replace(system, latency=LatencyModel(operations))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(policy=policies(), record=records(), placement=placements(devices=(1,)), seed=st.integers(0, 1000))
def test_mean_times_are_those_of_the_exact_engine(policy, record, placement, seed):
    """60 comparisons of a t statistic with 199 degrees of freedom at 5: a false alarm has p < 1e-4 over all."""
    system = straight(random_system(record, seed, spread=0.3, placement=placement))
    workload = workload_of(record)
    exact = expectations([policy], workload, system)[0].seconds.sum()
    assert abs(z_of(seconds_of(policy, workload, system, replication_seeds(seed, 200)), exact)) < 5


@settings(max_examples=25, deadline=None, derandomize=True)
@given(policy=policies(), record=records(), placement=placements(), seed=st.integers(0, 1000))
def test_several_draft_devices_and_the_code_for_batches(policy, record, placement, seed):
    """Sums drawn at once against operation by operation, on other seeds; 25 comparisons of the difference of two means
    over 200 seeds each at 5: p < 1e-4 over all."""
    policy = replace(policy, on_late_build=LateBuild.WAIT) if isinstance(policy, SpeculativeSpeculative) else policy
    system, workload = random_system(record, seed, spread=0.3, placement=placement), workload_of(record)
    runs = []
    for times, first in ((SoloTimes, 0), (BatchTimes, 200)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vectorized, "SoloTimes", times)
            runs.append(seconds_of(policy, workload, system, replication_seeds(seed, 200, first=first)))
    difference = np.mean(runs[0]) - np.mean(runs[1])
    error = np.sqrt(sum(np.var(run, ddof=1) for run in runs) / 200)
    assert abs(difference) <= max(5 * error, 1e-9 * np.mean(runs[0]))


def test_doubt_of_a_record_with_few_candidates_is_handed_on():
    p, q = markov(3)
    record = record_of(p, q, num_prompts=6, length=20, seed=4, num_candidates=5)
    system, workload = system_of(record), workload_of(record)
    policy = ssd(2, 2, downweight=0.9)
    doubt = vectorized.replicate(policy, workload, system, [0]).doubt
    assert doubt == expectations([policy], workload, system)[0].doubt > 0
    assert vectorized.replicate(ssd(2, 2), workload, system, [0]).doubt == 0


def test_another_system_is_told_apart():
    """Negative control: a build 2 % slower than the exact engine was told is rejected by the same statistic."""
    record = record_of(*markov(3), num_prompts=12, length=40, seed=4)
    times = {"verify_s": 0.005, "glue_s": 0.002, "residuals": (0.8, 1.0, 1.2)}
    workload = workload_of(record)
    told = expectations([ssd(3, 2)], workload, system_of(record, tree_step_s=0.004, **times))[0].seconds.sum()
    slower = system_of(record, tree_step_s=0.00408, **times)
    assert z_of(seconds_of(ssd(3, 2), workload, slower, replication_seeds(1, 200)), told) > 5


@pytest.mark.parametrize("times", [SoloTimes, BatchTimes])
def test_law_of_the_later_of_verification_and_build(times, monkeypatch):
    """K = 1, every round a hit that accepts its token: verify 10 or 30, build 8 + 8, 8 + 24, 24 + 8 or 24 + 24, each
    equally likely: the later of both is 16, 30, 32 or 48 in 1, 2, 3 and 2 cases of 8; mean 33.5, mean square 1265.

    Mean and mean square over 2000 seeds of 100 waiting rounds as z statistics at 5: p < 2e-6 together.
    """
    monkeypatch.setattr(vectorized, "SoloTimes", times)
    later = [max(v, g + t) for v, g, t in product((10, 30), (8, 24), (8, 24))]
    record = scripted_record(1.0, num_prompts=1, length=2 + 2 * 101)
    system = system_of(record, verify_s=20.0, draft_step_s=0.0, glue_s=16.0, tree_step_s=16.0, residuals=(0.5, 1.5))
    tables = dict(system.latency.operations)
    tables[VERIFY] = replace(tables[VERIFY], residuals=(0.5, 1.5))
    system = replace(system, latency=LatencyModel(tables))
    seconds = seconds_of(ssd(1, 1), workload_of(record), system, replication_seeds(5, 2000))
    # 101 rounds that wait for the build, one that does not: it is the last, and its end is sure.
    num_waiting, mean, variance = 101, np.mean(later), np.var(later)
    expected_s = num_waiting * mean + 20
    expected_variance = num_waiting * variance + 100
    assert abs(seconds.mean() - expected_s) < 5 * np.sqrt(expected_variance / 2000)
    assert abs(seconds.var(ddof=1) / expected_variance - 1) < 5 * np.sqrt(2 / 1999)


# ---------------------------------------------------------------------------------------------------------- batches


def batched(system: System, per_row: float) -> System:
    """Each further row makes every operation longer by `per_row` times what one row takes."""
    operations = {}
    for key, table in system.latency.operations.items():
        of_rows = {
            rows: {
                tokens: tuple((context, (1 + per_row * (rows - 1)) * time_s) for context, time_s in knots)
                for tokens, knots in table.knots.items()
            }
            for rows in (2, 64)
        }
        operations[key] = replace(table, batched=of_rows)
    return replace(system, latency=LatencyModel(operations))


@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(3), ssd(3, 1), ssd(3, 1, on_late_build="abandon")])
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_equal_rows_behave_as_one(policy, acceptance):
    """Four rows of which each does what the others do take the time of one, so a quarter each, and the same rounds."""
    record = scripted_record(acceptance, num_prompts=4, length=30)
    system = batched(system_of(record, tree_step_s=0.005, host_s=0.001), 0.0)
    workload = workload_of(record)
    alone = vectorized.replicate(policy, workload, system, [1])
    together = vectorized.replicate(policy, replace(workload, batch_size=4), system, [1])
    np.testing.assert_allclose(together.seconds, alone.seconds / 4)
    np.testing.assert_array_equal(together.num_rounds, alone.num_rounds)


@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(3), ssd(3, 2), ssd(2, 1, Fallback.NONE)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_doubling_all_times_doubles_the_seconds(policy, batch_size):
    record = record_of(*markov(3), num_prompts=10, length=16, seed=4)
    workload = replace(workload_of(record), batch_size=batch_size)
    times = {"verify_s": 0.01, "draft_step_s": 0.002, "glue_s": 0.003, "tree_step_s": 0.004, "host_s": 0.001}
    options = {"residuals": (0.7, 1.0, 1.3)}
    systems = [
        batched(system_of(record, **options, **{name: f * value for name, value in times.items()}), 0.5) for f in (1, 2)
    ]
    once, twice = (vectorized.replicate(policy, workload, system, [1, 2]).seconds for system in systems)
    np.testing.assert_allclose(twice, 2 * once)


@pytest.mark.parametrize(("batch_size", "per_row"), [(1, 0.5), (4, 0.0), (4, 0.5)])
def test_whole_batch_fallback_costs_what_its_needless_rows_cost(batch_size, per_row):
    """Lists are the same after a hit and a miss, so the rounds are: what differs is how many rows are drafted for.

    Nothing where there is no other row; where a row more costs nothing, only what they draft more near the cap than
    the missing rows do.
    """
    record = record_of(*markov(3), num_prompts=16, length=40, seed=4)
    system = batched(system_of(record, draft_step_s=0.004), per_row)
    workload = replace(workload_of(record), batch_size=batch_size)
    fallbacks = (Fallback.DRAFT, Fallback.DRAFT_MISSING)
    whole, missing = (vectorized.replicate(ssd(3, 3, f), workload, system, range(20)) for f in fallbacks)
    ratio = missing.seconds.sum() / whole.seconds.sum()
    low, high = {(1, 0.5): (1, 1), (4, 0.0): (0.98, 1), (4, 0.5): (0, 0.95)}[batch_size, per_row]
    assert low <= ratio <= high


def test_throughput_of_a_batch_is_tokens_over_seconds():
    """Two batches of AR, 9 rounds of 10 ms x 1.5 each: 4 x 9 tokens in 270 ms; a last batch of one row at 10 ms."""
    record = scripted_record(0.0, num_prompts=5, length=10)
    system = batched(system_of(record, verify_s=0.010), 0.5)
    totals = vectorized.replicate(Autoregressive(), replace(workload_of(record), batch_size=2), system, [0])
    np.testing.assert_allclose(totals.seconds, [0.0675] * 4 + [0.09])
    np.testing.assert_array_equal(totals.num_rounds, [9] * 5)


# ------------------------------------------------------------------------------------------------------ determinism


@pytest.mark.parametrize(("num_prompts", "batch_size"), [(1, 1), (9, 1), (9, 3)])
@pytest.mark.parametrize("on_late_build", LateBuild)
def test_chunks_and_threads_change_nothing(num_prompts, batch_size, on_late_build, monkeypatch):
    """Bit for bit: texts of different lengths, so that seeds share blocks with others that end before or after."""
    record = record_of(*markov(8), num_prompts=num_prompts, length=80, seed=4)
    record = varied(cut_at(record, 2) if num_prompts > 1 else record)
    system = random_system(record, 1, spread=0.2)
    workload = replace(workload_of(record), batch_size=batch_size)
    policy, seeds = ssd(3, 2, on_late_build=on_late_build), replication_seeds(7, 23)
    runs = []
    for positions, threads in ((1 << 20, 1), (1 << 20, 2), (1, 2), (3 * 9 * 80, 1), (5 * 9 * 80, 3)):
        monkeypatch.setattr(vectorized, "CHUNK_POSITIONS", positions)
        monkeypatch.setattr(vectorized, "num_threads", lambda threads=threads: threads)
        runs.append(vectorized.replicate(policy, workload, system, seeds))
    for run in runs[1:]:
        for name in ("num_rounds", "seconds", "num_lookups", "num_hits"):
            np.testing.assert_array_equal(getattr(run, name), getattr(runs[0], name))


def test_memory_does_not_grow_with_the_number_of_seeds(monkeypatch):
    """Peak of traced allocations; outcomes of all seeds at once would take four times as much."""
    record = record_of(*markov(3), num_prompts=6, length=60, seed=4)
    policy, system, workload = ssd(3, 2), system_of(record, residuals=(0.9, 1.1)), workload_of(record)
    monkeypatch.setattr(vectorized, "CHUNK_POSITIONS", 40 * 6 * 60)
    monkeypatch.setattr(vectorized, "num_threads", lambda: 1)
    peaks = []
    for num_seeds in (100, 400):
        seeds = replication_seeds(1, num_seeds)
        tracemalloc.start()
        vectorized.replicate(policy, workload, system, seeds)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_one_seed_is_one_result_and_another_seed_another():
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system, workload = random_system(record, 1, spread=0.2), workload_of(record)
    first, again, other = (vectorized.replicate(ssd(3, 2), workload, system, [s]).seconds for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_run_of_many_seeds_is_the_mean_of_their_runs():
    record = record_of(*markov(3), num_prompts=6, length=20, seed=4)
    system, workload = random_system(record, 1, spread=0.2), workload_of(record)
    together = vectorized.replicate(ssd(3, 2), workload, system, range(8))
    alone = [vectorized.replicate(ssd(3, 2), workload, system, [seed]) for seed in range(8)]
    for name in ("num_rounds", "seconds", "num_lookups", "num_hits"):
        np.testing.assert_allclose(getattr(together, name), np.mean([getattr(run, name) for run in alone], axis=0))


# ------------------------------------------------------------------------------------------------------ what is refused


def test_what_only_the_event_simulation_knows_is_refused():
    record = scripted_record(0.5, num_prompts=2, length=8)
    system, workload = system_of(record), workload_of(record)
    with pytest.raises(BadInput, match="policy: must be one fixed policy for engine vectorized"):
        vectorized.replicate(PolicyTable(((1, Speculative(2)),)), workload, system, [0])
    with pytest.raises(BadInput, match=r"placement\.num_targets: must be 1 for engine vectorized.* got 2"):
        vectorized.replicate(Speculative(2), workload, replace(system, placement=Placement(num_targets=2)), [0])
    with pytest.raises(BadInput, match="seeds: must hold at least one"):
        vectorized.replicate(Speculative(2), workload, system, [])


@pytest.mark.parametrize("prompt_length", [4, 5000])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_what_the_profile_does_not_cover_is_refused(batch_size, prompt_length):
    """Rows that were not profiled, and contexts beyond the profiled ones, in a batch too."""
    record = scripted_record(0.5, num_prompts=2, length=8, prompt_length=prompt_length)
    system, workload = system_of(record), replace(workload_of(record), batch_size=batch_size)
    if prompt_length == 5000:
        with pytest.raises(BadInput, match=r"context must be in the profiled range 0\.\.4096, got 500\d"):
            vectorized.replicate(Speculative(2), workload, batched(system, 0.0), [0])
    elif batch_size == 2:
        with pytest.raises(BadInput, match=r"number of rows must be in the profiled range 1\.\.1, got 2"):
            vectorized.replicate(Speculative(2), workload, system, [0])


# ---------------------------------------------------------------------------------------------- replications until


def noisy(spread: float):
    record = record_of(*markov(3), num_prompts=4, length=24, seed=4)
    system = system_of(record, tree_step_s=0.003, residuals=(1 - spread, 1.0, 1 + spread))
    return ssd(3, 2), workload_of(record), system


def test_the_rate_is_known_to_two_percent():
    policy, workload, system = noisy(0.4)
    expectation, rate = vectorized.replicate_until(policy, workload, system, seed=3)
    assert rate.relative_half_width <= 0.02 and not rate.reached_ceiling
    same = vectorized.replicate(policy, workload, system, replication_seeds(3, rate.num_replications))
    np.testing.assert_allclose(expectation.seconds, same.seconds, rtol=1e-12)
    assert rate.tokens_per_s == pytest.approx(same.num_tokens.sum() / same.seconds.sum())
    _, finer = vectorized.replicate_until(policy, workload, system, seed=3, relative_half_width=0.005)
    assert finer.relative_half_width <= 0.005 and finer.num_replications > rate.num_replications


def test_a_ceiling_is_a_warning():
    policy, workload, system = noisy(0.4)
    with pytest.warns(CeilingReached, match="after 20 replications, the ceiling; 0.1% was asked for"):
        _, rate = vectorized.replicate_until(policy, workload, system, seed=3, relative_half_width=0.001, ceiling=20)
    assert rate.reached_ceiling and rate.num_replications == 20


def test_what_does_not_vary_stops_at_the_minimum():
    record = scripted_record(1.0, num_prompts=2, length=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, rate = vectorized.replicate_until(Speculative(2), workload_of(record), system_of(record), seed=3)
    assert rate.num_replications == 16 and rate.half_width == pytest.approx(0, abs=1e-9)


def gamma_runs(seeds) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds that vary, and go together: 100 tokens/s."""
    rngs = [np.random.default_rng(seed) for seed in seeds]
    tokens = np.array([rng.poisson(50) for rng in rngs], dtype=float)
    return tokens, tokens / 100 * np.array([rng.gamma(30, 1 / 30) for rng in rngs])


def test_intervals_cover_the_true_rate():
    """400 runs of the stopping rule: 95 % intervals, of which between 358 and 394 cover the truth.

    A binomial with p = .95 leaves that range with probability below 1e-3 (.0006 below, .0001 above).
    """
    rates = [until(gamma_runs, seed=seed, relative_half_width=0.05) for seed in range(400)]
    covered = sum(abs(rate.tokens_per_s - 100) <= rate.half_width for rate in rates)
    assert all(rate.relative_half_width <= 0.05 for rate in rates)
    assert 358 <= covered <= 394
    too_narrow = sum(abs(rate.tokens_per_s - 100) <= 0.7 * rate.half_width for rate in rates)
    assert too_narrow < 358  # negative control


def test_one_replication_has_no_interval():
    assert rate_of([10.0], [2.0]).half_width == np.inf
    assert rate_of([10.0], [2.0]).tokens_per_s == 5
    with pytest.warns(CeilingReached):
        assert until(gamma_runs, seed=1, ceiling=1).half_width == np.inf


def test_ratio_estimate_by_hand():
    """Tokens 4 and 6 in 1 s and 3 s: 2.5/s; residuals 1.5 and -1.5 with standard deviation 2.1213, error .75; t of one
    degree of freedom is 12.706."""
    rate = rate_of([4, 6], [1, 3])
    assert rate.tokens_per_s == 2.5
    assert rate.half_width == pytest.approx(12.7062 * 0.75, rel=1e-5)


def test_nothing_to_decode_has_rate_zero():
    record = scripted_record(0.5, num_prompts=2, length=4)
    expectation, rate = vectorized.replicate_until(Speculative(2), workload_of(record, 1), system_of(record), seed=0)
    assert rate.tokens_per_s == 0 and not rate.reached_ceiling
    np.testing.assert_array_equal(expectation.seconds, [0, 0])


def test_seeds_come_in_any_portions_and_are_distinct():
    row = replication_seeds(5, 3000)
    assert len(set(row)) == 3000
    assert replication_seeds(5, 8) == row[:8]
    assert replication_seeds(5, 100, first=8) == row[8:108]
    assert set(row).isdisjoint(replication_seeds(6, 3000))


@pytest.mark.parametrize(
    "options", [{"relative_half_width": 0.0}, {"minimum": 0}, {"ceiling": 0}, {"ceiling": True}, {"minimum": 2.5}]
)
def test_impossible_stopping_rules_are_refused(options):
    with pytest.raises(BadInput, match=next(iter(options))):
        until(gamma_runs, seed=1, **options)
