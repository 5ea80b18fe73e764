"""Ways for messages: a pipe between processes, whose ends wait awake for a while before they sleep, and a pair of
queues between threads."""

from __future__ import annotations

import queue
import select
from multiprocessing.connection import Connection

from executor.device import finish
from executor.messages import Message, Reply, from_bytes, to_bytes
from executor.recorder import now_s

# A process that slept is woken late, and its core works slowly at first. Within a round every wait is shorter than
# this; a role that is not needed sleeps.
AWAKE_S = 0.02


class PipeChannel:
    """A `Channel` over one end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._peeked: Message | None = None
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def send(self, message: Message) -> None:
        self._connection.send_bytes(to_bytes(message))

    def is_ready(self) -> bool:
        return self._peeked is not None or bool(self._poll.poll(0))

    def peek(self) -> Message | None:
        if self._peeked is None and self.is_ready():
            self._peeked = from_bytes(self._connection.recv_bytes())
        return self._peeked

    def receive(self, timeout_s: float | None = None) -> Message:
        if self._peeked is not None:
            message, self._peeked = self._peeked, None
            return message
        awake_until_s = now_s() + AWAKE_S
        while not self.is_ready() and now_s() < awake_until_s:
            pass
        if timeout_s is not None and not self._poll.poll(1000 * timeout_s):
            raise TimeoutError
        return from_bytes(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()


class QueueChannel:
    """A `Channel` between two threads. Nobody waits awake: a thread that does so keeps the interpreter to itself.

    Messages are handed over as they are: the distributions of a reply stay on their device.
    """

    def __init__(self, inbox: queue.SimpleQueue[Message | None], outbox: queue.SimpleQueue[Message | None]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._peeked: Message | None = None

    def send(self, message: Message) -> None:
        if isinstance(message, Reply):
            finish(speculation.draft_probs for speculation in message.speculations.values())
        self._outbox.put(message)

    def is_ready(self) -> bool:
        return self._peeked is not None or not self._inbox.empty()

    def peek(self) -> Message | None:
        if self._peeked is None and self.is_ready():
            self._peeked = self._next(None)
        return self._peeked

    def receive(self, timeout_s: float | None = None) -> Message:
        if self._peeked is not None:
            message, self._peeked = self._peeked, None
            return message
        return self._next(timeout_s)

    def _next(self, timeout_s: float | None) -> Message:
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if message is None:
            self._inbox.put(None)  # the other end stays closed
            raise EOFError
        return message

    def close(self) -> None:
        """The other end finds an end after what was sent."""
        self._outbox.put(None)


def queue_channels() -> tuple[QueueChannel, QueueChannel]:
    """The two ends of one way."""
    there: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    back: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    return QueueChannel(back, there), QueueChannel(there, back)
