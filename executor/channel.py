"""Ways for messages: a pipe with mailboxes between processes, whose ends wait awake for a while before they sleep, and
a pair of queues between threads."""

from __future__ import annotations

import os
import queue
import select
import struct
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from executor.device import finish
from executor.mailbox import STORES_ARE_SEEN_IN_ORDER, Mailbox, Memory, shared_memory
from executor.messages import Message, Reply, from_bytes, to_bytes
from executor.recorder import now_s

# A process that slept is woken late, and its core works slowly at first. Within a round every wait is shorter than
# this; a role that is not needed sleeps.
AWAKE_S = 0.02
CHUNK = 1 << 16  # bytes read at once
LOOKS_AT_BOX = 50  # for each look at the pipe
LONGEST_SLEEP_MS = 50.0
_LENGTH = struct.Struct("<Q")  # of the message that follows
WAKE = _LENGTH.pack(0)  # no message is so short: look into the mailbox

Mailboxes = tuple[Mailbox, Mailbox]  # in, out
# What a channel is made of, mailboxes in and out; may be handed to a process that starts, and brings no library along.
PipeEnd = tuple[Connection, Memory | None, Memory | None]


class PipeChannel:
    """A `Channel` over one end of a pipe, and over mailboxes beside it where there are any.

    An end whose message does not fit into a full pipe takes in what the other one sends while it waits, so that two
    that send at once do not wait for each other. What was read or written of a message is kept: neither a limit of
    time nor an interrupt leaves half a message behind that would spoil the next one.
    """

    def __init__(self, connection: Connection, mailboxes: Mailboxes | None = None) -> None:
        self._connection = connection
        self._inbox = mailboxes[0] if mailboxes else None
        self._outbox = mailboxes[1] if mailboxes else None
        self._fd = connection.fileno()
        os.set_blocking(self._fd, False)
        self._num_sent = self._num_received = 0
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
        if self._unsent or self._outbox is None or not self._outbox.put(self._num_sent + 1, data):
            self._unsent += _LENGTH.pack(len(data))
            self._unsent += data
        elif self._outbox.reader_sleeps:
            self._unsent += WAKE
        self._num_sent += 1
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
        if not self._is_here() and self._poll.poll(0):
            self._read()
        return self._is_here() or self._has_ended

    def _is_here(self) -> bool:
        """Without a look at the pipe."""
        return self._peeked is not None or self._is_in_box() or self._is_read()

    def _is_in_box(self) -> bool:
        return self._inbox is not None and self._inbox.holds(self._num_received + 1)

    def _is_read(self) -> bool:
        unread = self._unread
        return len(unread) >= _LENGTH.size and len(unread) >= _LENGTH.size + _LENGTH.unpack_from(unread)[0]

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
        while self._unread.startswith(WAKE):
            del self._unread[: len(WAKE)]

    def peek(self) -> Message | None:
        if self._peeked is None and self.is_ready():
            self._peeked = self._next()
        return self._peeked

    def receive(self, timeout_s: float | None = None) -> Message:
        start_s = now_s()
        give_up_s = None if timeout_s is None else start_s + timeout_s
        while not self.is_ready():
            if now_s() < start_s + AWAKE_S:
                self._watch_box()
                continue
            if give_up_s is not None and now_s() > give_up_s:
                raise TimeoutError
            self._sleep(give_up_s)
        message, self._peeked = self._peeked or self._next(), None
        return message

    def _watch_box(self) -> None:
        """For a while, or until something lies in it; the pipe, which takes a system call, is looked at in between."""
        if self._inbox is not None:
            for _ in range(LOOKS_AT_BOX):
                if self._is_in_box():
                    return

    def _sleep(self, give_up_s: float | None) -> None:
        """Until something comes through the pipe, if only to wake this end."""
        if self._inbox is None:
            self._poll.poll(_milliseconds_until(give_up_s))
            return
        self._inbox.reader_sleeps = True
        try:
            if not self._is_in_box():
                # Not for long: a message may have been put in just before this end was seen to sleep.
                self._poll.poll(min(LONGEST_SLEEP_MS, _milliseconds_until(give_up_s) or LONGEST_SLEEP_MS))
        finally:
            self._inbox.reader_sleeps = False

    def _next(self) -> Message:
        data = self._taken()
        self._num_received += 1
        return from_bytes(data)

    def _taken(self) -> bytes:
        if self._inbox is not None and self._is_in_box():
            return self._inbox.take()
        if not self._is_read():
            raise EOFError
        end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
        data = bytes(memoryview(self._unread)[_LENGTH.size : end])
        del self._unread[:end]
        while self._unread.startswith(WAKE):
            del self._unread[: len(WAKE)]
        return data

    def close(self) -> None:
        self._connection.close()


def pipe_ends() -> tuple[PipeEnd, PipeEnd]:
    """The two ends of one way, with mailboxes where the processor lets processes use them."""
    here, there = Pipe()
    to_here, to_there = (shared_memory(), shared_memory()) if STORES_ARE_SEEN_IN_ORDER else (None, None)
    return (here, to_here, to_there), (there, to_there, to_here)


def open_end(end: PipeEnd) -> PipeChannel:
    connection, inbox, outbox = end
    return PipeChannel(connection, None if inbox is None or outbox is None else (Mailbox(inbox), Mailbox(outbox)))


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
