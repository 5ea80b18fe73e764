"""The draft role somewhere else: what the caller sees of it, and the loop in which it serves."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from executor.draft_service import DraftService
from executor.messages import LOADING, Ask, Built, Call, Channel, Fault, Message, Reply, Result
from executor.observation import DraftWork
from executor.sequence import Question, Request
from executor.speculation_cache import Speculation
from sim.errors import BadInput, RunFailed
from sim.policy import Autoregressive, SpeculativeSpeculative
from sim.trace import Span

ANSWER_TIMEOUT_S = 6.0  # for what a decoder asks; loading and profiling may take as long as they like


class DraftFailed(RunFailed):
    """The draft role raised an exception (its traceback is in the message), died, or did not answer in time."""


class DraftClient(ABC):
    """The calling side: the draft answers outcomes, then builds while the caller verifies.

    A reply is used only if it repeats the number, and the outcomes, of the request that is waited for; others come
    late, to a request that nobody waits for any more, or twice, and are dropped.
    """

    def __init__(self, channel: Channel, answer_timeout_s: float) -> None:
        self._channel = channel
        self._answer_timeout_s = answer_timeout_s
        self._number = LOADING  # of the last request
        self._awaited: deque[int] = deque([LOADING])  # calls whose results will be asked for
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
        self.start("begin", requests)

    def wait(self) -> None:
        self._result(self._answer_timeout_s)

    def speculate(self, question: Question) -> dict[int, Speculation]:
        ask = Ask(self._next_number(), question, self._tells_builds)
        self._send(ask)
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
        self.start("spans")
        return self._result(self._answer_timeout_s)

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Have the draft call a method of its service; `result` waits for what it gives."""
        call = Call(self._next_number(), method, args, kwargs)
        self._awaited.append(call.number)
        self._send(call)

    def is_done(self) -> bool:
        return self._channel.is_ready()

    def result(self) -> Any:
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

    def _send(self, message: Message) -> None:
        # A draft that failed has said why before it closed its end: `_receive` finds that.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(message)

    def _receive(self, timeout_s: float | None) -> Message:
        try:
            message = self._channel.receive(timeout_s)
        except (EOFError, ConnectionResetError):
            raise DraftFailed(self._how_it_died()) from None
        except TimeoutError:
            raise DraftFailed(f"the draft has not answered for {timeout_s} s and {self._give_up()}") from None
        if isinstance(message, Fault):
            raise message.error
        self._note(message)
        return message

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
