"""The emitted law of one verified position is the target's, whatever the draft; known wrong rules are not."""

from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import executor.sampling
from executor.sampling import (
    by_rank,
    by_rank_unasked,
    down_weight,
    draw,
    penalised,
    process,
    rank,
    seen_along,
    stated_probs,
    uniform_tokens,
    verify,
    verify_greedy,
)
from sim.policy import Proposer
from sim.workload import Sampling

NUM_TRIALS = 200_000  # noise floor of the total variation at four tokens: .0015, worst of 500 .0046
GATE = 0.01

# Target and draft laws (p, q) with the acceptance sum min(p, q). The second has several residual tokens.
FIXTURES = {
    "one residual token": ([0.45, 0.25, 0.20, 0.10], [0.15, 0.40, 0.25, 0.20], 0.70),
    "several residual tokens": ([0.30, 0.30, 0.30, 0.10], [0.05, 0.15, 0.10, 0.70], 0.40),
}


def uniforms(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(weights: list[float]) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64).expand(NUM_TRIALS, len(weights))


def emitted(p: list[float], sampled_from: list[float], tested_with: list[float]) -> tuple[torch.Tensor, float]:
    """Law of the first emitted token and acceptance, when one draft token is verified."""
    tokens = draw(rows(sampled_from), uniforms(NUM_TRIALS, seed=1))
    return first_token_law(p, tokens, tested_with)


def first_token_law(p: list[float], tokens: torch.Tensor, tested_with) -> tuple[torch.Tensor, float]:
    accept, residual, bonus = (
        uniforms(NUM_TRIALS, 1, seed=2),
        uniforms(NUM_TRIALS, seed=3),
        uniforms(NUM_TRIALS, seed=4),
    )
    target_probs = rows(p)[:, None].expand(-1, 2, -1)
    draft_probs = tested_with if isinstance(tested_with, torch.Tensor) else rows(tested_with)
    num_accepted, bonus_token = verify(target_probs, tokens[:, None], draft_probs[:, None], accept, residual, bonus)
    first = torch.where(num_accepted == 1, tokens, bonus_token)
    return law(first, len(p)), num_accepted.double().mean().item()


