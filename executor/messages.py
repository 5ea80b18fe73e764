"""What the roles say to each other, and how it is written for a pipe.

Every request has a number. A reply repeats the number and, to a round, the outcomes that it answers: a reply that comes
late, twice or out of order is told from the reply to another sequence, round, accepted count or bonus token.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from executor.sequence import Question, Verified
from executor.speculation_cache import Speculation
from sim.policy import Policy, Proposer
from sim.trace import Outcome, Source

LOADING = 0  # number of the request that starting a role is


@dataclass(frozen=True, slots=True)
class Ask:
    """Request: the speculations of a round. With `tells_build` it is told how long drafting took, and the build beside
    the round once that has ended."""

    number: int
    question: Question
    tells_build: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """To `Ask`: one speculation for each of its rows."""

    number: int
    verified: Mapping[int, Verified]  # what is answered
    speculations: Mapping[int, Speculation]
    draft_s: float = 0.0  # drafting that the caller waited for, where it asked for that


@dataclass(frozen=True, slots=True)
class Built:
    """The build beside the round of an `Ask` has ended; nobody waits for this."""

    number: int
    build_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """Request: call a method of the draft service."""

    number: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """To `Call`: what the method gave."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Fault:
    """The serving role ends with this exception, which can be pickled."""

    error: Exception


Message = Ask | Reply | Built | Call | Result | Fault


class Channel(Protocol):
    """One end of a way for messages, in order. Raises EOFError or OSError if the other end is gone."""

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        """Raises TimeoutError if the other end takes in nothing more for so long that it could not be sent."""

    def is_ready(self) -> bool:
        """Whether `receive` would return, or raise, at once."""

    def peek(self) -> Message | None:
        """The message that `receive` would return at once, if there is one."""

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError if there is none for `timeout_s` seconds."""

    def close(self) -> None: ...


# ------------------------------------------------------------------------------------------------------- as bytes

_ASK, _REPLY, _PICKLED = b"A", b"R", b"P"
_HEAD = struct.Struct("<c7x3qd")  # kind, number of the request, rows, an integer, a float; what follows is aligned
_VERIFIED = struct.Struct("<5q")  # row, accepted, bonus token, remaining, tokens since
_SPECULATION = struct.Struct("<4q")  # source, proposer, draft tokens, vocabulary (0: no distributions)
_SOURCES, _PROPOSERS = tuple(Source), tuple(Proposer)


def to_bytes(message: Message) -> bytes:
    """What is said in every round without pickling, which would cost as much as the pipe."""
    match message:
        case Ask(number, question, tells_build):
            head = _HEAD.pack(_ASK, number, len(question.verified), tells_build, 0.0)
            return head + b"".join(_verified_parts(question.verified)) + _pickled(question.policy)
        case Reply(number, verified, speculations, draft_s):
            parts = (part for row in verified for part in _parts(speculations[row]))
            head = _HEAD.pack(_REPLY, number, len(verified), 0, draft_s)
            return head + b"".join((*_verified_parts(verified), *parts))
        case _:
            return _HEAD.pack(_PICKLED, 0, 0, 0, 0.0) + pickle.dumps(message)


def from_bytes(data: bytes) -> Message:
    """Inverse of `to_bytes`."""
    kind, number, num_rows, flag, seconds = _HEAD.unpack_from(data)
    if kind == _PICKLED:
        return pickle.loads(memoryview(data)[_HEAD.size :])
    verified, place = _verified(data, num_rows)
    if kind == _ASK:
        return Ask(number, Question(_unpickled(data[place:]), verified), bool(flag))
    speculations = _speculations(data, place, num_rows)
    return Reply(number, verified, dict(zip(verified, speculations, strict=True)), seconds)


@lru_cache(maxsize=64)
def _pickled(policy: Policy) -> bytes:
    """Most rounds run under a policy that another did."""
    return pickle.dumps(policy)


@lru_cache(maxsize=64)
def _unpickled(data: bytes) -> Policy:
    return pickle.loads(data)


def _verified_parts(verified: Mapping[int, Verified]) -> Iterable[bytes]:
    for row, v in verified.items():
        yield _VERIFIED.pack(row, v.outcome.num_accepted, v.outcome.bonus_token, v.remaining, len(v.since))
        yield np.asarray(v.since, dtype=np.int64).tobytes() if v.since else b""


def _verified(data: bytes, num_rows: int) -> tuple[dict[int, Verified], int]:
    """Inverse of `_verified_parts`, and where it ends."""
    verified, place = {}, _HEAD.size
    for _ in range(num_rows):
        row, num_accepted, bonus_token, remaining, num_since = _VERIFIED.unpack_from(data, place)
        place += _VERIFIED.size
        since = np.frombuffer(data, dtype=np.int64, count=num_since, offset=place)
        place += since.nbytes
        verified[row] = Verified(Outcome(num_accepted, bonus_token), remaining, tuple(since.tolist()))
    return verified, place


def _parts(speculation: Speculation) -> Iterable[bytes]:
    probs = speculation.draft_probs
    vocab_size = 0 if probs is None else probs.shape[-1]
    origin = _SOURCES.index(speculation.source), _PROPOSERS.index(speculation.proposer)
    yield _SPECULATION.pack(*origin, len(speculation.tokens), vocab_size)
    yield np.asarray(speculation.tokens, dtype=np.int64).tobytes()
    if probs is not None:
        yield probs.cpu().numpy().tobytes()


def _speculations(data: bytes, place: int, num: int) -> Iterable[Speculation]:
    writable = bytearray(data)
    for _ in range(num):
        source, proposer, num_tokens, vocab_size = _SPECULATION.unpack_from(data, place)
        place += _SPECULATION.size
        tokens = np.frombuffer(data, dtype=np.int64, count=num_tokens, offset=place)
        place += tokens.nbytes
        probs = None
        if vocab_size:
            flat = np.frombuffer(writable, dtype=np.float64, count=num_tokens * vocab_size, offset=place)
            place += flat.nbytes
            probs = torch.from_numpy(flat).view(num_tokens, vocab_size)
        yield Speculation(_SOURCES[source], tuple(tokens.tolist()), probs, _PROPOSERS[proposer])
