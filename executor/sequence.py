"""The sequences of a batch while they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor.draws import Draws
from executor.generated_text import GeneratedText
from executor.speculation_cache import Speculation
from sim.trace import Outcome, StopReason
from sim.workload import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Request:
    """What is asked for. `sampling` is the law of the tokens; the random numbers depend on `seed`, on the prompt and on
    `occurrence`, which counts the earlier requests with the same prompt that have no seed of their own either."""

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int
    occurrence: int = 0
    stop_strings: tuple[str, ...] = ()
    log_probs: bool = False  # of the tokens are asked for

    def draws(self) -> Draws:
        return Draws(self.seed, self.prompt, self.occurrence)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What a round, or the prefill, added to a sequence.

    `text` is what became complete by it: a character that is split over tokens comes with the last of them, and all
    texts together are the decoded tokens. None without a tokenizer. `stop_reason` is None while the sequence goes on.
    """

    sequence: int
    tokens: tuple[int, ...]
    text: str | None
    stop_reason: StopReason | None


class OpenSequence:
    """The tokens generated so far. It is open until a stop token, a stop string or the cap.

    The tokens are decoded if there is a `tokenizer`; stop strings need it.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None = None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.stopped = self.stopped_by_string = False
        self._text = GeneratedText(tokenizer, request.stop_strings) if tokenizer is not None else None
        self._num_delivered = 0
        self._undelivered = ""

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def is_open(self) -> bool:
        return self.remaining > 0 and not self.stopped

    @property
    def stop_reason(self) -> StopReason | None:
        """None while it is open."""
        if not self.stopped:
            return None if self.is_open else StopReason.LENGTH
        return StopReason.STOP_STRING if self.stopped_by_string else StopReason.STOP_ID

    def append(self, token: int) -> None:
        """One more token. It is told from a stop token first, then from the last one of a stop string."""
        self.tokens.append(token)
        self.stopped = token in self.request.stop_ids
        if self._text is not None:
            self._undelivered += self._text.add(token)
            self.stopped_by_string = self._text.holds_stop_string and not self.stopped
            self.stopped |= self.stopped_by_string

    def commit(self, outcome: Outcome, speculation: Speculation) -> tuple[int, int]:
        """Append the accepted draft tokens and the bonus token, up to the first one that stops the sequence.

        Returns how many draft tokens and how many tokens in all were committed.
        """
        accepted = speculation.tokens[: outcome.num_accepted]
        num_before = len(self.tokens)
        for token in (*accepted, outcome.bonus_token):
            self.append(token)
            if self.stopped:
                break
        num_emitted = len(self.tokens) - num_before
        return min(len(accepted), num_emitted), num_emitted

    def deliver(self) -> NewTokens:
        """What was appended since the last delivery."""
        tokens = tuple(self.tokens[self._num_delivered :])
        text = None
        if self._text is not None:
            text, self._undelivered = self._undelivered, ""
            if not self.is_open:
                text += self._text.rest()
        self._num_delivered = len(self.tokens)
        return NewTokens(self.request.index, tokens, text, self.stop_reason)


@dataclass(frozen=True, slots=True)
class Verified:
    """How the verification of a row ended, and how many tokens the row may still emit."""

    outcome: Outcome
    remaining: int


class OpenBatch:
    """Sequences decoded together, numbered by their row; `rows` are those still open.

    `on_tokens` is called after each round with what every row that took part has got.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None = None,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> None:
        self.requests = requests
        self.sequences = [OpenSequence(request, tokenizer) for request in requests]
        self.rows = list(range(len(requests)))
        self._on_tokens = on_tokens

    def commit(
        self, outcomes: Mapping[int, Outcome], speculations: Mapping[int, Speculation]
    ) -> dict[int, tuple[int, int]]:
        """`OpenSequence.commit` of each row; rows that end by it leave."""
        counts = {row: self.sequences[row].commit(outcomes[row], speculations[row]) for row in self.rows}
        if self._on_tokens is not None:
            for row in self.rows:
                self._on_tokens(self.sequences[row].deliver())
        self.rows = [row for row in self.rows if self.sequences[row].is_open]
        return counts

    def verified(self, outcomes: Mapping[int, Outcome]) -> dict[int, Verified]:
        """What the draft must know of the open rows."""
        return {row: Verified(outcomes[row], self.sequences[row].remaining) for row in self.rows}
