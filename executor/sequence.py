"""The sequences of a batch while they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor.draws import Draws
from executor.generated_text import GeneratedText
from executor.speculation_cache import Speculation
from sim.policy import Policy
from sim.trace import Outcome, StopReason
from sim.workload import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from executor.language_model import LanguageModel


@dataclass(frozen=True)
class Request:
    """What is asked for. `sampling` is the law of the tokens; the random numbers depend on `seed`, on the prompt and on
    `occurrence`, which counts the earlier requests with the same prompt and settings that have no seed of their own."""

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int
    occurrence: int = 0
    stop_strings: tuple[str, ...] = ()
    log_probs: bool = False  # of the tokens are asked for
    audit: bool = False  # of the KV caches after every round

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
        self._is_asked = True  # the prefill is as a round that the draft was asked about
        self._outcomes: Mapping[int, Outcome] = {}
        self._since: list[Mapping[int, Outcome]] = []

    def commit(
        self, outcomes: Mapping[int, Outcome], speculations: Mapping[int, Speculation]
    ) -> dict[int, tuple[int, int]]:
        """`OpenSequence.commit` of each row; rows that end by it leave."""
        counts = {row: self.sequences[row].commit(outcomes[row], speculations[row]) for row in self.rows}
        if self._on_tokens is not None:
            for row in self.rows:
                self._on_tokens(self.sequences[row].deliver())
        self.rows = [row for row in self.rows if self.sequences[row].is_open]
        if self._is_asked:
            self._outcomes, self._since, self._is_asked = outcomes, [], False
        else:
            self._since.append(outcomes)
        return counts

    def audit(self, target: LanguageModel) -> None:
        """Check the target's KV cache of the open rows that ask for it: what was committed, but for the last token.

        Raises `KvCacheCorrupt`.
        """
        for row in self.rows:
            sequence = self.sequences[row]
            if sequence.request.audit:
                target.audit(row, [*sequence.request.prompt, *sequence.tokens[:-1]])

    def question(self, policy: Policy) -> Question:
        """For the next round of the open rows, with all that happened since the last question."""
        self._is_asked = True
        return Question(policy, {row: self._verified(row) for row in self.rows})

    def _verified(self, row: int) -> Verified:
        since = tuple(outcomes[row].bonus_token for outcomes in self._since)
        return Verified(self._outcomes[row], self.sequences[row].remaining, since)
