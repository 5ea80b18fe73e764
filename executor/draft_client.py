"""The draft role somewhere else: what the caller sees of it, and the loop in which it serves."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, TypeVar

from executor.draft_service import DraftService
from executor.messages import LOADING, Ask, Built, Call, Channel, Fault, Message, Reply, Result
from executor.observation import DraftWork
from executor.sequence import Question, Request
from executor.speculation_cache import Speculation
from sim.errors import BadInput, RunFailed
from sim.policy import Autoregressive, SpeculativeSpeculative
from sim.trace import Span

T = TypeVar("T")
ANSWER_TIMEOUT_S = 6.0  # for what a decoder asks; loading and profiling may take longer if something is done


class DraftFailed(RunFailed):
    """The draft role raised an exception (its traceback is in the message), died, or did not answer in time."""


class DraftClient(ABC):
    """The calling side: the draft answers outcomes, then builds while the caller verifies.

    A reply is used only if it repeats the number, and the outcomes, of the request that is waited for; others come
    late, to a request that nobody waits for any more, or twice, and are dropped.

    What has failed once stays failed: whatever is asked of it afterwards ends with the same error.
    """

    def __init__(self, channel: Channel, answer_timeout_s: float) -> None:
        self._channel = channel
        self._answer_timeout_s = answer_timeout_s
        self._number = LOADING  # of the last request
        self._awaited: deque[int] = deque([LOADING])  # calls whose results will be asked for
        self._failure: Fault | None = None
        self._tells_builds = False
        self._building: dict[int, DraftWork] = {}  # by number of the question
        self.work = DraftWork()
        self.placement: dict[str, Any] = {}

    def wait_until_loaded(self) -> None:
        """The draft has loaded its model; `placement` is what it read back about itself."""
        self.placement = self.result()

    def begin(self, requests: Sequence[Request], *, tells_builds: bool = False) -> None:
        self._awaited.clear()  # whatever an interrupted run has left
        self._tells_builds = tells_builds
        self._call(self._answer_timeout_s, "begin", requests)

    def wait(self) -> None:
        self._result(self._answer_timeout_s)

    def speculate(self, question: Question) -> dict[int, Speculation]:
        ask = Ask(self._next_number(), question, self._tells_builds)
        self._send(ask, self._answer_timeout_s)
        while True:
            match self._receive(self._answer_timeout_s):
                case Reply() as reply if reply.number == ask.number and reply.verified == question.verified:
                    self.work = self._work(ask, reply)
                    return dict(reply.speculations)

    def _work(self, ask: Ask, reply: Reply) -> DraftWork:
        builds = isinstance(ask.question.policy, SpeculativeSpeculative)
        work = DraftWork(reply.draft_s, build_s=None if builds else 0.0)
        if builds and ask.tells_build:
            self._building[ask.number] = work
        return work

    def take_notice(self) -> None:
        with suppress(EOFError, ConnectionResetError):  # whoever waits for an answer hears of it
            while isinstance(self._channel.peek(), Built):
                self._note(self._channel.receive())

    def _note(self, message: Message) -> None:
        """The end of a build, if it is one."""
        if isinstance(message, Built) and message.number in self._building:
            self._building.pop(message.number).build_s = message.build_s

    def spans(self) -> list[Span]:
        self._call(self._answer_timeout_s, "spans")
        return self._result(self._answer_timeout_s)

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Have the draft call a method of its service; `result` waits for what it gives."""
        self._call(None, method, *args, **kwargs)

    def _call(self, timeout_s: float | None, method: str, *args: Any, **kwargs: Any) -> None:
        call = Call(self._next_number(), method, args, kwargs)
        self._awaited.append(call.number)
        self._send(call, timeout_s)

    def is_done(self) -> bool:
        return self._failure is not None or self._channel.is_ready()

    def result(self) -> Any:
        """However long it takes, as long as the draft works."""
        return self._result(None)

    def _result(self, timeout_s: float | None) -> Any:
        """What the oldest call gave that awaits its result."""
        awaited = self._awaited.popleft()
        while True:
            match self._receive(timeout_s):
                case Result(number, value) if number == awaited:
                    return value

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _send(self, message: Message, timeout_s: float | None) -> None:
        # A draft that failed has said why before it closed its end: `_receive` finds that.
        with suppress(BrokenPipeError, ConnectionResetError):
            if self._failure is None:
                self._patiently(timeout_s, lambda limit_s: self._channel.send(message, limit_s))

    def _receive(self, timeout_s: float | None) -> Message:
        message: Message | None = self._failure
        if message is None:
            try:
                message = self._patiently(timeout_s, self._channel.receive)
            except (EOFError, ConnectionResetError):
                message = Fault(DraftFailed(self._how_it_died()))
        if isinstance(message, Fault):
            self._failure = message
            raise copy(message.error)
        self._note(message)
        return message

    def _patiently(self, timeout_s: float | None, wait: Callable[[float], T]) -> T:
        """Wait for the draft; without a limit as long as it works at all."""
        while True:
            before_s = 0.0 if timeout_s else self._worked_s()  # reading that costs as much as a hand-over
            try:
                return wait(timeout_s or self._answer_timeout_s)
            except TimeoutError:
                if timeout_s is None and self._worked_s() != before_s:
                    continue
            what = f"not answered for {timeout_s} s" if timeout_s else f"done nothing for {self._answer_timeout_s} s"
            self._failure = Fault(DraftFailed(f"the draft has {what} and {self._give_up()}"))
            raise copy(self._failure.error)

    @abstractmethod
    def _worked_s(self) -> float:
        """A number that stays the same only if it does nothing, as far as can be told."""

    @abstractmethod
    def _how_it_died(self) -> str:
        """Its end of the channel is closed: why, as far as can be told."""

    @abstractmethod
    def _give_up(self) -> str:
        """It hangs: end it if possible; what was done and where it hangs."""

    @abstractmethod
    def close(self) -> None:
        """End the draft role."""


# ---------------------------------------------------------------------------------------------- the serving side


def serve(channel: Channel, load: Callable[[], tuple[DraftService, dict[str, Any]]]) -> None:
    """Load, then answer requests until the caller closes its end; an exception is handed on and ends it.

    `load` gives the service and what `DraftClient.placement` is going to say.
    """
    try:
        service, placement = load()
        channel.send(Result(LOADING, placement))
        while True:
            _answer(channel, service, channel.receive())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except BadInput as error:
        _fail(channel, error)
    except Exception:
        _fail(channel, DraftFailed(f"the draft failed\n{traceback.format_exc()}"))


def upcoming(channel: Channel) -> Question | None:
    """What the next request brings, see `speculator.Upcoming`."""
    match channel.peek():
        case None:
            return None
        case Ask(_, question):
            return question
        case _:
            return Question(Autoregressive(), {})


def _answer(channel: Channel, service: DraftService, message: Message) -> None:
    match message:
        case Ask(number, question, tells_build):
            speculations = service.speculate(question)
            draft_s = service.draft_s() if tells_build else 0.0
            channel.send(Reply(number, question.verified, speculations, draft_s))
            service.prepare()
            if tells_build and isinstance(question.policy, SpeculativeSpeculative):
                channel.send(Built(number, service.build_s()))
        case Call(number, method, args, kwargs):
            channel.send(Result(number, getattr(service, method)(*args, **(kwargs or {}))))


def _fail(channel: Channel, error: Exception) -> None:
    with suppress(OSError):
        channel.send(Fault(error))
