"""A pipe end that waits awake for a while before it sleeps."""

from __future__ import annotations

import select
from multiprocessing.connection import Connection

from executor.recorder import now_s

# A process that slept is woken late, and its core works slowly at first. Within a round every wait is shorter than
# this; a role that is not needed sleeps.
AWAKE_S = 0.02


class Channel:
    """Messages of bytes, in order. Raises EOFError or OSError as a Connection does if the other end is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._peeked: bytes | None = None
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        self._connection.send_bytes(message)

    def is_ready(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return self._peeked is not None or bool(self._poll.poll(0))

    def peek(self) -> bytes | None:
        """The message that `receive` would return at once, if there is one."""
        if self._peeked is None and self.is_ready():
            self._peeked = self._connection.recv_bytes()
        return self._peeked

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message. Raises TimeoutError if there is none for `timeout_s` seconds."""
        if self._peeked is not None:
            message, self._peeked = self._peeked, None
            return message
        awake_until_s = now_s() + AWAKE_S
        while not self.is_ready() and now_s() < awake_until_s:
            pass
        if timeout_s is not None and not self._poll.poll(1000 * timeout_s):
            raise TimeoutError
        return self._connection.recv_bytes()

    def close(self) -> None:
        self._connection.close()
