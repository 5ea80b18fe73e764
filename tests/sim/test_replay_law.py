"""The replay law against the real SD/SSD process, token by token, on a Markov pair whose law is known.

The real process drafts from q' (or looks up, or fills in), tests against p, draws the residual and looks the outcome up
in lists built from q. The law sees nothing but a record of the target's own texts. Each comparison is of means per text
of two independent samples, in standard errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from sim.agreement import AgreementRecord
from sim.ngram import ngram_proposal
from sim.policy import Fallback, Policy, Proposer, Speculative, SpeculativeSpeculative
from sim.replay import SOURCES, Replay
from sim.round_law import RoundLaw
from sim.trace import Source
from tests.sim.toy import VOCABULARY, by_place, cut_at, markov, prompts_of, record_of, workload_of

LENGTH = 13
PROMPT_LENGTH = 4
NUM_TEXTS = 16_000  # of either sample
NUM_LOOKED_UP = 6_000  # where every round looks an n-gram up
ENOUGH = 200  # occurrences from which a count is compared
LIMIT = 5.0  # standard errors: 6e-7 for each of the fewer than 500 comparisons in this file, 3e-4 over all
REJECTED = 8.0  # what a negative control must exceed
Totals = dict[str, np.ndarray]  # (num_texts,) by what is counted


def labels(K: int) -> list[str]:
    per_source = ["looked up", "hits", *(f"{k} accepted" for k in range(K + 1))]
    return ["rounds", *(f"{name}, {source.value}" for source in SOURCES for name in per_source)]


# --------------------------------------------------------------------------------------------------- the real process


@dataclass
class RealProcess:
    """Many texts decoded at once under one policy. `mistake` breaks one rule, for negative controls."""

    p: np.ndarray  # (LENGTH, V, V) by place and previous token
    q: np.ndarray
    policy: Policy
    num_texts: int
    seed: int
    temperature: float = 1.0
    stop: int | None = None
    mistake: str | None = None
    totals: Totals = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.p, self.q = by_place(self.p, LENGTH), by_place(self.q, LENGTH)
        order = np.argsort(-self.q, axis=-1, kind="stable")
        self.rank = np.argsort(order, axis=-1)
        if self.temperature == 0:
            self.p, self.q = (np.eye(VOCABULARY)[law.argmax(-1)] for law in (self.p, self.q))
        self.tokens = np.zeros((self.num_texts, PROMPT_LENGTH + LENGTH), dtype=int)
        self.tokens[:, :PROMPT_LENGTH] = prompts_of(self.num_texts, PROMPT_LENGTH, self.seed)
        self.tokens[:, PROMPT_LENGTH] = self.draw(np.repeat(self.p[:1, 0], self.num_texts, 0))
        self.emitted = np.ones(self.num_texts, dtype=int)
        self.ended = self.tokens[:, PROMPT_LENGTH] == self.stop
        self.is_hit = np.zeros(self.num_texts, dtype=bool)
        K = self.policy.speculation_length
        self.totals = {name: np.zeros(self.num_texts) for name in labels(K)}

    def draw(self, weights: np.ndarray) -> np.ndarray:
        cumulative = weights.cumsum(-1)
        goal = self.rng.random(len(weights)) * cumulative[:, -1]
        return (goal[:, None] >= cumulative).sum(-1).clip(max=VOCABULARY - 1)

    def run(self) -> Totals:
        while (at_work := np.flatnonzero(~self.ended & (self.emitted < LENGTH))).size:
            sides = [at_work[self.is_hit[at_work] == (source is Source.HIT)] for source in SOURCES]
            for rows, source in zip(sides, SOURCES, strict=True):
                self.round(rows, source)
        return self.totals

    def round(self, rows: np.ndarray, source: Source) -> None:
        start, K = self.emitted[rows], self.policy.num_drafted(source)
        fan_out = np.array([*self.policy.fan_out(source), *(0,) * (K + 1)])
        looked_up = self.look_up(rows, K) if self.proposer(source) is Proposer.NGRAM else None
        limit = np.minimum(K, LENGTH - start - 1)
        if looked_up is not None:
            limit = np.minimum(limit, (looked_up >= 0).sum(1))
        num_accepted, is_open = np.zeros(len(rows), dtype=int), np.ones(len(rows), dtype=bool)
        bonus, prepared = np.zeros(len(rows), dtype=int), np.zeros(len(rows), dtype=bool)
        stopped = np.zeros(len(rows), dtype=bool)
        for j in range(K):
            live = np.flatnonzero(is_open & (j < limit))
            p, q, rank = self.laws(rows[live], start[live] + j)
            y = looked_up[live, j] if looked_up is not None else None
            tested, y = self.propose(q, rank, int(fan_out[j]), source, y)
            all_rows = np.arange(len(live))
            accepted = self.rng.random(len(live)) * tested[all_rows, y] < p[all_rows, y]
            residual = np.maximum(0, p - tested)
            x = self.draw(residual)
            drafted_before = rank[all_rows, y] < rank[all_rows, x]
            place_in_list = rank[all_rows, x] - (drafted_before & (self.mistake != "rejected token prepared"))
            bonus[live], prepared[live] = x, place_in_list < fan_out[j]
            self.tokens[rows[live], PROMPT_LENGTH + start[live] + j] = np.where(accepted, y, 0)
            num_accepted[live] += accepted
            stopped[live] = accepted & (y == self.stop)
            is_open[live] = accepted & ~stopped[live]
        complete = np.flatnonzero(is_open)
        p, _, rank = self.laws(rows[complete], start[complete] + limit[complete])
        bonus[complete] = self.draw(p)
        at_rank = rank[np.arange(len(complete)), bonus[complete]]
        prepared[complete] = at_rank < fan_out[limit[complete]]
        self.finish(rows, source, num_accepted, bonus, prepared, stopped)

    def finish(self, rows, source, num_accepted, bonus, prepared, stopped) -> None:
        going = np.flatnonzero(~stopped)
        self.tokens[rows[going], PROMPT_LENGTH + self.emitted[rows[going]] + num_accepted[going]] = bonus[going]
        self.emitted[rows] += num_accepted + ~stopped
        self.ended[rows] = stopped | (bonus == self.stop)
        goes_on = ~self.ended[rows] & (self.emitted[rows] < LENGTH)
        is_ssd = isinstance(self.policy, SpeculativeSpeculative)
        self.is_hit[rows] = prepared & goes_on & is_ssd
        self.totals["rounds"][rows] += 1
        self.totals[f"looked up, {source.value}"][rows] += goes_on
        self.totals[f"hits, {source.value}"][rows] += self.is_hit[rows]
        for k in range(self.policy.speculation_length + 1):
            self.totals[f"{k} accepted, {source.value}"][rows] += num_accepted == k

    def proposer(self, source: Source) -> Proposer:
        return self.policy.drafting(source).proposer

    def laws(self, rows: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        previous = self.tokens[rows, PROMPT_LENGTH + place - 1]
        return self.p[place, previous], self.q[place, previous], self.rank[place, previous]

    def look_up(self, rows: np.ndarray, num_tokens: int) -> np.ndarray:
        """(rows, num_tokens) proposals, -1 beyond their end."""
        unknown = 1 if self.mistake == "n-gram without the pending token" else 0
        found = np.full((len(rows), num_tokens), -1)
        for row, index in zip(found, rows, strict=True):
            known = self.tokens[index, : PROMPT_LENGTH + self.emitted[index] - unknown].tolist()
            proposal = ngram_proposal(known, num_tokens)
            row[: len(proposal)] = proposal
        return found

    def propose(self, q, rank, fan_out: int, source: Source, looked_up):
        """The law that draft tokens are tested with, and a token of each row."""
        proposer = self.proposer(source)
        if proposer is Proposer.NGRAM:
            return q if self.mistake == "n-gram tested with q" else np.eye(VOCABULARY)[looked_up], looked_up
        if proposer is Proposer.FILLER:
            uniform = np.full_like(q, 1 / VOCABULARY)
            return q if self.mistake == "filler tested with q" else uniform, self.draw(uniform)
        C = getattr(self.policy, "downweight", 1.0)
        num = fan_out + (self.mistake != "top F down-weighted") if fan_out else 0
        weights = np.where(rank < num, C, 1.0) * q
        sampled = weights / weights.sum(-1, keepdims=True)
        return q if self.mistake == "tested with q" else sampled, self.draw(sampled)


# ------------------------------------------------------------------------------------------------------------ the law


def replayed(record: AgreementRecord, policy: Policy) -> Totals:
    """Expected totals of every recorded text: a forward recursion over (tokens emitted, source of the round)."""
    replay = Replay(record, workload_of(record))
    laws = {source: RoundLaw(replay, policy.drafting(source)) for source in SOURCES}
    K = policy.speculation_length
    totals = {name: np.zeros(record.num_prompts) for name in labels(K)}
    mass = {source: np.zeros((record.num_prompts, replay.longest + K + 2)) for source in SOURCES}
    mass[Source.MISS][:, 1] = replay.lengths > 1
    for i in range(1, replay.longest):
        for source, law in laws.items():
            here = mass[source][:, i]
            totals["rounds"] += here
            for k, ended in enumerate(law.ended[:, :, i] * here):
                going = ended * law.goes_on(k)[:, i]
                hits = ended * law.hits[k, :, i]
                totals[f"{k} accepted, {source.value}"] += ended
                totals[f"looked up, {source.value}"] += going
                totals[f"hits, {source.value}"] += hits
                mass[Source.HIT][:, i + k + 1] += hits
                mass[Source.MISS][:, i + k + 1] += going - hits
    return totals


def differences(real: Totals, law: Totals) -> dict[str, float]:
    """Difference of the means per text in standard errors, by what is counted often enough."""
    found = {}
    for name, seen in real.items():
        expected = law[name]
        if max(seen.sum(), expected.sum()) < ENOUGH:
            continue
        error = np.hypot(seen.std() / np.sqrt(len(seen)), expected.std() / np.sqrt(len(expected)))
        found[name] = abs(seen.mean() - expected.mean()) / max(error, 1e-9)
    return found


@cache
def toy_record(pair_seed: int, num_texts: int, stop: int | None = None) -> AgreementRecord:
    p, q = markov(pair_seed)
    record = record_of(p, q, num_prompts=num_texts, length=LENGTH, seed=50 + pair_seed, prompt_length=PROMPT_LENGTH)
    return record if stop is None else cut_at(record, stop)


def compare(policy, pair_seed: int, *, law_of=None, stop: int | None = None, mistake: str | None = None):
    looks_up = getattr(policy, "fallback", None) is Fallback.NGRAM
    num_texts = NUM_LOOKED_UP if looks_up else NUM_TEXTS
    p, q = markov(pair_seed)
    real = RealProcess(p, q, policy, num_texts, seed=10 + pair_seed, stop=stop, mistake=mistake).run()
    return differences(real, replayed(toy_record(pair_seed, num_texts, stop), law_of or policy))


def ssd(after_hit, after_miss, fallback, downweight=1.0) -> SpeculativeSpeculative:
    return SpeculativeSpeculative(len(after_hit) - 1, after_hit, after_miss, fallback, downweight)


POLICIES = [
    Speculative(3),
    ssd((2, 1), (1, 2), Fallback.DRAFT, 0.5),
    ssd((2, 1, 1, 2), (1, 1, 0, 2), Fallback.DRAFT),
    ssd((4, 3, 2, 1, 5), (1, 0, 2, 1, 3), Fallback.DRAFT_MISSING, 0.2),
    ssd((1, 0, 3), (3,), Fallback.NONE),
    ssd((2, 1, 3), (2,), Fallback.NONE, 0.2),
    ssd((2, 1, 1, 2), (1, 2, 0, 1), Fallback.NGRAM),
    ssd((1, 2, 1, 1, 3), (2, 1, 1, 2, 1), Fallback.NGRAM, 0.5),
    ssd((2, 1, 2), (1, 3, 1), Fallback.FILLER),
    ssd((1, 2, 1, 4), (2, 1, 3, 1), Fallback.FILLER, 0.2),
]


@pytest.mark.parametrize("pair_seed", [1, 2])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_the_law_is_the_real_process(policy, pair_seed):
    """Rounds, look-ups and hits by source, accept counts by source."""
    found = compare(policy, pair_seed)
    assert len(found) >= 5
    assert max(found.values()) < LIMIT, found


@pytest.mark.parametrize("policy", [POLICIES[3], POLICIES[7], POLICIES[9]], ids=lambda policy: policy.name)
def test_the_law_with_a_stop_token(policy):
    """Texts end at token 3, which may be drafted and accepted in the middle of a round."""
    found = compare(policy, 1, stop=3)
    assert max(found.values()) < LIMIT, found


@pytest.mark.parametrize(
    ("policy", "mistake"),
    [
        (POLICIES[2], "rejected token prepared"),
        (POLICIES[1], "rejected token prepared"),
        (POLICIES[1], "tested with q"),
        (POLICIES[3], "tested with q"),
        (POLICIES[3], "top F down-weighted"),
        (POLICIES[6], "n-gram without the pending token"),
        (POLICIES[7], "n-gram tested with q"),
        (POLICIES[8], "filler tested with q"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_process_that_breaks_a_rule_is_told_apart(policy, mistake):
    """Negative controls: the same statistic rejects each of them."""
    assert max(compare(policy, 1, mistake=mistake).values()) > REJECTED


@pytest.mark.parametrize("law_of", [(0.5, Fallback.DRAFT), (1.0, Fallback.DRAFT)])
def test_another_weight_is_told_apart(law_of):
    downweight, fallback = law_of
    lists = (2, 1, 1, 2), (1, 1, 0, 2)
    found = compare(ssd(*lists, Fallback.DRAFT, 0.2), 1, law_of=ssd(*lists, fallback, downweight))
    assert max(found.values()) > REJECTED


# ------------------------------------------------------------------------------------------------------ temperature 0

GREEDY = [policy for policy in POLICIES if getattr(policy, "downweight", 1.0) == 1.0]


def greedy_pair(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Laws that change from place to place, so that greedy texts do not run in a circle."""
    pairs = [markov(1000 * seed + place) for place in range(LENGTH)]
    return np.stack([p for p, _ in pairs]), np.stack([q for _, q in pairs])


@pytest.mark.parametrize("policy", GREEDY, ids=lambda policy: policy.name)
def test_greedy_rounds_are_those_of_the_law(policy):
    """Without a filler nothing is random: every text has the very same rounds. With one: as above."""
    num_texts = 4000 if getattr(policy, "fallback", None) is Fallback.FILLER else 12
    for seed in range(1 if num_texts > 12 else 10):
        p, q = greedy_pair(seed)
        record = record_of(p, q, num_prompts=num_texts, length=LENGTH, seed=seed, temperature=0.0)
        real = RealProcess(p, q, policy, num_texts, seed, temperature=0.0).run()
        law = replayed(record, policy)
        if num_texts > 12:
            assert max(differences(real, law).values()) < LIMIT
        else:
            assert all(np.array_equal(real[name], law[name]) for name in real)
