"""Dumps of log-probabilities: what is exact, what is bounded, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from calibration.importers.imported import Source, Told
from calibration.importers.logprobs import import_logprobs
from sim.errors import BadInput
from tests.calibration.importers.samples import sample

ECHO = [sample("echo_target.json"), sample("echo_draft.json")]
IDS = [sample("ids_target.jsonl"), sample("ids_draft.jsonl")]
TOLD = Told(prompt_tokens=2, temperature=1)


def test_probabilities_of_the_text_are_exact_and_the_rest_is_bounded() -> None:
    """Position 2 of the echo: x = " today" has p = .4, q = .1; "." has p = .3, q = .5, " and" q = .2."""
    low, high = import_logprobs(ECHO, TOLD).records.values()
    assert low.num_candidates == 2 and low.prompt_length.tolist() == [2]
    assert low.acceptance == pytest.approx([math.exp(-0.1), 0.6 / 0.8, 0.1 / 0.4, 0.8 / 0.9], rel=1e-4)
    assert low.acceptance == pytest.approx(high.acceptance)
    assert low.rank.tolist() == [0, 0, 3, 0] and high.rank.tolist() == [0, 0, 2, 0]
    # both list: .1 of x, .3 of "."; " and" can have up to .3 of p, so .2 of q; no list holds .2 of q and .3 of p.
    assert low.overlap[2] == pytest.approx(0.4, abs=1e-4) and high.overlap[2] == pytest.approx(0.7, abs=1e-3)


def test_ranks_and_ids_of_vllm_are_taken_as_they_are() -> None:
    low, high = import_logprobs(IDS, TOLD).records.values()
    assert low.token.tolist() == [9, 4] and low.rank.tolist() == high.rank.tolist() == [0, 6]
    assert low.top_token.tolist() == [[9, 3], [5, 3]] and low.prompt_tokens == ((1, 7),)


def test_at_temperature_0_one_record_says_all() -> None:
    imported = import_logprobs(IDS, Told(prompt_tokens=2, temperature=0))
    (record,) = imported.records.values()
    assert record.acceptance.tolist() == [1, 0]
    assert imported.learned["acceptance.records"] == ["agreement.parquet"]


def test_a_text_that_is_not_the_targets_own_is_refused_at_temperature_0() -> None:
    with pytest.raises(BadInput, match="every token is its first, got '1 of 5 tokens"):
        import_logprobs(ECHO, Told(prompt_tokens=1, temperature=0))


# ------------------------------------------------------------------------------------------- dumps of known laws

VOCABULARY, TOP = 12, 4
LAWS = np.random.default_rng(1)


def known_laws(num: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """p, q and a token drawn as after a rejection, from (p - q)+."""
    for _ in range(num):
        p, q = LAWS.dirichlet(np.full(VOCABULARY, 0.5), size=2) * 0.999 + 0.001 / VOCABULARY
        excess = np.maximum(0, p - q)
        yield p, q, int(LAWS.choice(VOCABULARY, p=excess / excess.sum()))


def as_ids(name: str, laws: list[tuple[np.ndarray, int]]) -> Source:
    rows: list[dict | None] = [None]
    for law, token in laws:
        order = np.argsort(-law).tolist()
        kept = [token, *(other for other in order[:TOP] if other != token)]
        rows.append({str(k): {"logprob": float(np.log(law[k])), "rank": order.index(k) + 1} for k in kept})
    tokens = [0, *(token for _, token in laws)]
    return Source(name, json.dumps({"model": name, "choices": [{"prompt_token_ids": tokens, "prompt_logprobs": rows}]}))


def as_echo(name: str, laws: list[tuple[np.ndarray, int]]) -> Source:
    tops: list[dict | None] = [None]
    for law, token in laws:
        kept = {*np.argsort(-law)[:TOP].tolist(), token}
        tops.append({f"t{k}": float(np.log(law[k])) for k in kept})
    tokens = ["t0", *(f"t{token}" for _, token in laws)]
    own = [None, *(float(np.log(law[token])) for law, token in laws)]
    logprobs = {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops}
    return Source(name, json.dumps({"choices": [{"logprobs": logprobs}]}))


@pytest.mark.parametrize("dump", [as_ids, as_echo])
def test_bounds_hold_the_truth_at_every_fan_out(dump) -> None:
    """Of 400 random pairs of laws: acceptance exactly, overlap and hits after a rejection between the two ends."""
    laws = list(known_laws(400))
    sources = [dump("target", [(p, x) for p, _, x in laws]), dump("draft", [(q, x) for _, q, x in laws])]
    low, high = import_logprobs(sources, Told(prompt_tokens=1, temperature=1)).records.values()
    assert low.num_candidates == TOP
    assert low.acceptance == pytest.approx([min(1, q[x] / p[x]) for p, q, x in laws])
    overlap = np.array([np.minimum(p, q).sum() for p, q, _ in laws])
    assert (low.overlap <= overlap + 1e-9).all() and (overlap <= high.overlap + 1e-9).all()
    for fan_out in range(1, TOP + 1):
        truth = np.array([hit_after_rejection(p, q, x, fan_out) for p, q, x in laws])
        least, most = low.hit_after_rejection(fan_out), high.hit_after_rejection(fan_out)
        assert (least <= truth + 1e-9).all() and (truth <= most + 1e-9).all()


def hit_after_rejection(p: np.ndarray, q: np.ndarray, x: int, fan_out: int) -> float:
    """Probability that x is among the top of q without y, y from (q - p)+."""
    order = np.argsort(-q).tolist()
    excess = np.maximum(0, q - p)
    excess /= excess.sum()
    prepared = [set([token for token in order if token != y][:fan_out]) for y in range(VOCABULARY)]
    return float(sum(excess[y] for y in range(VOCABULARY) if x in prepared[y]))


# ------------------------------------------------------------------------------------------------------ refusals


def swapped(source: Source, old: str, new: str) -> Source:
    assert old in source.text
    return replace(source, text=source.text.replace(old, new))


@pytest.mark.parametrize(
    ("sources", "told", "message"),
    [
        (ECHO, Told(prompt_tokens=2), "--temperature: must be told, 0 or 1"),
        (ECHO, Told(prompt_tokens=2, temperature=0.7), "--temperature: must be told, 0 or 1"),
        (ECHO, Told(temperature=1), "does not say the prompt tokens; give --prompt-tokens"),
        (ECHO, Told(prompt_tokens=6, temperature=1), "must be longer than its prompt"),
        (ECHO[:1], TOLD, "must be two"),
        ([ECHO[0], IDS[1]], TOLD, "must have the tokens of echo_target.json, got 'position 0'"),
        ([ECHO[0], swapped(ECHO[1], '" blue", " today"', '" blue", " now"')], TOLD, "got 'position 4'"),
        (
            [swapped(IDS[0], '"prompt_token_ids": [1, 7', '"prompt_token_ids": [1, 8'), IDS[1]],
            TOLD,
            "must be the first",
        ),
        ([swapped(ECHO[0], "[null, -3.0", "[-1.0, -3.0"), ECHO[1]], TOLD, "ask with echo"),
        ([Source("other.json", '{"choices": [{"text": "a"}]}'), ECHO[1]], TOLD, "must hold logprobs"),
    ],
)
def test_what_cannot_be_known_is_refused(sources: list[Source], told: Told, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        import_logprobs(sources, told)