def law(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return torch.bincount(tokens, minlength=vocab_size) / len(tokens)


def total_variation(first: torch.Tensor, second: list[float]) -> float:
    return 0.5 * (first - torch.tensor(second)).abs().sum().item()


@pytest.mark.parametrize("name", FIXTURES)
def test_emitted_law_is_the_targets(name: str) -> None:
    p, q, acceptance = FIXTURES[name]
    first, measured = emitted(p, q, q)
    assert total_variation(first, p) < GATE
    assert measured == pytest.approx(acceptance, abs=0.01)


@pytest.mark.parametrize(
    ("q", "acceptance"),
    [
        ([0.0, 1.0, 0.0, 0.0], 0.25),  # argmax draft, one-hot q
        ([0.0, 0.40 / 0.65, 0.25 / 0.65, 0.0], 0.45),  # the draft's two best, renormalised
        ([0.25, 0.25, 0.25, 0.25], 0.80),  # uniform filler with its own q
        ([0.45, 0.25, 0.20, 0.10], 1.0),  # q = p
    ],
)
def test_any_draft_law_is_lossless_if_tested_with_what_it_was_drawn_from(q: list[float], acceptance: float) -> None:
    p = FIXTURES["one residual token"][0]
    first, measured = emitted(p, q, q)
    assert total_variation(first, p) < GATE
    assert measured == pytest.approx(acceptance, abs=0.01)


def test_down_weighted_draft_law() -> None:
    p, q, _ = FIXTURES["several residual tokens"]
    weighted = down_weighted(q, num_tokens=1, factor=0.5)
    assert weighted == pytest.approx([0.0769, 0.2308, 0.1538, 0.5385], abs=1e-4)
    first, acceptance = emitted(p, weighted, weighted)
    assert total_variation(first, p) < GATE
    assert acceptance == pytest.approx(0.5615, abs=0.01)


def down_weighted(q: list[float], num_tokens: int, factor: float) -> list[float]:
    probs = torch.tensor(q, dtype=torch.float64)
    return down_weight(probs, probs.log(), num_tokens, factor).tolist()


def test_down_weighting_shifts_the_residual_to_what_is_prepared() -> None:
    """The paper's example: the acceptance stays .98; all of the residual moves to the two likely tokens."""
    p, q = [0.48, 0.48, 0.02, 0.02], [0.49, 0.49, 0.01, 0.01]
    weighted = down_weighted(q, num_tokens=2, factor=47 / 147)
    acceptances, prepared = [], []
    for law_of_draft in (q, weighted):
        difference = torch.tensor(p, dtype=torch.float64) - torch.tensor(law_of_draft, dtype=torch.float64)
        residual = difference.clamp(min=0)
        acceptances.append(1 - residual.sum().item())
        prepared.append(residual[:2].sum().item() / residual.sum().item())
    assert acceptances == pytest.approx([0.98, 0.98])
    assert prepared == pytest.approx([0.0, 1.0])


def test_down_weighting_takes_the_order_of_the_logits_and_keeps_bad_rows_bad() -> None:
    logits = torch.tensor([[2.0, 2.0, 1.0], [torch.nan, 0.0, 0.0]])
    weighted = down_weight(process(logits, Sampling(1.0)), logits, num_tokens=1, factor=0.5)
    assert weighted[0, 0] == pytest.approx(weighted[0, 1].item() / 2)
    assert weighted[0].sum() == pytest.approx(1)
    assert weighted[1].isnan().all()


@pytest.mark.parametrize(("proposer", "acceptance"), [(Proposer.FILLER, 0.80), (Proposer.NGRAM, 0.25)])
def test_tokens_of_no_model_are_tested_with_their_own_law(proposer: Proposer, acceptance: float) -> None:
    p = FIXTURES["one residual token"][0]
    tokens = uniform_tokens(uniforms(NUM_TRIALS, seed=1), 4) if proposer is Proposer.FILLER else FILLED_WITH_ONE
    first, measured = first_token_law(p, tokens, stated_probs(proposer, tokens, 4))
    assert total_variation(first, p) < GATE
    assert measured == pytest.approx(acceptance, abs=0.01)


FILLED_WITH_ONE = torch.ones(NUM_TRIALS, dtype=torch.long)  # what an n-gram proposes is no matter of chance


def test_filler_tokens_are_uniform() -> None:
    tokens = uniform_tokens(uniforms(NUM_TRIALS, seed=1), 7)
    assert total_variation(law(tokens, 7), [1 / 7] * 7) < GATE
    assert uniform_tokens(torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), 7).tolist() == [0, 6]


@pytest.mark.parametrize(
    ("name", "sampled_from", "tested_with", "wrong_law"),
    [
        ("one residual token", [0, 1, 0, 0], None, [0.375, 0.625, 0, 0]),  # argmax draft, soft q
        ("one residual token", [0, 0.40 / 0.65, 0.25 / 0.65, 0], None, [0.308, 0.385, 0.308, 0]),  # top 2, raw q
        ("one residual token", [0.25] * 4, None, [0.519, 0.156, 0.20, 0.125]),  # filler, the draft's q
        ("several residual tokens", [0.0769, 0.2308, 0.1538, 0.5385], None, [0.269, 0.346, 0.308, 0.077]),
        ("one residual token", [0.15, 0.40, 0.25, 0.20], [0.45, 0.25, 0.20, 0.10], [0.15, 0.40, 0.25, 0.20]),  # p as q
    ],
)
def test_known_wrong_rules_fail_the_gate(name, sampled_from, tested_with, wrong_law) -> None:
    p, q, _ = FIXTURES[name]
    first, _ = emitted(p, sampled_from, tested_with or q)
    assert total_variation(first, p) > GATE
    assert total_variation(first, wrong_law) < GATE


