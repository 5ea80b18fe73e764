"""The draft role in a process of its own, and the messages between the two."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import struct
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch

from executor.channel import Channel
from executor.draft_service import DraftService
from executor.observation import DraftWork
from executor.pairs import Pair
from executor.recorder import now_s
from executor.sequence import Question, Request, Verified
from executor.speculation_cache import Speculation
from sim.errors import BadInput, RunFailed
from sim.policy import Autoregressive, Policy, Proposer, SpeculativeSpeculative
from sim.trace import Outcome, Source, Span

ANSWER_TIMEOUT_S = 6.0  # for what a decoder asks; loading and profiling may take as long as they like
_STOP_TIMEOUT_S = 5.0
_DUMP_TIMEOUT_S = 1.0  # for a hanging child to say where it hangs


class DraftFailed(RunFailed):
    """The draft process raised an exception (its traceback is in the message), died, or did not answer in time."""


class ProcessDraft:
    """The draft role in a child process: the child answers outcomes, then builds while the caller verifies.

    Every request has a number, which its reply repeats. So a reply that comes late, to a request that nobody waits for
    any more, is told from the reply to another round, and dropped. A question brings its policy where that is another
    than before. The end of a build is told, where asked for, by a message that nobody waits for.
    """

    def __init__(self, pair: Pair, dtype: str, core: int, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._answer_timeout_s = answer_timeout_s
        self._number = 0  # of the last request
        self._awaited: deque[int] = deque([0])  # requests that will be asked for their reply; 0 is the loading
        self._dump = NamedTemporaryFile(prefix="draft-")  # noqa: SIM115 - as long as the process
        context = multiprocessing.get_context("spawn")
        own_end, child_end = context.Pipe()
        args = (child_end, pair, dtype, core, self._dump.name)
        self.process = context.Process(target=serve, args=args, daemon=True, name="draft")
        self.process.start()
        self._channel = Channel(own_end)
        child_end.close()  # the child's own copy must be the last one, or its death would go unnoticed
        self.placement: dict[str, int] = {}
        self._policy: Policy | None = None  # of the last question
        self._tells_builds = False
        self._building: dict[int, DraftWork] = {}  # by number of the question
        self.work = DraftWork()

    def wait_until_loaded(self) -> None:
        """The child has loaded its model; `placement` is what it read back about itself."""
        self.placement = self.result()

    def begin(self, requests: Sequence[Request], *, tells_builds: bool = False) -> None:
        self._awaited.clear()  # whatever an interrupted run has left
        self._policy, self._tells_builds = None, tells_builds
        self.start("begin", requests)

    def wait(self) -> None:
        pickle.loads(self._receive(self._answer_timeout_s))

    def speculate(self, question: Question) -> dict[int, Speculation]:
        policy = None if question.policy == self._policy else question.policy
        self._send(_TOLD_ROUND if self._tells_builds else _ROUND, _pack_question(policy, question.verified))
        self._policy = question.policy
        (draft_s,), body = _split(_ANSWER_HEAD, self._receive(self._answer_timeout_s))
        builds = isinstance(question.policy, SpeculativeSpeculative)
        self.work = DraftWork(draft_s, build_s=None if builds else 0.0)
        if builds and self._tells_builds:
            self._building[self._number] = self.work
        return dict(zip(question.verified, _unpack_speculations(body, len(question.verified)), strict=True))

    def take_notice(self) -> None:
        with suppress(EOFError, ConnectionResetError):  # whoever waits for an answer hears of it
            while (message := self._channel.peek()) is not None and _unpack(message)[0] == _BUILT:
                self._note_build(*_unpack(self._channel.receive())[1:])

    def _note_build(self, number: int, body: bytes) -> None:
        (build_s,), _ = _split(_BUILT_BODY, body)
        if number in self._building:
            self._building.pop(number).build_s = build_s

    def spans(self) -> list[Span]:
        self.start("spans")
        return pickle.loads(self._receive(self._answer_timeout_s))

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Have the child call a method of its draft service; `result` waits for what it gives."""
        self._send(_CALL, pickle.dumps((method, args, kwargs)))

    def is_done(self) -> bool:
        return self._channel.is_ready()

    def result(self) -> Any:
        return pickle.loads(self._receive())

    def _send(self, kind: bytes, body: bytes) -> None:
        self._number += 1
        self._awaited.append(self._number)
        # A child that failed has said why before it closed its end: `_receive` finds that.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(_pack(kind, self._number, body))

    def _receive(self, timeout_s: float | None = None) -> bytes:
        """The reply to the oldest request that awaits one."""
        awaited = self._awaited.popleft()
        while True:
            kind, number, body = _unpack(self._next_message(timeout_s))
            if kind == _FAULT:
                error_type, args = pickle.loads(body)
                raise error_type(*args)
            if kind == _BUILT:
                self._note_build(number, body)
            elif number == awaited:
                return body

    def _next_message(self, timeout_s: float | None) -> bytes:
        try:
            return self._channel.receive(timeout_s)
        except (EOFError, ConnectionResetError):
            self.process.join(_STOP_TIMEOUT_S)
            raise DraftFailed(f"the draft process died with exit code {self.process.exitcode}") from None
        except TimeoutError:
            where = self._where_it_hangs()
            self.process.kill()
            raise DraftFailed(f"the draft process has not answered for {timeout_s} s and was ended\n{where}") from None

    def _where_it_hangs(self) -> str:
        """The child's traceback, if it is able to give one."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, DUMP_SIGNAL)
        give_up_s = now_s() + _DUMP_TIMEOUT_S
        while not (text := Path(self._dump.name).read_text()) and now_s() < give_up_s:
            time.sleep(0.02)
        return text or "it did not say where"

    def close(self) -> None:
        """End the child: it sees the end of the pipe, or is killed if it works on regardless."""
        self._channel.close()
        self.process.join(_STOP_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._dump.close()


# ----------------------------------------------------------------------------------------------------- the child

DUMP_SIGNAL = signal.SIGUSR1  # a child that gets it writes down where it is
_ROUND, _TOLD_ROUND, _CALL, _ANSWER, _BUILT, _FAULT = b"R", b"T", b"C", b"A", b"B", b"F"
_HEAD = struct.Struct("<cq")  # kind of message, number of the request
_QUESTION = struct.Struct("<q")  # bytes of the pickled policy, 0: as before
_REQUEST = struct.Struct("<5q")  # row, accepted, bonus token, remaining, tokens since
_ANSWER_HEAD = struct.Struct("<d")  # seconds of drafting that the target waited for
_BUILT_BODY = struct.Struct("<d")  # seconds of a build
_REPLY = struct.Struct("<4q")  # source, proposer, draft tokens, vocabulary (0: no distributions)
_SOURCES, _PROPOSERS = tuple(Source), tuple(Proposer)


def serve(connection: Connection, pair: Pair, dtype: str, core: int, dump: str) -> None:
    """Main function of the child: answer requests until the caller closes its end of the pipe."""
    channel = Channel(connection)
    dump_file = Path(dump).open("w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(DUMP_SIGNAL, dump_file, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides; it closes the pipe
    try:
        threads = pin(core)
        model = pair.load("draft", dtype)
        questions = _Questions()
        service = DraftService(model, interrupted=channel.is_ready, upcoming=lambda: questions.upcoming(channel))
        _answer(channel, 0, {"pid": os.getpid(), "core": core, "threads": threads})
        while True:
            _serve_one(channel, service, questions, channel.receive())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except BadInput as error:
        name, _, rule = str(error).partition(": ")
        _fail(channel, BadInput, name, rule)
    except Exception:
        _fail(channel, DraftFailed, f"the draft process failed\n{traceback.format_exc()}")


class _Questions:
    """Reads questions; one without a policy has that of the question before."""

    def __init__(self) -> None:
        self._policy: Policy = Autoregressive()

    def read(self, body: bytes) -> Question:
        (num_bytes,), rest = _split(_QUESTION, body)
        if num_bytes:
            self._policy = pickle.loads(rest[:num_bytes])
        return Question(self._policy, _unpack_verified(rest[num_bytes:]))

    def upcoming(self, channel: Channel) -> Question | None:
        """The next request, see `speculator.Upcoming`."""
        message = channel.peek()
        if message is None:
            return None
        kind, _, body = _unpack(message)
        return self.read(body) if kind in (_ROUND, _TOLD_ROUND) else Question(self._policy, {})


def _serve_one(channel: Channel, service: DraftService, questions: _Questions, message: bytes) -> None:
    kind, number, body = _unpack(message)
    if kind in (_ROUND, _TOLD_ROUND):
        speculations = service.speculate(questions.read(body))
        answer = _ANSWER_HEAD.pack(service.work.draft_s) + _pack_speculations(speculations.values())
        channel.send(_pack(_ANSWER, number, answer))
        is_building = service.work.build_s is None
        service.prepare()
        if is_building and kind == _TOLD_ROUND:
            channel.send(_pack(_BUILT, number, _BUILT_BODY.pack(service.work.build_s)))
    else:
        method, args, kwargs = pickle.loads(body)
        _answer(channel, number, getattr(service, method)(*args, **kwargs))


def _answer(channel: Channel, number: int, result: Any) -> None:
    channel.send(_pack(_ANSWER, number, pickle.dumps(result)))


def _fail(channel: Channel, error_type: type[Exception], *args: str) -> None:
    with suppress(OSError):
        channel.send(_pack(_FAULT, 0, pickle.dumps((error_type, args))))


def _pack(kind: bytes, number: int, body: bytes) -> bytes:
    return _HEAD.pack(kind, number) + body


def _unpack(message: bytes) -> tuple[bytes, int, bytes]:
    return (*_HEAD.unpack_from(message), message[_HEAD.size :])


def _split(head: struct.Struct, body: bytes) -> tuple[tuple[Any, ...], bytes]:
    return head.unpack_from(body), body[head.size :]


def _pack_question(policy: Policy | None, verified: Mapping[int, Verified]) -> bytes:
    """Without a policy: as before."""
    pickled = b"" if policy is None else pickle.dumps(policy)
    parts = [_QUESTION.pack(len(pickled)), pickled]
    for row, v in verified.items():
        parts.append(_REQUEST.pack(row, v.outcome.num_accepted, v.outcome.bonus_token, v.remaining, len(v.since)))
        parts.append(np.asarray(v.since, dtype=np.int64).tobytes())
    return b"".join(parts)


def _unpack_verified(body: bytes) -> dict[int, Verified]:
    verified, place = {}, 0
    while place < len(body):
        row, num_accepted, bonus_token, remaining, num_since = _REQUEST.unpack_from(body, place)
        since = np.frombuffer(body, dtype=np.int64, count=num_since, offset=place + _REQUEST.size)
        verified[row] = Verified(Outcome(num_accepted, bonus_token), remaining, tuple(since.tolist()))
        place += _REQUEST.size + since.nbytes
    return verified


def _pack_speculations(speculations: Iterable[Speculation]) -> bytes:
    return b"".join(part for speculation in speculations for part in _parts(speculation))


def _parts(speculation: Speculation) -> Iterable[bytes]:
    probs = speculation.draft_probs
    vocab_size = 0 if probs is None else probs.shape[-1]
    origin = _SOURCES.index(speculation.source), _PROPOSERS.index(speculation.proposer)
    yield _REPLY.pack(*origin, len(speculation.tokens), vocab_size)
    yield np.asarray(speculation.tokens, dtype=np.int64).tobytes()
    if probs is not None:
        yield probs.numpy().tobytes()


def _unpack_speculations(body: bytes, num: int) -> Iterable[Speculation]:
    """Inverse of `_pack_speculations`."""
    writable, place = bytearray(body), 0
    for _ in range(num):
        source, proposer, num_tokens, vocab_size = _REPLY.unpack_from(body, place)
        place += _REPLY.size
        tokens = np.frombuffer(body, dtype=np.int64, count=num_tokens, offset=place)
        place += tokens.nbytes
        probs = None
        if vocab_size:
            flat = np.frombuffer(writable, dtype=np.float64, count=num_tokens * vocab_size, offset=place)
            place += flat.nbytes
            probs = torch.from_numpy(flat).view(num_tokens, vocab_size)
        yield Speculation(_SOURCES[source], tuple(tokens.tolist()), probs, _PROPOSERS[proposer])


def pin(core: int) -> int:
    """Put the calling thread on one core and torch on one thread; return the number of threads, read back."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    return torch.get_num_threads()
