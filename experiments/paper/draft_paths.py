"""Rounds of a greedy text that choose the outcomes to prepare anew, by the draft model's probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from experiments.paper.constant_times import StepCosts
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.expectation import Expectation

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Outcomes = set[tuple[int, int]]  # accept count and bonus token
Choice = Callable[[IntArray, FloatArray], Outcomes]


@dataclass(frozen=True)
class DraftPaths:
    """What the draft model holds for likely along the path that it would draft from a position on.

    `top_token` and `top_q` are (n, K + 1, M) over the rows of a record at temperature 0: entry d of a row is the law of
    the token after d draft tokens, best first. `experiments.scripts.record_agreement` makes them.
    """

    record: AgreementRecord
    top_token: IntArray
    top_q: FloatArray

    @classmethod
    def read(cls, record: AgreementRecord, path: Path) -> DraftPaths:
        """Raises `BadInput` if the file is not of this record."""
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        if table.num_rows != len(record.token):
            raise BadInput(str(path), f"must have {len(record.token)} rows, as its record", table.num_rows)
        along = [np.array(table[name].to_pylist()) for name in ("top_token", "top_q")]
        num_candidates = min(record.num_candidates, 8)
        shape = (len(record.token), -1, num_candidates)
        first = (record.top_token[:, None, :num_candidates], record.top_q[:, None, :num_candidates])
        tokens, probs = (np.concatenate([f, a.reshape(shape)], 1) for f, a in zip(first, along, strict=True))
        return cls(record, tokens, probs)

    @property
    def speculation_length(self) -> int:
        return self.top_token.shape[1] - 1

    @cached_property
    def _first_row(self) -> IntArray:
        return np.concatenate([[0], np.cumsum(self.record.lengths)])

    def play(self, choice: Choice, prompts: IntArray, costs: StepCosts) -> Expectation:
        """Rounds of some prompts with the draft as fallback, one look-up after another.

        `choice` is given (num_drafted + 1, M) tokens and probabilities along the path of a round and names the outcomes
        to prepare. Builds must fit beside a verification.
        """
        if costs.build(self.speculation_length) > 1:
            raise BadInput("costs", "must leave room for a build beside a verification", costs.build(1))
        totals = np.array([self._play(choice, int(prompt), costs) for prompt in prompts]).T
        tokens, rounds, seconds, lookups, hits = totals
        nothing = np.zeros_like(lookups)
        return Expectation(tokens, rounds, seconds, np.stack([lookups, nothing]), np.stack([hits, nothing]))

    def _play(self, choice: Choice, prompt: int, costs: StepCosts) -> tuple[float, float, float, float, float]:
        """Tokens, rounds, seconds, look-ups and hits of one prompt."""
        record, length = self.record, int(self.record.lengths[prompt])
        place, is_hit = 1, False
        rounds = verifications = hits = lookups = 0.0
        while place < length:
            row = int(self._first_row[prompt]) + place
            drafted = min(self.speculation_length, record.max_new_tokens - place - 1)
            tested = record.rank[row : row + min(drafted, length - place)] == 0
            accepted = int(np.cumprod(tested).sum())
            verifications += 1 + (0 if is_hit else drafted * costs.draft_step)
            rounds += 1
            if accepted + 1 < length - place:
                prepared = choice(self.top_token[row, : drafted + 1], self.top_q[row, : drafted + 1])
                is_hit = (accepted, int(record.token[row + accepted])) in prepared
                lookups, hits = lookups + 1, hits + is_hit
            place += accepted + 1
        return float(length - 1), rounds, verifications * costs.verify_s, lookups, hits


def by_list(fan_out: tuple[int, ...]) -> Choice:
    """The same list in every round."""

    def choose(tokens: IntArray, probs: FloatArray) -> Outcomes:
        rejected = [1] * (len(tokens) - 1) + [0]
        return {
            (k, int(token))
            for k, (row, start) in enumerate(zip(tokens, rejected, strict=True))
            for token in row[start : start + fan_out[k]]
        }

    return choose


def by_probability(budget: int, exponent: float = 1.0) -> Choice:
    """The outcomes of the largest probability, for whom a draft token of probability q is right with q^exponent."""

    def choose(tokens: IntArray, probs: FloatArray) -> Outcomes:
        is_right = probs[:-1, 0] ** exponent
        score = probs.copy()
        score[:-1] *= ((1 - is_right) / np.maximum(1 - probs[:-1, 0], 1e-9))[:, None]
        score[:-1, 0] = -1.0  # the draft token itself is no bonus token after a rejection
        score *= np.concatenate([[1.0], np.cumprod(is_right)])[:, None]
        best = np.argsort(-score, axis=None, kind="stable")[:budget]
        return {(int(k), int(tokens[k, m])) for k, m in zip(*np.unravel_index(best, score.shape), strict=True)}

    return choose


def calibrated_exponent(record: AgreementRecord) -> float:
    """The exponent under which draft tokens are right as often as they are, on average over greedy texts."""
    confidence = record.top_q[record.position > 0, 0]
    is_right = float((record.rank[record.position > 0] == 0).mean())
    return float(brentq(lambda exponent: (confidence**exponent).mean() - is_right, 1e-6, 100.0))
