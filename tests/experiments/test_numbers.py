"""Plans from summary numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.numbers import read_numbers
from experiments.run import search_space
from sim.errors import BadInput
from sim.policy import Autoregressive, Speculative, SpeculativeSpeculative
from sim.search import search
from sim.simulate import predict
from sim.theory import expected_tokens_per_round, sd_speedup
from sim.trace import Lane, Operation

EXAMPLE = Path(__file__).parents[2] / "experiments" / "configs" / "from_numbers.yaml"
NUMBERS = """
schema: 1
name: example
text: {new_tokens: 400}
acceptance: {conditional: [0.8]}
times: {verify_ms: 10, draft_step_ms: 1}
search: {speculation_lengths: [1, 2, 3, 4, 5, 6, 7, 8], budgets: [8], fan_out_rules: [uniform], fallbacks: [draft]}
"""


@pytest.mark.parametrize("path", sorted(EXAMPLE.parent.glob("*numbers.yaml")), ids=lambda path: path.stem)
def test_numbers_that_come_along_are_valid(path):
    numbers = read_numbers(path)
    assert predict(Autoregressive(), numbers.workload, numbers.system).tokens_per_s.value > 0


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "numbers.yaml"
    path.write_text(text)
    return path


def test_a_build_longer_than_the_verification_makes_the_longest_k_that_fits_the_best():
    """Build of K tokens: 0.7 + 2.8 + 2.5 K ms beside 11.5 ms, so K = 3 is the last that hides."""
    numbers = read_numbers(EXAMPLE)
    found = search(search_space(numbers.search), numbers.workload, numbers.system)
    assert found.recommended.policy.speculation_length == 3
    best = {}
    for prediction in found.ranked:
        if isinstance(prediction.policy, SpeculativeSpeculative):
            best.setdefault(prediction.policy.speculation_length, prediction.tokens_per_s.value)
    assert best[3] > best[4] > best[5] > best[6] > best[7] > best[8]


@pytest.mark.parametrize(("verify", "K"), [("10", 6), ("[10, 12.4, 14.8, 17.2, 19.6, 22, 24.4, 26.8, 29.2]", 3)])
def test_best_k_of_sd_is_the_closed_form(tmp_path, verify, K):
    """Acceptance .8, draft step .1: K = 6 if width is free, K = 3 if each token verified costs .24 steps more."""
    numbers = read_numbers(written(tmp_path, NUMBERS.replace("verify_ms: 10", f"verify_ms: {verify}")))
    found = search(search_space(numbers.search), numbers.workload, numbers.system)
    assert found.best("sd").policy == Speculative(K)
    ar = predict(Autoregressive(), numbers.workload, numbers.system).tokens_per_s.value
    extra = 0.0 if verify == "10" else 0.24 * K
    expected = sd_speedup(expected_tokens_per_round(0.8, K), 0.1 * K, extra)
    assert found.best("sd").tokens_per_s.value / ar == pytest.approx(expected, rel=0.01)


def test_cumulative_acceptance_is_the_same_as_its_conditional_form(tmp_path):
    values = [
        predict(Speculative(3), numbers.workload, numbers.system).tokens_per_s.value
        for numbers in (
            read_numbers(written(tmp_path, NUMBERS.replace("conditional: [0.8]", "conditional: [0.8, 0.5]"))),
            read_numbers(written(tmp_path, NUMBERS.replace("conditional: [0.8]", "cumulative: [0.8, 0.4, 0.2]"))),
        )
    ]
    assert values[0] == pytest.approx(values[1])


def test_what_was_not_given_is_said(tmp_path):
    said = " ".join(read_numbers(written(tmp_path, NUMBERS)).assumptions)
    assert "no hit curve given" in said and "whatever K" in said and "as long as a draft step" in said
    curve = "{after_hit: {prefactor: 0.3, exponent: 0.5}}"
    given = NUMBERS.replace("times: {", f"hits: {curve}\ntimes: {{tree_step_ms: 1.0, ")
    said = " ".join(read_numbers(written(tmp_path, given)).assumptions)
    assert "no hit curve given" not in said and "as long as a draft step" not in said


LOAD = """
schema: 1
name: load
text: {{new_tokens: 400, batch_size: {batch_size}}}
acceptance: {{conditional: [0.8]}}
times: {{verify_ms: 10, verify_free_tokens: 16, verify_ms_per_token: 0.625, draft_step_ms: 1}}
search: {{speculation_lengths: [1, 2, 3, 4, 6, 8], budgets: [8], fan_out_rules: [uniform], fallbacks: [draft]}}
"""


def test_the_best_k_of_sd_does_not_rise_with_the_batch_and_is_zero_past_the_knee(tmp_path):
    """Verification is free up to 16 tokens and linear beyond: at 16 rows every draft token takes a real one's time."""
    best = []
    for batch_size in (1, 2, 4, 8, 16, 32):
        numbers = read_numbers(written(tmp_path, LOAD.format(batch_size=batch_size)))
        found = search(search_space(numbers.search), numbers.workload, numbers.system)
        rates = {
            p.policy.speculation_length: p.tokens_per_s.value
            for p in found.ranked
            if not isinstance(p.policy, SpeculativeSpeculative)
        }
        best.append(max(rates, key=rates.__getitem__))
    assert best == sorted(best, reverse=True)
    assert best[0] == 6 and best[-2:] == [0, 0]


