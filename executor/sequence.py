"""The sequences of a batch while they are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executor.draws import Draws
from executor.speculation_cache import Speculation
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
    """How the verification of a row ended, and how many tokens the row may still emit."""

    outcome: Outcome
    remaining: int


class OpenBatch:
    """Sequences decoded together, numbered by their row; `rows` are those still open."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.sequences = [OpenSequence(request) for request in requests]
        self.rows = list(range(len(requests)))

    def commit(
        self, outcomes: Mapping[int, Outcome], speculations: Mapping[int, Speculation]
    ) -> dict[int, tuple[int, int]]:
        """`OpenSequence.commit` of each row; rows that end by it leave."""
        counts = {row: self.sequences[row].commit(outcomes[row], speculations[row]) for row in self.rows}
        self.rows = [row for row in self.rows if self.sequences[row].is_open]
        return counts

    def verified(self, outcomes: Mapping[int, Outcome]) -> dict[int, Verified]:
        """What the draft must know of the open rows."""
        return {row: Verified(outcomes[row], self.sequences[row].remaining) for row in self.rows}