def test_argmax_or_resample_fails_the_gate() -> None:
    """Accepting only the target's argmax and otherwise sampling p is exact when greedy, and wrong when not."""
    p, q, _ = FIXTURES["one residual token"]
    tokens = draw(rows(q), uniforms(NUM_TRIALS, seed=1))
    first = torch.where(tokens == 0, tokens, draw(rows(p), uniforms(NUM_TRIALS, seed=3)))
    assert total_variation(law(first, 4), [0.5325, 0.2125, 0.17, 0.085]) < GATE
    assert total_variation(law(first, 4), p) > GATE


def test_reusing_the_draft_noise_for_the_residual_fails_the_gate() -> None:
    p, q, _ = FIXTURES["several residual tokens"]
    noise = uniforms(NUM_TRIALS, seed=1)
    tokens = draw(rows(q), noise)
    target_probs = rows(p)[:, None].expand(-1, 2, -1)
    accept, bonus = uniforms(NUM_TRIALS, 1, seed=2), uniforms(NUM_TRIALS, seed=4)
    num_accepted, bonus_token = verify(target_probs, tokens[:, None], rows(q)[:, None], accept, noise, bonus)
    first = torch.where(num_accepted == 1, tokens, bonus_token)
    assert total_variation(law(first, 4), p) > GATE


# ------------------------------------------------------------------------------------------- two rounds, by source

SECOND_SPECULATION = ("SD", "SSD, all hit", "SSD, all miss", "SSD, mixed, draft", "SSD, mixed, none")


def two_rounds(p: list[float], q: list[float], mode: str, branch_noise: torch.Tensor | None = None) -> torch.Tensor:
    """(16,) law of the first tokens of two rounds of one draft token each; `mode` supplies the second speculation.

    A prepared speculation is drawn before the outcome is known, with noise of its own branch. Branches stand for
    (accept count, bonus token); `mixed` prepares the draft's best token after a rejection, its best two otherwise.
    """
    vocab_size = len(p)
    target_probs, draft_probs = rows(p)[:, None].expand(-1, 2, -1), rows(q)[:, None]
    noise = [uniforms(NUM_TRIALS, 1, seed=seed) for seed in range(10, 18)]
    drafted = draw(draft_probs, noise[0])
    num_accepted, bonus = verify(target_probs, drafted, draft_probs, noise[1], noise[2][:, 0], noise[3][:, 0])
    first = torch.where(num_accepted == 1, drafted[:, 0], bonus)

    branches = uniforms(NUM_TRIALS, 2 * vocab_size, seed=20) if branch_noise is None else branch_noise
    prepared = draw(draft_probs.expand(-1, 2 * vocab_size, -1), branches)
    on_hit = prepared.gather(1, (num_accepted * vocab_size + bonus)[:, None])
    on_miss = draw(draft_probs, noise[4])
    best = torch.tensor(q).argsort(descending=True)
    best_left = torch.where(drafted[:, 0] == best[0], best[1], best[0])
    among_best_two = (bonus == best[0]) | (bonus == best[1])
    is_hit = {"SSD, all hit": torch.tensor(True), "SSD, all miss": torch.tensor(False), "SD": torch.tensor(False)}.get(
        mode, torch.where(num_accepted == 1, among_best_two, bonus == best_left)
    )
    speculation = torch.where(is_hit.expand(NUM_TRIALS)[:, None], on_hit, on_miss)
    accepted, next_bonus = verify(target_probs, speculation, draft_probs, noise[5], noise[6][:, 0], noise[7][:, 0])
    second = torch.where(accepted == 1, speculation[:, 0], next_bonus)
    if mode == "SSD, mixed, none":  # after a miss nothing is verified: the bonus token is drawn from p
        none = torch.zeros(NUM_TRIALS, 0, dtype=torch.long)
        _, alone = verify(target_probs[:, :1], none, draft_probs[:, :0], none.double(), noise[6][:, 0], noise[7][:, 0])
        second = torch.where(is_hit, second, alone)
    return law(vocab_size * first + second, vocab_size**2)


def independent(p: list[float]) -> list[float]:
    return [a * b for a in p for b in p]


