"""Replays beside the simulator: rounds chosen anew, stores that outlive a round, workloads that change."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments.paper import adaptive_control
from experiments.paper.adaptive_control import best_fixed, numbers, regrets_of, run_of
from experiments.paper.agreement_records import DATA, read_record
from experiments.paper.constant_times import StepCosts
from experiments.paper.draft_paths import DraftPaths, by_list, by_probability, calibrated_exponent
from experiments.paper.hit_rates import uniform_policy
from experiments.paper.long_lived_cache import FAN_OUT, UNLIMITED, Branches, K, Replayer, Store, Totals, Variant
from experiments.paper.phases import Phases
from experiments.recorded_workload import recorded_workload
from sim.errors import BadInput
from sim.policy import Fallback, Speculative, SpeculativeSpeculative
from sim.recursion import expectations
from tests.sim.toy import markov, record_of, scripted_record

COSTS = StepCosts()
RECORD = read_record("library_t0")
PATHS = DraftPaths.read(RECORD, DATA / "library_t0.paths.parquet")


def _expected(policy, record):
    (found,) = expectations([policy], recorded_workload(record), COSTS.system(record))
    return found


# --------------------------------------------------------------------------------------------------------- draft paths


def test_paths_are_those_of_the_record_as_long_as_drafts_are_right() -> None:
    right = np.flatnonzero((RECORD.rank == 0) & (RECORD.position < RECORD.lengths[RECORD.prompt] - 1))
    assert len(right) > 1000
    assert np.array_equal(PATHS.top_token[right, 1, 0], RECORD.top_token[right + 1, 0])
    assert PATHS.top_q[right, 1] == pytest.approx(RECORD.top_q[right + 1, :8], rel=0.03, abs=1e-4)


@pytest.mark.parametrize("fan_out", [(2, 1, 1, 0, 3), (0, 0, 0, 0, 0), (6, 5, 4, 3, 2)])
def test_rounds_with_one_list_are_those_of_the_exact_engine(fan_out: tuple[int, ...]) -> None:
    played = PATHS.play(by_list(fan_out), np.arange(RECORD.num_prompts), COSTS)
    exact = _expected(SpeculativeSpeculative(4, fan_out, fan_out), RECORD)
    assert played.num_hits.sum(0) == pytest.approx(exact.num_hits.sum(0))
    assert played.num_lookups.sum(0) == pytest.approx(exact.num_lookups.sum(0))
    assert played.num_rounds == pytest.approx(exact.num_rounds) and played.seconds == pytest.approx(exact.seconds)


def test_the_likeliest_outcomes_are_as_many_as_the_budget_and_no_draft_tokens() -> None:
    for row, exponent in zip(range(0, 300, 10), np.linspace(0.2, 2, 30), strict=True):
        tokens, probs = PATHS.top_token[row], PATHS.top_q[row]
        chosen = by_probability(7, exponent)(tokens, probs)
        assert len(chosen) == 7
        assert not {(k, int(tokens[k, 0])) for k in range(PATHS.speculation_length)} & chosen


def test_the_exponent_of_the_confidence_is_recovered() -> None:
    """20,000 tokens leave an error of .02; this fails by chance once in a thousand seeds."""
    rng = np.random.default_rng(5)
    confidence = rng.random(20_000)
    rank = (rng.random(20_000) >= confidence**1.7).astype(int)
    record = SimpleNamespace(top_q=confidence[:, None], rank=rank, position=np.ones(20_000))
    assert calibrated_exponent(record) == pytest.approx(1.7, abs=0.07)


def test_a_build_that_does_not_fit_beside_a_verification_is_refused() -> None:
    with pytest.raises(BadInput, match="room for a build"):
        PATHS.play(by_list((1,) * 5), np.arange(1), StepCosts.of_ratio(0.3))


# --------------------------------------------------------------------------------------------------------------- stores


def test_a_store_forgets_what_was_not_used_for_longest() -> None:
    store = Store(2, 2)
    store.put((9, 1, 2), (5,))
    store.put((9, 3, 4), (6,))
    assert store.get((7, 7, 1, 2)) == (5,)  # only the last two tokens count, and asking is using
    store.put((0, 0), (7,))
    assert len(store) == 2 and store.get((3, 4)) is None and store.get((1, 2)) == (5,)


def _replayed(record, branches, variant: Variant, seed: int = 0) -> list[Totals]:
    return Replayer(Branches(record, branches), variant, COSTS, np.random.default_rng(seed)).run()


def test_without_a_store_rounds_are_those_of_the_exact_engine() -> None:
    record = read_record("long_t0")
    found = _replayed(record, np.zeros((len(record.token), 4, K), dtype=int), Variant("none"))
    exact = _expected(uniform_policy(K, FAN_OUT, Fallback.DRAFT), record)
    assert [t.hits for t in found] == pytest.approx(exact.num_hits.sum(0))
    assert [t.seconds for t in found] == pytest.approx(exact.seconds)


def test_without_a_store_sampled_rounds_are_those_of_the_exact_engine_on_average() -> None:
    """60 runs; fails by chance once in about ten thousand seeds."""
    record = record_of(*markov(3), num_prompts=4, length=40, seed=1)
    exact = _expected(uniform_policy(K, FAN_OUT, Fallback.DRAFT), record).seconds.sum()
    runs = [
        sum(t.seconds for t in _replayed(record, np.zeros((len(record.token), 4, K), dtype=int), Variant("none"), seed))
        for seed in range(60)
    ]
    assert abs(np.mean(runs) - exact) < 4 * np.std(runs, ddof=1) / np.sqrt(len(runs))


def test_a_text_that_repeats_itself_is_copied_by_prompt_lookup() -> None:
    """The draft is never right and nothing is ever prepared. Once a key of 2 tokens comes again with K tokens behind
    it, two periods of 3 later, all is accepted."""
    record = scripted_record(0.0, num_prompts=1, length=49, rank=50)
    period = np.tile([1, 2, 3], 17)[:49]
    record = record.__class__(**{**vars(record), "token": period, "prompt_tokens": ((9, 9, 9, 9),)})
    branches = np.zeros((49, 4, K), dtype=int)
    (found,) = _replayed(record, branches, Variant("prompt look-up", "text", 2, UNLIMITED))
    missed = found.rounds - found.found
    assert found.accepted_of_drafted == 0 and found.hits == 0
    assert found.accepted_of_found == pytest.approx(48 - found.rounds) and missed == 2 + 2 * 3 - 1
    assert found.tokens == 48


@pytest.mark.parametrize("temperature", [0, 1])
def test_branches_that_follow_committed_tokens_are_the_draft_models_own(temperature: int) -> None:
    """What is drafted after the likeliest token at a place is what is likeliest at the next, where it was right."""
    record = read_record(f"long_t{temperature}")
    branches = Branches.read(record, DATA / f"long_t{temperature}.branches.parquet")
    right = np.flatnonzero((record.rank == 0) & (record.position < record.lengths[record.prompt] - 1))
    agree = branches.continuation[right, 0, 0] == record.top_token[right + 1, 0]
    assert agree.mean() > 0.999  # ties between the likeliest may be broken otherwise


# ---------------------------------------------------------------------------------------------------------- phases


def test_phases_are_their_parts_one_after_the_other() -> None:
    short = record_of(*markov(4), num_prompts=2, length=15, seed=2)
    long = record_of(*markov(3), num_prompts=3, length=30, seed=1)
    together = Phases((long, short, long))
    for policy in (Speculative(3), uniform_policy(3, 2, Fallback.DRAFT), uniform_policy(3, 2, Fallback.NONE)):
        whole = _expected(policy, together)
        parts = [_expected(policy, part) for part in together.parts]
        for name in ("num_tokens", "num_rounds"):
            apart = np.concatenate([getattr(part, name) for part in parts])
            assert getattr(whole, name) == pytest.approx(apart, rel=1e-9)
    assert together.text(3) == short.text(0)


def test_phases_must_be_sampled_alike() -> None:
    greedy = record_of(*markov(3), num_prompts=2, length=10, seed=1, temperature=0.0)
    with pytest.raises(BadInput, match="sampled alike"):
        Phases((greedy, record_of(*markov(3), num_prompts=2, length=10, seed=1)))


def test_a_workload_of_one_part_is_its_own_best_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_control, "TEXT_TOKENS", 60)
    found = run_of(Phases((numbers(0.8, 2),)), 0)
    assert found.phases_over_fixed == pytest.approx(1.0)
    assert found.num_tokens == 2 * 59


def test_speculation_is_longer_the_more_is_accepted() -> None:
    lengths = [best_fixed(numbers(acceptance, 1))[0].speculation_length for acceptance in (0.2, 0.5, 0.8)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_regret_is_of_every_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_control, "TEXT_TOKENS", 60)
    found = regrets_of("step", lambda seed: Phases((numbers(0.2, 2), numbers(0.9, 2))), num_seeds=2)
    assert [entry.controller for entry in found] == ["running statistics", "hill climbing"]
    for entry in found:
        assert entry.against_fixed.low <= entry.against_fixed.value <= entry.against_fixed.high
        assert entry.against_phases >= entry.against_fixed.value
