"""Ways for messages: a pipe between processes, whose ends wait awake for a while before they sleep, and a pair of
queues between threads."""

from __future__ import annotations

import os
import queue
import select
import struct
from multiprocessing.connection import Connection

from executor.device import finish
from executor.messages import Message, Reply, from_bytes, to_bytes
from executor.recorder import now_s

# A process that slept is woken late, and its core works slowly at first. Within a round every wait is shorter than
# this; a role that is not needed sleeps.
AWAKE_S = 0.02
CHUNK = 1 << 16  # bytes read at once
_LENGTH = struct.Struct("<Q")  # of the message that follows


class PipeChannel:
    """A `Channel` over one end of a pipe.

    An end whose message does not fit into a full pipe takes in what the other one sends while it waits, so that two
    that send at once do not wait for each other. What was read or written of a message is kept: neither a limit of
    time nor an interrupt leaves half a message behind that would spoil the next one.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._fd = connection.fileno()
        os.set_blocking(self._fd, False)
        self._unsent = bytearray()
        self._unread = bytearray()
        self._has_ended = False
        self._peeked: Message | None = None
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll_both = select.poll()
        self._poll_both.register(self._fd, select.POLLIN | select.POLLOUT)

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        data = to_bytes(message)
        self._unsent += _LENGTH.pack(len(data))
        self._unsent += data
        give_up_s = None if timeout_s is None else now_s() + timeout_s
        while not self._write():
            if give_up_s is not None and now_s() > give_up_s:
                raise TimeoutError
            self._poll_both.poll(_milliseconds_until(give_up_s))
            self._read()

    def _write(self) -> bool:
        """As much as fits now; whether that was all."""
        try:
            while self._unsent:
                num_written = os.write(self._fd, self._unsent)
                del self._unsent[:num_written]
        except BlockingIOError:
            return False
        return True

    def is_ready(self) -> bool:
        if self._peeked is None and not self._holds_message() and self._poll.poll(0):
            self._read()
        return self._peeked is not None or self._holds_message() or self._has_ended

    def _read(self) -> None:
        """As much as there is now."""
        data = b"-" * CHUNK
        while len(data) == CHUNK and not self._has_ended:
            try:
                data = os.read(self._fd, CHUNK)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            self._unread += data
            self._has_ended = not data

    def _holds_message(self) -> bool:
        unread = self._unread
        return len(unread) >= _LENGTH.size and len(unread) >= _LENGTH.size + _LENGTH.unpack_from(unread)[0]

    def peek(self) -> Message | None:
        if self._peeked is None and self.is_ready():
            self._peeked = self._next()
        return self._peeked

    def receive(self, timeout_s: float | None = None) -> Message:
        start_s = now_s()
        give_up_s = None if timeout_s is None else start_s + timeout_s
        while not self.is_ready():
            if now_s() < start_s + AWAKE_S:
                continue
            if give_up_s is not None and now_s() > give_up_s:
                raise TimeoutError
            self._poll.poll(_milliseconds_until(give_up_s))
        message, self._peeked = self._peeked or self._next(), None
        return message

    def _next(self) -> Message:
        if not self._holds_message():
            raise EOFError
        end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
        data = bytes(memoryview(self._unread)[_LENGTH.size : end])
        del self._unread[:end]
        return from_bytes(data)

    def close(self) -> None:
        self._connection.close()


def _milliseconds_until(moment_s: float | None) -> float | None:
    """At least one, so that a wait that is nearly over is not a busy one."""
    return None if moment_s is None else max(1.0, 1000 * (moment_s - now_s()))


class QueueChannel:
    """A `Channel` between two threads. Nobody waits awake: a thread that does so keeps the interpreter to itself.

    Messages are handed over as they are: the distributions of a reply stay on their device.
    """

    def __init__(self, inbox: queue.SimpleQueue[Message | None], outbox: queue.SimpleQueue[Message | None]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._peeked: Message | None = None

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        """Never waits: a queue is never full."""
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