@pytest.mark.parametrize("mode", SECOND_SPECULATION)
@pytest.mark.parametrize("name", FIXTURES)
def test_two_rounds_emit_the_targets_law(name: str, mode: str) -> None:
    p, q, _ = FIXTURES[name]
    # At sixteen outcomes the noise floor of the total variation is .0034.
    assert total_variation(two_rounds(p, q, mode), independent(p)) < GATE


def test_branches_that_reuse_the_residual_noise_fail_the_gate() -> None:
    p, q, _ = FIXTURES["several residual tokens"]
    reused = uniforms(NUM_TRIALS, 1, seed=12).expand(-1, 8)
    assert total_variation(two_rounds(p, q, "SSD, all hit", reused), independent(p)) > GATE


def test_without_draft_tokens_the_bonus_token_follows_p() -> None:
    p = FIXTURES["one residual token"][0]
    empty = torch.zeros(NUM_TRIALS, 0, dtype=torch.long)
    probs, none = rows(p)[:, None], torch.zeros(NUM_TRIALS, 0, 4, dtype=torch.float64)
    wrong, right = torch.zeros(NUM_TRIALS, dtype=torch.float64), uniforms(NUM_TRIALS, seed=5)
    num_accepted, bonus_token = verify(probs, empty, none, torch.zeros(NUM_TRIALS, 0), wrong, right)
    assert not num_accepted.any()
    assert total_variation(law(bonus_token, 4), p) < GATE


def test_tokens_after_a_rejection_are_not_accepted() -> None:
    target_probs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    draft_probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    zero = torch.tensor(0.0, dtype=torch.float64)
    accept = torch.zeros(2, dtype=torch.float64)
    assert verify(target_probs, torch.tensor([0, 0]), draft_probs, accept, zero, zero) == (0, 1)


def test_disjoint_laws_accept_nothing_even_at_uniform_zero() -> None:
    first, acceptance = emitted([0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5])
    assert acceptance == 0
    assert total_variation(first, [0.5, 0.5, 0, 0]) < GATE


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_draft_row_that_is_no_distribution_is_rejected_and_p_drawn(bad: float) -> None:
    logits = torch.zeros(4)
    logits[2] = bad
    draft_row = process(logits, Sampling(1.0)) if bad != -torch.inf else process(torch.full((4,), bad), Sampling(1.0))
    assert draft_row.isnan().all()
    p = FIXTURES["one residual token"][0]
    tokens = draw(draft_row, torch.tensor(0.3, dtype=torch.float64)).expand(NUM_TRIALS)
    assert 0 <= int(tokens[0]) < 4
    first, acceptance = first_token_law(p, tokens, draft_row.tolist())
    assert acceptance == 0
    assert total_variation(first, p) < GATE


def test_zero_weights_are_never_drawn() -> None:
    weights = torch.rand(1000, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[torch.rand(1000, 100, generator=torch.Generator().manual_seed(1)) < 0.9] = 0.0
    weights[:, 50] = 1e-12
    noise = uniforms(1000, 1000, seed=2)
    noise[:, 0], noise[:, 1] = 0.0, 1.0 - 2.0**-53
    for weight, numbers in zip(weights, noise, strict=True):
        assert (weight[draw(weight.expand(1000, -1), numbers)] > 0).all()


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-300, 1e-8, 1e-4, 1.0])
def test_process_gives_distributions_at_any_temperature(temperature: float) -> None:
    logits = torch.tensor([[3.0, 3.0, -torch.inf, 1.0], [-900.0, 900.0, 0.0, 5.0]])
    probs = process(logits, Sampling(temperature))
    assert torch.allclose(probs.sum(-1), torch.ones(2, dtype=torch.float64))
    assert probs[0, 2] == 0
    if temperature == 0:
        assert probs.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]


def test_greedy_verification_is_verification_of_one_hot_laws() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        target, draft = (process(torch.randn(n, 3, generator=generator), Sampling()) for n in (4, 3))
        tokens = draft.argmax(-1)
        numbers = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (), ())]
        expected = verify(target, tokens, draft, *numbers)
        assert verify_greedy(target.argmax(-1).tolist(), tuple(tokens.tolist())) == expected