@pytest.mark.parametrize(
    "definition",
    [
        "mean_acceptance_length: 3.3616, speculation_length: 4",
        "mean_accepted: 2.3616, speculation_length: 4",
        "accepted_over_drafted: 0.5904, speculation_length: 4",
        "cumulative: [0.8, 0.64]",
        "conditional: [0.75], shift: 0.05",
    ],
)
def test_acceptance_is_the_same_by_every_definition(tmp_path, definition):
    numbers = read_numbers(written(tmp_path, NUMBERS.replace("conditional: [0.8]", definition)))
    assert numbers.system.agreement.acceptance == pytest.approx((0.8,) * len(numbers.system.agreement.acceptance))


def verify_and_draft_ms(numbers):
    latency = numbers.system.latency
    steps = (
        (Lane.TARGET, Operation.VERIFY, 1),
        (Lane.TARGET, Operation.VERIFY, 5),
        (Lane.DRAFT, Operation.DRAFT_STEP, 1),
    )
    return [1e3 * float(latency[lane, operation].location_s(width, 10)) for lane, operation, width in steps]


@pytest.mark.parametrize(
    "times",
    [
        "ar_ms: 20, verify_ms: 22, draft_step_ms: 2",
        "ar_ms: 20, verify_over_ar: 1.1, draft_over_ar: 0.1",
        "ar_ms: 20, verify_ms: 22, sd_round_ms: 33, sd_speculation_length: 5, host_ms: 1",
        "ar_ms: 20, verify_over_ar: 1.1, sd_round_ms: 30, sd_speculation_length: 4",
        "verify_over_ar: 1.1, draft_over_ar: 0.1, sd_round_ms: 30, sd_speculation_length: 4",
    ],
)
def test_steps_are_the_same_by_every_way_to_tell_them(tmp_path, times):
    numbers = read_numbers(written(tmp_path, NUMBERS.replace("verify_ms: 10, draft_step_ms: 1", times)))
    assert verify_and_draft_ms(numbers) == pytest.approx([20, 22, 2])


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ("verify_ms: 10", "times.draft_step_ms: this key is missing"),
        ("draft_step_ms: 1", "must hold either verify_ms or verify_over_ar"),
        ("verify_ms: 10, draft_step_ms: 1, draft_over_ar: 0.1, ar_ms: 10", "draft_step_ms or draft_over_ar, not both"),
        ("verify_over_ar: 1, draft_step_ms: 1", "times.ar_ms: must be given with"),
        ("verify_ms: 10, sd_round_ms: 20", "sd_speculation_length: must be given with sd_round_ms"),
        ("verify_ms: 10, draft_step_ms: 1, sd_speculation_length: 4", "goes with sd_round_ms"),
        ("verify_ms: 10, draft_step_ms: 1, sd_round_ms: 20, sd_speculation_length: 4", "must decide one step"),
        ("verify_over_ar: 1, sd_round_ms: 20, sd_speculation_length: 4", "must decide one step"),
        ("verify_ms: 10, sd_round_ms: 9, sd_speculation_length: 4", "line 6: times.sd_round_ms: must be longer than"),
        (f"verify_ms: {[10] * 9}, draft_step_ms: 1, ar_ms: 9", "times.ar_ms: must be left out where verify_ms lists"),
    ],
)
def test_too_few_or_too_many_times_are_named(tmp_path, times, message):
    with pytest.raises(BadInput, match=message):
        read_numbers(written(tmp_path, NUMBERS.replace("verify_ms: 10, draft_step_ms: 1", times)))


