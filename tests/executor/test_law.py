"""At temperature 1 every decoder emits the target's law: whole runs on a toy vocabulary against exact enumeration."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chisquare

import executor.row_sampler
import executor.target
from executor.draws import Draws, Purpose
from executor.execute import execute
from executor.row_sampler import RowSampler
from executor.sampling import penalised, process
from executor.toy_model import HashModel, serial_runner
from sim.policy import Autoregressive, Fallback, Speculative, SpeculativeSpeculative
from sim.trace import Source
from sim.workload import Sampling, Workload

VOCAB_SIZE = 4
PROMPT = (1, 2)
NUM_TOKENS = 4  # decoded; the law of the first 3 is tested
NUM_SEQUENCES = 450  # every known fault below fails with a p-value under 3e-6
PLAIN = Sampling(1.0)
MISSING_ID = 1
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


def p_value(sequences, sampling: Sampling = PLAIN) -> float:
    """Chi-square test of the first three tokens against the target's law; 0 if one of them cannot occur."""
    observed = dict.fromkeys(itertools.product(range(VOCAB_SIZE), repeat=3), 0)
    for sequence in sequences:
        observed[sequence.tokens[:3]] += 1
    probabilities = [math.prod(probability(text[:n], text[n], sampling) for n in range(3)) for text in observed]
    expected = torch.tensor(probabilities, dtype=torch.float64) * len(sequences)
    counts = torch.tensor(list(observed.values()), dtype=torch.float64)
    if counts[expected == 0].any():
        return 0.0
    # Cells that expect fewer than five are pooled.
    rare = expected < 5
    pooled = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected)]
    cells = [x[pooled[1] > 0] for x in pooled]
    return float(chisquare(*cells).pvalue) if len(cells[0]) > 1 else 1.0


def probability(text: tuple[int, ...], token: int, sampling: Sampling) -> float:
    """Of a token after the prompt and a text."""
    known = PROMPT + text
    logits = penalised(models()[0].logits_after(known)[None], sampling.repetition_penalty, known)
    return float(process(logits, sampling)[0, token])


@pytest.mark.parametrize("name", POLICIES)
def test_emitted_law_is_the_targets(name: str) -> None:
    trace = run(POLICIES[name])
    sources = {r.source for r in trace.rounds if r.index > 0}
    assert sources == SOURCES_AFTER_THE_FIRST[name]
    assert 0 < sum(r.num_accepted for r in trace.rounds) < sum(r.num_drafted for r in trace.rounds)
    assert p_value(trace.sequences) > LEVEL


@pytest.mark.parametrize("name", ["SSD, mixed, draft", "SSD, mixed, draft missing", "SSD, down-weighted"])
def test_emitted_law_of_a_batch_is_the_targets(name: str) -> None:
    trace = run(POLICIES[name], batch_size=3)
    redrafts = POLICIES[name].fallback is Fallback.DRAFT
    assert (Source.REDRAFTED in {r.source for r in trace.rounds}) == redrafts
    assert p_value(trace.sequences) > LEVEL


@dataclass
class AsItWent:
    """An adaptive choice of the next policy by what became of the last rounds."""

    policies: tuple
    name = "as it went"

    def to_dict(self):
        return {"kind": "as it went"}

    def start(self):
        return AsItWent(self.policies)

    def __post_init__(self) -> None:
        self._state = 1

    @property
    def policy(self):
        return self.policies[self._state % len(self.policies)]

    def observe(self, seen) -> None:
        self._state = (
            5 * self._state + 3 * seen.num_accepted + seen.num_drafted + 7 * (seen.source is Source.HIT)
        ) % 1009


WITHOUT_DOWNWEIGHT = tuple(policy for policy in POLICIES.values() if getattr(policy, "downweight", 1) == 1)


def test_a_choice_by_what_was_seen_does_not_bend_the_law() -> None:
    trace = run(AsItWent((Autoregressive(), Speculative(1), *WITHOUT_DOWNWEIGHT)), batch_size=3)
    assert {r.policy for r in trace.rounds} >= {policy.name for policy in WITHOUT_DOWNWEIGHT}
    assert p_value(trace.sequences) > LEVEL


class LacksAnId(HashModel):
    """As a draft with a reduced head: of one id it says nothing."""

    def _logits(self, row, seen):
        return super()._logits(row, seen).index_fill(-1, torch.tensor(MISSING_ID), -torch.inf)