def test_ranks_break_ties_by_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    assert by_rank(logits, 5).tolist() == [[1, 2, 4, 0, 3]]
    assert rank(logits.expand(5, -1), torch.arange(5)).tolist() == [3, 0, 1, 4, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_that_nobody_asks_about_are_the_same(dtype: torch.dtype) -> None:
    """Few different values, zeros of either sign and infinities among them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([-torch.inf, -3.5, -1e-6, -0.0, 0.0, 1e-6, 2.0, 2.5, 1e4, torch.inf], dtype=dtype)
    logits = values[torch.randint(len(values), (50, 40), generator=generator)]
    smooth = torch.randn(50, 40, generator=generator).to(dtype)
    for rows in (logits, smooth):
        for num_tokens in (1, 3, 40):
            assert torch.equal(by_rank_unasked(rows, num_tokens), by_rank(rows, num_tokens))


@pytest.mark.parametrize("shape", [(40,), (3, 512), (2, 2, 5000)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17, 64, 512, 9999])
def test_the_first_ranks_are_the_first_of_a_stable_order(shape, num_tokens: int) -> None:
    """With many equals, with none, with -inf and with NaN."""
    generator = torch.Generator().manual_seed(num_tokens)
    free = torch.randn(shape, generator=generator)
    coarse = (2 * free).round()
    cut = free.masked_fill(torch.rand(shape, generator=generator) < 0.9, -torch.inf)
    bad = free.index_fill(-1, torch.tensor([7]), torch.nan)
    for logits in (free, coarse, cut, bad, free.double()):
        expected = torch.sort(logits, descending=True, stable=True).indices[..., :num_tokens]
        assert torch.equal(by_rank(logits, num_tokens), expected)


# -------------------------------------------------------------------------------------------------------- processing

SETTINGS = [
    Sampling(0.7, top_k=3),
    Sampling(1.3, top_p=0.9),
    Sampling(0.5, top_p=0.05),
    Sampling(1.0, min_p=0.1),
    Sampling(2.0, top_k=9999),
    Sampling(1.0, repetition_penalty=0.7),
    Sampling(0.8, 40, 0.8, 0.05, 1.3),
]


def processed_by_transformers(logits: torch.Tensor, text: list[int], sampling: Sampling) -> torch.Tensor:
    """(1, V) logits after a text -> (1, V) probabilities."""
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))])
    steps.append(TemperatureLogitsWarper(float(sampling.temperature)))
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    return steps(torch.tensor([text]), logits.clone()).softmax(-1)


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("vocab_size", [5, 128, 6000])
def test_processing_is_that_of_transformers(sampling: Sampling, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    text = torch.randint(vocab_size, (12,), generator=generator).tolist()
    logits = 3 * torch.randn(4, vocab_size, generator=generator, dtype=torch.float64)
    got = process(penalised(logits, sampling.repetition_penalty, text), sampling)
    for row in range(4):
        expected = processed_by_transformers(logits[row : row + 1], text[: len(text) - 3 + row], sampling)[0]
        assert torch.equal(got[row] > 0, expected > 0)
        assert torch.allclose(got[row], expected, rtol=1e-12, atol=0)


def test_a_row_is_processed_the_same_in_any_company() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    for sampling in SETTINGS:
        together = process(logits, sampling)
        for row in range(6):
            assert torch.equal(process(logits[row], sampling), together[row])


@pytest.mark.parametrize("p", [0.3, 0.9, 0.999999])
def test_few_candidates_decide_what_all_would(p: float, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.cat([s * torch.randn(2, 3000, generator=generator, dtype=torch.float64) for s in (1, 8)])
    sampling, expected = Sampling(1.0, top_p=p), []
    for few in (1024, 10**9):
        monkeypatch.setattr(executor.sampling, "FEW_CANDIDATES", few)
        expected.append(process(logits, sampling))
    assert torch.equal(*(probs > 0 for probs in expected))
    assert torch.allclose(*expected, rtol=1e-12, atol=0)


def test_equals_at_the_border() -> None:
    """top_k keeps all that equal the last one, as transformers does; top_p those of lowest id."""
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    assert (process(logits, Sampling(1.0, top_k=2)) > 0).tolist() == [True, True, True, True, False]
    assert (process(logits, Sampling(1.0, top_p=0.6)) > 0).tolist() == [True, True, False, False, False]
    assert (process(torch.zeros(4), Sampling(1.0, top_p=0.4)) > 0).tolist() == [True, True, False, False]
    assert (process(torch.zeros(4), Sampling(1.0, min_p=1.0)) > 0).all()


def test_each_position_is_penalised_for_the_text_that_it_sees() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]] * 3)
    expected = [[1.0, -2.0, 1.0, 0.0], [1.0, -4.0, 1.0, 0.0], [1.0, -4.0, 0.5, 0.0]]
    assert penalised(logits, 2.0, [0, 0, 1, 2]).tolist() == expected
    assert penalised(logits, 1.0, [0, 1, 2]) is logits
    assert seen_along([3, 1], 2, 4).tolist() == [[False, False, False, True], [False, True, False, True]]


def test_processing_changes_nothing_it_is_given() -> None:
    logits = torch.randn(3, 50, dtype=torch.float64)
    before = logits.clone()
    for sampling in (*SETTINGS, Sampling(), Sampling(1.0)):
        process(penalised(logits, sampling.repetition_penalty, [1, 2, 3]), sampling)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [Sampling(), *SETTINGS])
def test_what_is_no_distribution_stays_none_under_any_settings(bad: float, sampling: Sampling) -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = bad
    probs = process(penalised(logits, sampling.repetition_penalty, [3, 3]), sampling)
    assert probs[0].isnan().all() and probs[1].sum() == pytest.approx(1)


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e-4])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_almost_no_temperature_is_the_argmax_under_any_settings(sampling: Sampling, temperature: float) -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, -1.0], [-900.0, 900.0, 0.0, 5.0]])
    probs = process(logits, replace(sampling, temperature=temperature))
    assert torch.allclose(probs.sum(-1), torch.ones(2, dtype=torch.float64))
    assert probs[0, [1, 3]].sum() == 0 and probs[1].tolist() == [0, 1, 0, 0]


def logits_of(weights: list[float]) -> torch.Tensor:
    return torch.tensor(weights).log()


DRAFT_SETTINGS = [Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.8), Sampling(1.0, min_p=0.2), Sampling(0.7)]


@pytest.mark.parametrize("sampling", DRAFT_SETTINGS)
@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processed_draft_law_is_lossless(name: str, sampling: Sampling, dtype) -> None:
    """What is drawn from is what is tested with, also where the draft's logits are rough."""
    p, q, _ = FIXTURES[name]
    processed = process(logits_of(q).to(dtype), sampling).tolist()
    first, acceptance = emitted(p, processed, processed)
    assert total_variation(first, p) < GATE
    assert acceptance == pytest.approx(sum(map(min, p, processed)), abs=0.01)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [(Sampling(1.0, top_k=2), [0.6429, 0.3571, 0, 0]), (Sampling(1.0, min_p=0.5), [0.6429, 0.3571, 0, 0])],
)
def test_the_targets_settings_hold_at_draft_positions_and_for_the_bonus_token(sampling: Sampling, kept) -> None:
    """A token that is cut never appears; with p unprocessed at draft positions it would."""
    p, q, _ = FIXTURES["one residual token"]
    processed = process(logits_of(p), sampling)
    assert processed.tolist() == pytest.approx(kept, abs=1e-4)
    first, _ = emitted(processed.tolist(), q, q)
    assert total_variation(first, kept) < GATE and first[2:].sum() == 0
    bonus = draw(processed.expand(NUM_TRIALS, -1), uniforms(NUM_TRIALS, seed=5))
    assert total_variation(law(bonus, 4), kept) < GATE
    unprocessed, _ = emitted(p, q, q)
    assert total_variation(unprocessed, kept) > GATE
