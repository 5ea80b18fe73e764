"""At temperature 1 every decoder emits the target's law: whole runs on a toy vocabulary against exact enumeration."""

import itertools

import pytest
import torch
from scipy.stats import chisquare

import executor.target
from executor.drafting import Drafter
from executor.draws import Draws, Purpose
from executor.execute import execute
from executor.sampling import process
from executor.toy_model import HashModel, serial_runner
from sim.policy import Fallback, Speculative, SpeculativeSpeculative
from sim.trace import Source
from sim.workload import Sampling, Workload

VOCAB_SIZE = 4
PROMPT = (1, 2)
NUM_TOKENS = 4  # decoded; the law of the first 3 is tested
NUM_SEQUENCES = 900
LEVEL = 1e-4  # a lossless decoder fails with this probability over the choice of the seed; the seed is fixed

POLICIES = {
    "SD": Speculative(2),
    "SSD, every look-up hits": SpeculativeSpeculative(2, (4, 4, 4), (4, 4, 4)),
    "SSD, every look-up misses, draft": SpeculativeSpeculative(2, (0, 0, 0), (0, 0, 0)),
    "SSD, mixed, draft": SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1)),
    "SSD, mixed, none": SpeculativeSpeculative(2, (1, 1, 2), (2,), Fallback.NONE),
    "SSD, mixed, n-gram": SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1), Fallback.NGRAM),
    "SSD, mixed, filler": SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1), Fallback.FILLER),
    "SSD, mixed, draft missing": SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1), Fallback.DRAFT_MISSING),
    "SSD, down-weighted": SpeculativeSpeculative(2, (1, 1, 2), (1, 2, 1), downweight=0.3),
    "SSD, mostly hits, down-weighted": SpeculativeSpeculative(2, (2, 2, 2), (2, 2, 2), downweight=0.2),
    "SSD, filler, down-weighted": SpeculativeSpeculative(2, (1, 1, 2), (1, 0, 1), Fallback.FILLER, 0.3),
}
SOURCES_AFTER_THE_FIRST = {
    "SD": {Source.SYNCHRONOUS},
    "SSD, every look-up hits": {Source.HIT},
    "SSD, every look-up misses, draft": {Source.MISS},
    "SSD, mixed, draft": {Source.HIT, Source.MISS},
    "SSD, mixed, none": {Source.HIT, Source.MISS},
    "SSD, mixed, n-gram": {Source.HIT, Source.MISS},
    "SSD, mixed, filler": {Source.HIT, Source.MISS},
    "SSD, mixed, draft missing": {Source.HIT, Source.MISS},
    "SSD, down-weighted": {Source.HIT, Source.MISS},
    "SSD, mostly hits, down-weighted": {Source.HIT, Source.MISS},
    "SSD, filler, down-weighted": {Source.HIT, Source.MISS},
}


def models() -> tuple[HashModel, HashModel]:
    return HashModel(VOCAB_SIZE, seed=0), HashModel(VOCAB_SIZE, seed=0, own_seed=1, agreement=0.3)


def run(policy, batch_size=1):
    rules = Workload("toy", (PROMPT,) * NUM_SEQUENCES, NUM_TOKENS, temperature=1.0, batch_size=batch_size)
    return execute(policy, rules, serial_runner(*models()), seed=11)


def p_value(trace) -> float:
    """Chi-square test of the first three tokens against the target's law."""
    target = models()[0]
    observed = dict.fromkeys(itertools.product(range(VOCAB_SIZE), repeat=3), 0)
    for sequence in trace.sequences:
        observed[sequence.tokens[:3]] += 1
    probabilities = []
    for text in observed:
        rows = [process(target.logits_after(PROMPT + text[:n]), Sampling(1.0))[text[n]] for n in range(3)]
        probabilities.append(float(torch.stack(rows).prod()))
    expected = torch.tensor(probabilities, dtype=torch.float64) * NUM_SEQUENCES
    counts = torch.tensor(list(observed.values()), dtype=torch.float64)
    # Cells that expect fewer than five are pooled.
    rare = expected < 5
    pooled = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected)]
    return float(chisquare(*[x[pooled[1] > 0] for x in pooled]).pvalue)


@pytest.mark.parametrize("name", POLICIES)
def test_emitted_law_is_the_targets(name: str) -> None:
    trace = run(POLICIES[name])
    sources = {r.source for r in trace.rounds if r.index > 0}
    assert sources == SOURCES_AFTER_THE_FIRST[name]
    assert 0 < sum(r.num_accepted for r in trace.rounds) < sum(r.num_drafted for r in trace.rounds)
    assert p_value(trace) > LEVEL


@pytest.mark.parametrize("name", ["SSD, mixed, draft", "SSD, mixed, draft missing", "SSD, down-weighted"])
def test_emitted_law_of_a_batch_is_the_targets(name: str) -> None:
    trace = run(POLICIES[name], batch_size=3)
    redrafts = POLICIES[name].fallback is Fallback.DRAFT
    assert (Source.REDRAFTED in {r.source for r in trace.rounds}) == redrafts
    assert p_value(trace) > LEVEL


def argmax_with_soft_q(drafter, rows, logits, uniforms, drafting, draft_index):
    return logits.argmax(-1), list(process(logits, Sampling(1.0)))


def drawn_from_q_tested_with_another(drafter, rows, logits, uniforms, drafting, draft_index):
    """Draws from q' and hands on q."""
    tokens, _ = HONEST_SAMPLE(drafter, rows, logits, uniforms, drafting, draft_index)
    return tokens, list(process(logits, Sampling(1.0)))


def filler_tested_with_a_draft_law(proposer, tokens, vocab_size):
    return torch.tensor([0.55, 0.05, 0.25, 0.15], dtype=torch.float64).expand(*tokens.shape, vocab_size)


def noise_of_one_purpose(draws, purpose, round_index, num):
    return HONEST_UNIFORMS(draws, Purpose.DRAFT, round_index, num)


HONEST_UNIFORMS = Draws.uniforms
HONEST_SAMPLE = Drafter._sample


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "fault"),
    [
        ("SD", Drafter, "_sample", argmax_with_soft_q),
        ("SSD, every look-up hits", Drafter, "_sample", argmax_with_soft_q),
        ("SD", Draws, "uniforms", noise_of_one_purpose),
        ("SSD, mixed, none", Draws, "uniforms", noise_of_one_purpose),
        ("SSD, down-weighted", Drafter, "_sample", drawn_from_q_tested_with_another),
        ("SSD, mostly hits, down-weighted", Drafter, "_sample", drawn_from_q_tested_with_another),
        ("SSD, mixed, filler", executor.target, "stated_probs", filler_tested_with_a_draft_law),
    ],
)
def test_known_faults_fail_the_test(name: str, owner, attribute, fault, monkeypatch) -> None:
    monkeypatch.setattr(owner, attribute, fault)
    assert p_value(run(POLICIES[name])) < LEVEL
