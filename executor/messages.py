"""What the roles say to each other, and how it is written for a pipe.

Every request has a number. A reply repeats the number and, to a round, the outcomes that it answers: a reply that comes
late, twice or out of order is told from the reply to another sequence, round, accepted count or bonus token.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from executor.sequence import Verified
from executor.speculation_cache import Speculation
from sim.policy import Proposer
from sim.trace import Outcome, Source

LOADING = 0  # number of the request that starting a role is


@dataclass(frozen=True, slots=True)
class Ask:
    """Request: the speculations that follow these outcomes."""

    number: int
    verified: Mapping[int, Verified]  # by row


@dataclass(frozen=True, slots=True)
class Reply:
    """To `Ask`: one speculation for each of its rows."""

    number: int
    verified: Mapping[int, Verified]  # what is answered
    speculations: Mapping[int, Speculation]


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
    """The serving role ends with this exception."""

    error_type: type[Exception]
    args: tuple[str, ...]


Message = Ask | Reply | Call | Result | Fault


class Channel(Protocol):
    """One end of a way for messages, in order. Raises EOFError or OSError if the other end is gone."""

    def send(self, message: Message) -> None: ...

    def is_ready(self) -> bool:
        """Whether `receive` would return, or raise, at once."""

    def peek(self) -> Message | None:
        """The message that `receive` would return at once, if there is one."""

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError if there is none for `timeout_s` seconds."""

    def close(self) -> None: ...


# ------------------------------------------------------------------------------------------------------- as bytes

_ASK, _REPLY, _PICKLED = b"A", b"R", b"P"
_HEAD = struct.Struct("<cxxxxxxxqq")  # kind of message, number of the request, rows; what follows is aligned
_VERIFIED = struct.Struct("<4q")  # row, accepted, bonus token, remaining
_SPECULATION = struct.Struct("<4q")  # source, proposer, draft tokens, vocabulary (0: no distributions)
_SOURCES, _PROPOSERS = tuple(Source), tuple(Proposer)


def to_bytes(message: Message) -> bytes:
    """What is said in every round without pickling, which would cost as much as the pipe."""
    match message:
        case Ask():
            return _head(_ASK, message.number, message.verified)
        case Reply():
            speculations = (message.speculations[row] for row in message.verified)
            parts = (part for speculation in speculations for part in _parts(speculation))
            return _head(_REPLY, message.number, message.verified) + b"".join(parts)
        case _:
            return _HEAD.pack(_PICKLED, 0, 0) + pickle.dumps(message)


def from_bytes(data: bytes) -> Message:
    """Inverse of `to_bytes`."""
    kind, number, num_rows = _HEAD.unpack_from(data)
    if kind == _PICKLED:
        return pickle.loads(memoryview(data)[_HEAD.size :])
    end = _HEAD.size + num_rows * _VERIFIED.size
    rows = _VERIFIED.iter_unpack(memoryview(data)[_HEAD.size : end])
    verified = {row: Verified(Outcome(accepted, bonus), remaining) for row, accepted, bonus, remaining in rows}
    if kind == _ASK:
        return Ask(number, verified)
    return Reply(number, verified, dict(zip(verified, _speculations(data, end, num_rows), strict=True)))


def _head(kind: bytes, number: int, verified: Mapping[int, Verified]) -> bytes:
    rows = ((row, v.outcome.num_accepted, v.outcome.bonus_token, v.remaining) for row, v in verified.items())
    return _HEAD.pack(kind, number, len(verified)) + b"".join(_VERIFIED.pack(*row) for row in rows)


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