@pytest.mark.parametrize("miss_ratio", [1, 1.75, 3])
def test_the_overall_hit_rate_is_met_at_its_fan_out(tmp_path, miss_ratio):
    """But for the first round, which behaves as one after a miss."""
    hits = f"hits: {{overall: {{hit_rate: 0.8, fan_out: 4, miss_ratio: {miss_ratio}}}}}\n"
    text = NUMBERS.replace("new_tokens: 400", "new_tokens: 4000").replace("budgets: [8]", "budgets: [16]")
    numbers = read_numbers(written(tmp_path, text + hits))
    found = predict(SpeculativeSpeculative(3, (4,) * 4, (4,) * 4), numbers.workload, numbers.system)
    assert found.hit_rate.value == pytest.approx(0.8, abs=0.002)


def test_devices_and_memory_are_read(tmp_path):
    text = (
        NUMBERS
        + """
devices: {num_draft_devices: 2, slowdown_of_target: 1.5, transfer_latency_ms: 0.25, transfer_gb_per_s: 2}
vocabulary: {num_tokens: 1000}
memory: {draft_gb: 0.00055, draft_kv_kb_per_token: 1}
"""
    )
    numbers = read_numbers(written(tmp_path, text))
    placement = numbers.system.placement
    assert placement.num_draft_devices == 2 and placement.distribution_bytes == 4000
    assert placement.message_s(1e6) == pytest.approx(0.00025 + 0.0005)
    found = search(search_space(numbers.search), numbers.workload, numbers.system)
    assert all("draft memory" in reason for _, reason in found.infeasible)
    assert {type(policy) for policy, _ in found.infeasible} == {SpeculativeSpeculative}
    assert "draft and target do not slow each other" not in " ".join(numbers.assumptions)


def test_a_list_must_cover_all_rows(tmp_path):
    text = NUMBERS.replace("new_tokens: 400", "new_tokens: 400, batch_size: 2")
    text = text.replace("verify_ms: 10", "verify_ms: [10, 11, 12, 13, 14, 15, 16, 17, 18]")
    with pytest.raises(BadInput, match="must have 18 entries, for 1 to 18 tokens, got 9"):
        read_numbers(written(tmp_path, text))
    text = NUMBERS.replace("verify_ms: 10", f"verify_ms: {[10] * 9}, verify_ms_per_token: 1")
    with pytest.raises(BadInput, match="verify_ms_per_token: must be 0 where verify_ms lists every number"):
        read_numbers(written(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("conditional: [0.8]", "conditional: [1.8]", "line 5: acceptance.conditional"),
        ("conditional: [0.8]", "cumulative: [0.5, 0.6]", "line 5: acceptance: .* must not rise"),
        ("conditional: [0.8]", "conditional: [0.8], cumulative: [0.8]", "must hold exactly one definition"),
        ("acceptance: {conditional: [0.8]}", "acceptance: {}", "must hold exactly one definition"),
        (
            "acceptance: {conditional: [0.8]}",
            "acceptance: 0.8",
            "line 5: acceptance: must say by which definition: cond",
        ),
        ("conditional: [0.8]", "mean_accepted: 2", "acceptance.speculation_length: must be given with"),
        ("conditional: [0.8]", "mean_accepted: 5, speculation_length: 4", r"line 5: acceptance: tokens per round"),
        ("conditional: [0.8]", "records: [nowhere.parquet]", "line 4: text.new_tokens: must be left out"),
        (
            "text: {new_tokens: 400}\nacceptance: {conditional: [0.8]}",
            "acceptance: {records: [nowhere.parquet]}",
            "line 4: acceptance: .*nowhere.parquet: no such agreement record",
        ),
        ("conditional: [0.8]", "records: [a], plus_minus: 0.1", "plus_minus: must be left out with records"),
        ("verify_ms: 10", "verify: 10", "line 6: times.verify"),
        ("verify_ms: 10", "verify_ms: [10, 12]", "must have 9 entries, for 1 to 9 tokens, got 2"),
        ("verify_ms: 10", "verify_ms: -1", "line 6: times.verify_ms"),
        ("draft_step_ms: 1", "draft_step_ms: no", "line 6: times.draft_step_ms"),
    ],
)
def test_bad_numbers_are_named(tmp_path, old, new, message):
    with pytest.raises(BadInput, match=message):
        read_numbers(written(tmp_path, NUMBERS.replace(old, new)))
