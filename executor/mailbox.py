"""One message at a time through memory that two processes share: no system call stands between them.

A pipe takes two system calls and the kernel's own time on either side, which a round on a small model feels.
"""

from __future__ import annotations

import ctypes
import platform
from multiprocessing.sharedctypes import RawArray

_PUT, _TAKEN, _LENGTH, _SLEEPS = range(4)  # words before the message: two numbers, its bytes, the reader's state
_HEAD_BYTES = 4 * 8
CAPACITY = 4 << 20  # bytes of a message, the distributions of some tens of draft tokens among them; longer: the pipe
# The number of a message is stored after the message itself, and must not be seen before it.
STORES_ARE_SEEN_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")

Memory = ctypes.Array[ctypes.c_byte]  # it may be handed to a process when that is started


def shared_memory(capacity: int = CAPACITY) -> Memory:
    """For one `Mailbox`; gone with the last process that has it."""
    return RawArray(ctypes.c_byte, _HEAD_BYTES + capacity)


class Mailbox:
    """One direction. The writer numbers all its messages 1, 2, ..., those that go another way too; one that finds the
    box taken, or does not fit, must go another way, and the reader takes them in the order of their numbers."""

    def __init__(self, memory: Memory) -> None:
        whole = memoryview(memory).cast("B")
        self._words = whole[:_HEAD_BYTES].cast("q")  # aligned, each stored at once
        self._message = whole[_HEAD_BYTES:]

    def put(self, number: int, data: bytes) -> bool:
        """Whether message `number` could be put in: the reader has taken the last one, and it fits."""
        words = self._words
        if words[_TAKEN] != words[_PUT] or len(data) > len(self._message):
            return False
        self._message[: len(data)] = data
        words[_LENGTH] = len(data)
        words[_PUT] = number
        return True

    def holds(self, number: int) -> bool:
        return self._words[_PUT] == number

    def take(self) -> bytes:
        """The message in it, which makes room for the next one."""
        words = self._words
        data = bytes(self._message[: words[_LENGTH]])
        words[_TAKEN] = words[_PUT]
        return data

    @property
    def reader_sleeps(self) -> bool:
        """Whether the reader must be woken to see what was put in."""
        return bool(self._words[_SLEEPS])

    @reader_sleeps.setter
    def reader_sleeps(self, sleeps: bool) -> None:
        self._words[_SLEEPS] = sleeps