@pytest.mark.parametrize("name", ["SD", "SSD, mixed, draft"])
def test_a_draft_that_lacks_an_id_changes_no_law(name: str) -> None:
    target, draft = models()[0], LacksAnId(VOCAB_SIZE, seed=0, own_seed=1, agreement=0.3)
    rules = Workload("toy", (PROMPT,) * (NUM_SEQUENCES // 2), NUM_TOKENS, temperature=1.0)
    trace = execute(POLICIES[name], rules, serial_runner(target, draft), seed=11)
    assert any(MISSING_ID in sequence.tokens for sequence in trace.sequences)
    assert sum(r.num_accepted for r in trace.rounds) > 0
    assert p_value(trace.sequences) > LEVEL


def argmax_with_soft_q(sampler, rows, logits, uniforms, drafting, draft_index):
    return logits.argmax(-1), list(process(logits, Sampling(1.0)))


def drawn_from_q_tested_with_another(sampler, rows, logits, uniforms, drafting, draft_index):
    """Draws from q' and hands on q."""
    tokens, _ = HONEST_SAMPLE(sampler, rows, logits, uniforms, drafting, draft_index)
    return tokens, list(process(logits, Sampling(1.0)))


def filler_tested_with_a_draft_law(proposer, tokens, vocab_size):
    return torch.tensor([0.55, 0.05, 0.25, 0.15], dtype=torch.float64).expand(*tokens.shape, vocab_size)


def noise_of_one_purpose(draws, purpose, round_index, num):
    return HONEST_UNIFORMS(draws, Purpose.DRAFT, round_index, num)


HONEST_UNIFORMS = Draws.uniforms
HONEST_SAMPLE = RowSampler.sample


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "fault"),
    [
        ("SD", RowSampler, "sample", argmax_with_soft_q),
        ("SSD, every look-up hits", RowSampler, "sample", argmax_with_soft_q),
        ("SD", Draws, "uniforms", noise_of_one_purpose),
        ("SSD, mixed, none", Draws, "uniforms", noise_of_one_purpose),
        ("SSD, down-weighted", RowSampler, "sample", drawn_from_q_tested_with_another),
        ("SSD, mostly hits, down-weighted", RowSampler, "sample", drawn_from_q_tested_with_another),
        ("SSD, mixed, filler", executor.target, "stated_probs", filler_tested_with_a_draft_law),
    ],
)
def test_known_faults_fail_the_test(name: str, owner, attribute, fault, monkeypatch) -> None:
    monkeypatch.setattr(owner, attribute, fault)
    assert p_value(run(POLICIES[name]).sequences) < LEVEL


# ------------------------------------------------------------------------------------------- rows of unequal settings

UNEQUAL = (
    Sampling(),
    Sampling(1.0),
    Sampling(1.0, top_k=2),
    Sampling(0.8, top_p=0.85),
    Sampling(1.2, min_p=0.3),
    Sampling(1.0, repetition_penalty=5.0),
)
NUM_OF_EACH = 250
OF_UNEQUAL_ROWS = {
    "SD": Speculative(2),
    "SSD, mixed, draft missing, down-weighted": SpeculativeSpeculative(
        2, (1, 1, 2), (1, 2, 1), Fallback.DRAFT_MISSING, 0.3
    ),
}


def run_under(policy, sampling: tuple[Sampling, ...], batch_size: int):
    rules = Workload("toy", (PROMPT,) * len(sampling), NUM_TOKENS, sampling=sampling, batch_size=batch_size)
    return execute(policy, rules, serial_runner(*models()), seed=12)


@pytest.mark.parametrize("name", OF_UNEQUAL_ROWS)
def test_each_row_of_a_batch_has_the_targets_law_under_its_own_settings(name: str) -> None:
    """Six tests a run: a lossless decoder fails one of them with probability 6e-4 at most; the seed is fixed."""
    trace = run_under(OF_UNEQUAL_ROWS[name], UNEQUAL * NUM_OF_EACH, len(UNEQUAL))
    if name != "SD":
        assert {r.source for r in trace.rounds if r.index} == {Source.HIT, Source.MISS}
    for place, sampling in enumerate(UNEQUAL):
        assert p_value(trace.sequences[place :: len(UNEQUAL)], sampling) > LEVEL, sampling


def drawn_from_processed_tested_with_raw(logits, uniforms, sampling, drafting, draft_index):
    tokens, _ = HONEST_SAMPLE_ALIKE(logits, uniforms, sampling, drafting, draft_index)
    return tokens, process(logits, Sampling(sampling.temperature))


def raw_at_draft_positions(logits, sampling):
    """Only the last position, that of the bonus token after full acceptance, is processed."""
    probs = process(logits, Sampling(sampling.temperature))
    probs[..., -1, :] = process(logits[..., -1, :], sampling)
    return probs


def blind_to_what_was_drafted(logits, penalty, text):
    """All positions are penalised as the first one is."""
    if len(logits) == 1:
        return penalised(logits, penalty, text)
    return torch.cat([penalised(row[None], penalty, text[: len(text) - len(logits) + 1]) for row in logits])


HONEST_SAMPLE_ALIKE = executor.row_sampler._sample_alike


@pytest.mark.parametrize(
    ("sampling", "owner", "attribute", "fault"),
    [
        (UNEQUAL[2], executor.row_sampler, "_sample_alike", drawn_from_processed_tested_with_raw),
        (UNEQUAL[3], executor.target, "process", raw_at_draft_positions),
        (UNEQUAL[5], executor.target, "penalised", blind_to_what_was_drafted),
    ],
)
def test_known_faults_of_processing_fail_the_test(sampling, owner, attribute, fault, monkeypatch) -> None:
    monkeypatch.setattr(owner, attribute, fault)
    assert p_value(run_under(Speculative(2), (sampling,) * 1200, batch_size=12).sequences, sampling) < LEVEL
