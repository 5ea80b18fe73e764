"""The sequences of a batch while they are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executor.draws import Draws
from executor.speculation_cache import Speculation
from sim.policy import Policy
from sim.trace import Outcome


@dataclass(frozen=True)
class Request:
    """What is asked for. `occurrence` counts the earlier requests with the same prompt."""

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: int
    occurrence: int = 0

    def draws(self) -> Draws:
        return Draws(self.seed, self.prompt, self.occurrence)


class OpenSequence:
    """The tokens generated so far. It is open until a stop token or the cap."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.stopped = False

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def is_open(self) -> bool:
        return self.remaining > 0 and not self.stopped

    def commit(self, outcome: Outcome, speculation: Speculation) -> tuple[int, int]:
        """Append the accepted draft tokens and the bonus token, up to the first stop token.

        Returns how many draft tokens and how many tokens in all were committed.
        """
        accepted = speculation.tokens[: outcome.num_accepted]
        emitted = (*accepted, outcome.bonus_token)
        for position, token in enumerate(emitted):
            if token in self.request.stop_ids:
                self.stopped = True
                emitted = emitted[: position + 1]
                break
        self.tokens += emitted
        return min(len(accepted), len(emitted)), len(emitted)


@dataclass(frozen=True, slots=True)
class Verified:
    """How the verification of a row's last speculation ended, and how many tokens the row may still emit.

    `since` are the tokens of the rounds after it, which verified no speculation: one each.
    """

    outcome: Outcome
    remaining: int
    since: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What the target asks for before a round: speculations of the rows that go on, under a policy."""

    policy: Policy
    verified: Mapping[int, Verified]

    @property
    def num_rounds_without(self) -> int:
        """Rounds since the last question. The rows of a batch have them together."""
        return max((len(v.since) for v in self.verified.values()), default=0)


class OpenBatch:
    """Sequences decoded together, numbered by their row; `rows` are those still open."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.sequences = [OpenSequence(request) for request in requests]
        self.rows = list(range(len(requests)))
        self._is_asked = True  # the prefill is as a round that the draft was asked about
        self._outcomes: Mapping[int, Outcome] = {}
        self._since: list[Mapping[int, Outcome]] = []

    def commit(
        self, outcomes: Mapping[int, Outcome], speculations: Mapping[int, Speculation]
    ) -> dict[int, tuple[int, int]]:
        """`OpenSequence.commit` of each row; rows that end by it leave."""
        counts = {row: self.sequences[row].commit(outcomes[row], speculations[row]) for row in self.rows}
        self.rows = [row for row in self.rows if self.sequences[row].is_open]
        if self._is_asked:
            self._outcomes, self._since, self._is_asked = outcomes, [], False
        else:
            self._since.append(outcomes)
        return counts

    def question(self, policy: Policy) -> Question:
        """For the next round of the open rows, with all that happened since the last question."""
        self._is_asked = True
        return Question(policy, {row: self._verified(row) for row in self.rows})

    def _verified(self, row: int) -> Verified:
        since = tuple(outcomes[row].bonus_token for outcomes in self._since)
        return Verified(self._outcomes[row], self.sequences[row].remaining, since)
