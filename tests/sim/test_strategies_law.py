"""Losslessness by enumeration over small vocabularies: what is emitted has exactly the target's law."""

from itertools import product

import numpy as np
import pytest

from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.strategies.block_verification import BlockVerification, block_verified
from sim.strategies.tree_verification import acceptance_of_siblings, drawn_siblings, verified_siblings
from sim.theory import acceptance_of, residual_of

V, K = 3, 3
Law = dict[tuple[int, ...], np.ndarray]  # (V,) law of the next token by the tokens before it


def laws(seed: int) -> tuple[Law, Law]:
    """Target and draft with a law of its own after every prefix."""
    rng = np.random.default_rng(seed)
    prefixes = [prefix for length in range(K + 1) for prefix in product(range(V), repeat=length)]
    p = {prefix: rng.dirichlet(np.full(V, 2.0)) for prefix in prefixes}
    return p, {prefix: rng.dirichlet(np.full(V, 2.0)) for prefix in prefixes}


def chance_of(law: Law, text: tuple[int, ...]) -> float:
    return float(np.prod([law[text[:place]][token] for place, token in enumerate(text)]))


def emitted_law(p: Law, q: Law, *, forgets_the_block: bool) -> np.ndarray:
    """(V,) * (K + 1) law of the first K + 1 tokens: one round, and the target alone where it emitted fewer.

    `forgets_the_block` draws the bonus token from the residual of token verification: known to be wrong.
    """
    law = np.zeros((V,) * (K + 1))
    for drafted in product(range(V), repeat=K):
        prefixes = [drafted[:place] for place in range(K + 1)]
        targets, drafts = [p[prefix] for prefix in prefixes], [q[prefix] for prefix in prefixes[:-1]]
        counts, bonus = block_verified(targets, drafts, drafted)
        for count, chance in enumerate(counts):
            residual = residual_of(targets[count], drafts[count]) if forgets_the_block and count < K else bonus[count]
            for token in range(V):
                begun = (*drafted[:count], token)
                weight = chance_of(q, drafted) * chance * residual[token]
                for rest in product(range(V), repeat=K + 1 - len(begun)):
                    text = (*begun, *rest)
                    law[text] += weight * chance_of(p, text) / max(chance_of(p, begun), 1e-300)
    return law


@pytest.mark.parametrize("seed", range(4))
def test_block_verification_emits_the_law_of_the_target(seed: int) -> None:
    p, q = laws(seed)
    target = np.array([chance_of(p, text) for text in product(range(V), repeat=K + 1)]).reshape((V,) * (K + 1))
    np.testing.assert_allclose(emitted_law(p, q, forgets_the_block=False), target, atol=1e-12)
    wrong = emitted_law(p, q, forgets_the_block=True)
    assert abs(wrong - target).sum() / 2 > 1e-3


def record_of_all_texts(p: Law, q: Law) -> AgreementRecord:
    """Every text of K tokens as a prompt of its own."""
    texts = list(product(range(V), repeat=K))
    rows = [(number, place, text) for number, text in enumerate(texts) for place in range(K)]
    at_p, at_q = (np.array([law[text[:place]] for _, place, text in rows]) for law in (p, q))
    token = np.array([text[place] for _, place, text in rows])
    row = np.arange(len(rows))
    order = np.argsort(-at_q, axis=1)
    return AgreementRecord(
        identity={"temperature": 1.0, "max_new_tokens": K, "stop_ids": [], "dataset": "all texts"},
        prompt_length=np.ones(len(texts), dtype=int),
        stopped=np.zeros(len(texts), dtype=bool),
        prompt=np.array([number for number, _, _ in rows]),
        position=np.array([place for _, place, _ in rows]),
        token=token,
        log_p=np.log(at_p[row, token]),
        log_q=np.log(at_q[row, token]),
        rank=(order == token[:, None]).argmax(1),
        overlap=np.minimum(at_p, at_q).sum(1),
        top_token=order,
        top_p=np.take_along_axis(at_p, order, 1),
        top_q=np.take_along_axis(at_q, order, 1),
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_replay_law_of_block_verification_is_that_of_all_drafts(seed: int) -> None:
    """Averaged over the target's texts, accepted counts have the law that they have over the draft's speculations."""
    p, q = laws(seed)
    texts = list(product(range(V), repeat=K))
    weights = np.array([chance_of(p, text) for text in texts])
    replayed = BlockVerification(K).survival(record_of_all_texts(p, q))[:, :, 0] @ weights
    drafted = np.zeros(K + 1)
    for text in texts:
        targets, drafts = [p[text[:place]] for place in range(K + 1)], [q[text[:place]] for place in range(K)]
        counts, _ = block_verified(targets, drafts, text)
        drafted += chance_of(q, text) * counts[::-1].cumsum()[::-1]
    np.testing.assert_allclose(replayed, drafted, atol=1e-12)


def test_the_block_accepts_more_than_token_after_token() -> None:
    """p = (2/3, 1/3) against a draft of (1/3, 2/3), two tokens: 11/9 accepted tokens in place of 10/9."""
    p, q = np.array([2 / 3, 1 / 3]), np.array([1 / 3, 2 / 3])
    accepted = 0.0
    for text in product(range(2), repeat=2):
        counts, _ = block_verified([p] * 3, [q] * 2, text)
        accepted += q[text[0]] * q[text[1]] * float(counts @ np.arange(3))
    assert accepted == pytest.approx(11 / 9)
    assert acceptance_of(p, q) * (1 + acceptance_of(p, q)) == pytest.approx(10 / 9)


def emitted_by_siblings(p: np.ndarray, q: np.ndarray, num: int, *, forgets_the_first: bool) -> np.ndarray:
    law = np.zeros(len(p))
    for siblings, chance in drawn_siblings(q, num):
        if forgets_the_first:  # tests every sibling with the laws of the first one: known to be wrong
            left = 1.0
            for token in siblings:
                passed = min(1.0, p[token] / q[token])
                law[token] += chance * left * passed
                left *= 1 - passed
            law += chance * left * np.asarray(residual_of(p, q))
            continue
        found = verified_siblings(p, q, siblings)
        law[list(siblings)] += chance * found.chances
        law += chance * found.none * found.bonus
    return law


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_siblings_emit_the_law_of_the_target(seed: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(4, 0.8)), rng.dirichlet(np.full(4, 0.8))
    np.testing.assert_allclose(emitted_by_siblings(p, q, num, forgets_the_first=False), p, atol=1e-12)
    if num > 1:
        assert abs(emitted_by_siblings(p, q, num, forgets_the_first=True) - p).sum() / 2 > 0.005


def test_more_siblings_are_accepted_more_often() -> None:
    p, q = np.array([0.45, 0.25, 0.20, 0.10]), np.array([0.15, 0.40, 0.25, 0.20])
    rates = [acceptance_of_siblings(p, q, num) for num in (1, 2, 3, 4)]
    assert rates[0] == pytest.approx(acceptance_of(p, q))
    assert rates == sorted(rates)
    assert rates[3] == pytest.approx(1)


def test_a_sibling_that_the_draft_cannot_give_is_refused() -> None:
    with pytest.raises(BadInput, match="siblings"):
        verified_siblings(np.array([0.5, 0.5]), np.array([1.0, 0.0]), (1,))
