"""Figures of traces: rates, acceptance, hits, overlap; of batches too, as the event engine predicts them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim import metrics
from sim.errors import BadInput
from sim.placement import Placement
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative
from sim.simulate import predict, simulate
from sim.streams import replication_seeds
from sim.trace import Lane, Operation, Round, Sequence, Source, Span, Trace
from tests.sim.strategies import batched
from tests.sim.toy import cut_at, markov, record_of, system_of, workload_of

SSD = SpeculativeSpeculative(2, (2, 1, 1), (1, 1, 1))


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


# ------------------------------------------------------------------------------------------------------------- batches


def verified(trace: Trace, sequences: tuple[int, ...], index: int, start_s: float, end_s: float, device: int) -> None:
    """One verification of one round of each sequence."""
    trace.rounds += [Round(s, index, Source.SYNCHRONOUS, 1, 0, 1, 4, start_s, end_s) for s in sequences]
    size = (2 * len(sequences), 4, start_s, end_s, len(sequences), device)
    trace.spans.append(Span(Lane.TARGET, Operation.VERIFY, sequences[0], index, *size))


def two_targets() -> Trace:
    """Sequences 0 and 2 on one target, 1 and 3 on the other; 2 ends first, and all verifications end together."""
    trace = Trace({}, {})
    verified(trace, (0, 2), 0, 0.0, 1.0, 0)
    verified(trace, (1, 3), 0, 0.0, 1.0, 1)
    verified(trace, (0,), 1, 1.0, 4.0, 0)
    verified(trace, (1, 3), 1, 1.0, 4.0, 1)
    for index, (tokens, end_s) in enumerate([(3, 4.0), (3, 4.0), (2, 1.0), (3, 4.0)]):
        trace.sequences.append(Sequence(index, 4, tuple(range(tokens)), 0.0, 0.0, end_s, False))
    return trace


def test_the_time_of_a_batch_counts_once_and_that_of_targets_adds_up():
    """7 tokens: 8 s of two targets, of which the sequences had 4 + 4 + 1 + 4."""
    throughput, rate = metrics.tokens_per_s([two_targets()]), metrics.tokens_per_s_of_a_sequence([two_targets()])
    assert (throughput.value, throughput.n) == (7 / 8, 2)
    assert (rate.value, rate.n) == (7 / 13, 2)
    assert metrics.end_to_end_tokens_per_s([two_targets()]).value == 11 / 8


def test_rows_that_join_and_leave_are_one_batch_as_long_as_any_is_there():
    """0 and 1 meet, 1 and 2 meet, 3 comes later and is alone: 6 s and 2 s, whatever happens between."""
    trace = Trace({}, {})
    verified(trace, (0, 1), 0, 0.0, 2.0, 0)
    verified(trace, (1, 2), 1, 2.0, 6.0, 0)
    trace.rounds[-1] = replace(trace.rounds[-1], index=0)
    verified(trace, (3,), 0, 10.0, 12.0, 0)
    for index, (tokens, start_s, end_s) in enumerate([(2, 0.0, 2.0), (3, 0.0, 6.0), (2, 2.0, 6.0), (2, 10.0, 12.0)]):
        trace.sequences.append(Sequence(index, 4, tuple(range(tokens)), start_s, start_s, end_s, False))
    estimate = metrics.tokens_per_s([trace])
    assert (estimate.value, estimate.n) == (5 / 8, 2)


def test_a_batch_whose_rounds_are_not_there_is_refused():
    trace = two_targets()
    trace.rounds[1], trace.rounds[4] = trace.rounds[4], trace.rounds[1]
    with pytest.raises(BadInput, match="round 0 of sequence 0: must be followed by the others of its batch of 2"):
        metrics.tokens_per_s([trace])
    trace.rounds.clear()
    with pytest.raises(BadInput, match="round 0 of sequence 0"):
        metrics.hit_rate([trace])


@pytest.mark.parametrize("num_targets", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", [Autoregressive(), Speculative(2), SSD], ids=lambda policy: policy.name)
def test_figures_of_a_run_are_those_that_the_event_engine_predicts(policy: Policy, batch_size: int, num_targets: int):
    """One run with one seed, both ways: values, intervals and numbers of batches. Texts of 2 to 16 tokens.

    Durations vary so that no two targets ask at the same time up to rounding, where the order would be chance.
    """
    record = cut_at(record_of(*markov(1), num_prompts=8, length=16, seed=1), stop=4)
    assert record.lengths.min() > 1 and len(set(record.lengths)) > 2
    residuals = tuple(np.random.default_rng(0).lognormal(0, 0.2, 40))
    system = batched(system_of(record, residuals=residuals, tree_step_s=0.004), 0.001)
    system = replace(system, placement=Placement(num_targets=num_targets))
    workload = replace(workload_of(record), batch_size=batch_size)
    predicted = predict(policy, workload, system, engine="des", seed=5, ceiling=1)
    run = [simulate(policy, workload, system, replication_seeds(5, 1)[0])]

    def same(measured: metrics.Estimate | None, expected: metrics.Estimate | None) -> bool:
        if measured is None or expected is None:
            return measured is expected
        return list(measured.to_dict().values()) == pytest.approx(list(expected.to_dict().values()), rel=1e-9)

    assert same(metrics.tokens_per_s(run), predicted.tokens_per_s)
    assert same(metrics.mean_acceptance_length(run), predicted.mean_acceptance_length)
    assert same(metrics.hit_rate(run), predicted.hit_rate)
    for source, rate in metrics.hit_rate_by_source(run).items():
        assert same(rate, predicted.hit_rate_by_source[source])
    assert same(metrics.tokens_per_s_of_a_sequence(run), predicted.tokens_per_s) == (batch_size == 1)


def test_a_text_of_one_token_has_no_part_in_the_rate():
    """Third and fourth text end with the first token. In the trace nothing says whose batch they were in."""
    record = cut_at(record_of(*markov(3), num_prompts=8, length=16, seed=3), stop=4)
    assert record.lengths[2] == record.lengths[3] == 1
    system, workload = batched(system_of(record), 0.001), replace(workload_of(record), batch_size=3)
    predicted = predict(Speculative(2), workload, system, engine="des", ceiling=1).tokens_per_s
    measured = metrics.tokens_per_s([simulate(Speculative(2), workload, system, replication_seeds(0, 1)[0])])
    assert measured.value == pytest.approx(predicted.value) and (measured.n, predicted.n) == (5, 3)


def test_the_overlap_of_a_batch_counts_each_build_once():
    """Builds of 2 + 2 * 6 ms beside verifications of 10 ms, also where the first row of a batch has ended."""
    record = cut_at(record_of(*markov(1), num_prompts=8, length=16, seed=1), stop=4)
    system = batched(system_of(record, tree_step_s=0.006), 0.0)
    trace = simulate(SSD, replace(workload_of(record), batch_size=3), system)
    first_rows = {s.sequence for s in trace.spans if s.operation is Operation.GLUE}
    assert not first_rows <= {0, 3, 6}
    estimate = metrics.overlap([trace])
    assert estimate.value == pytest.approx(10 / 14) and estimate.n == 3


def test_policies_are_compared_over_the_same_batches():
    """One decodes 0 and 2 together, and 1 and 3; the other each alone, in 1 s a sequence: 7/4 against 7/8 tokens/s."""
    alone = Trace({}, {}, [replace(s, decode_start_s=0.0, end_s=1.0) for s in two_targets().sequences])
    speedup = metrics.speedup([alone], [two_targets()])
    assert (speedup.value, speedup.n) == (2.0, 2)
    (tokens, seconds), _ = metrics.decode_totals([alone], [two_targets()])
    assert tokens.tolist() == [3, 4] and seconds.tolist() == [2, 2]
    with pytest.raises(BadInput, match="traces: must be of the same prompts for every policy"):
        metrics.speedup([Trace({}, {}, alone.sequences[:3])], [two_targets()])


def test_a_prompt_held_ten_times_counts_once():
    """The interval is over different prompts; two of them, however often, are called too few."""
    record = record_of(*markov(3), num_prompts=8, length=30, seed=4)
    once = predict(Speculative(2), workload_of(record), system_of(record))
    many = record.select(np.repeat(np.arange(8), 10))
    repeated = predict(Speculative(2), workload_of(many), system_of(many))
    for figure in ("value", "low", "high", "n"):
        of_both = [getattr(prediction.tokens_per_s, figure) for prediction in (repeated, once)]
        assert of_both[0] == pytest.approx(of_both[1])
    assert repeated.notes == once.notes == ()
    pair = record.select(np.array([0, 1, 0, 1]))
    few = predict(Speculative(2), workload_of(pair), system_of(pair))
    assert few.tokens_per_s.n == 2 and "too few to be trusted" in few.notes[0]


def test_the_seed_of_a_sampled_prediction_is_shown():
    record = record_of(*markov(3), num_prompts=8, length=30, seed=4)
    system, workload = system_of(record), workload_of(record)
    for engine, seed in (("exact", None), ("vectorized", 7)):
        prediction = predict(Speculative(2), workload, system, engine=engine, seed=7)
        assert prediction.seed == prediction.to_dict()["seed"] == seed


def test_round_efficiency_is_the_longer_of_verification_and_build_over_the_round() -> None:
    """Rounds of 12 s: a miss; a hit with a build of 6 s; one with a build of 11 s; one of which a row missed."""
    trace = Trace({}, {})
    sources = [(Source.MISS,), (Source.HIT,), (Source.HIT,), (Source.HIT, Source.MISS)]
    for index, (of_rows, build_s) in enumerate(zip(sources, (9, 6, 11, 9), strict=True)):
        start_s = 12.0 * index
        for row, source in enumerate(of_rows):
            trace.rounds.append(Round(row, index, source, 2, 1, 2, 4, start_s, start_s + 12))
        num_rows = len(of_rows)
        trace.spans.append(Span(Lane.TARGET, Operation.VERIFY, 0, index, 3, 4, start_s + 1, start_s + 11, num_rows))
        middle_s = start_s + build_s / 2
        trace.spans.append(Span(Lane.DRAFT, Operation.GLUE, 0, index, 3, 4, start_s, middle_s))
        trace.spans.append(Span(Lane.DRAFT, Operation.TREE_STEP, 0, index, 4, 4, middle_s, start_s + build_s))
    trace.sequences += [Sequence(row, 4, (1, 2), 0.0, 0.0, 48.0, False) for row in range(2)]
    estimate = metrics.round_efficiency([trace])
    assert estimate.value == pytest.approx((10 + 11) / 24)
    assert metrics.round_efficiency([replace(trace, rounds=trace.rounds[:1], spans=trace.spans[:1])]) is None
