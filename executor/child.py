"""A child process that ends with its parent from its first moments, while it still loads its libraries.

Nothing heavy is imported here: what the child runs comes as bytes, which it reads when it is already on its guard.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any


def start_child(function: Callable[..., None], end: object, *args: Any, name: str) -> BaseProcess:
    """`function(end, *args)` in a process of its own, which no Ctrl-C ends: its parent decides."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_main, args=(end, pickle.dumps((function, args))), daemon=True, name=name)
    resource_tracker.ensure_running()  # starting it lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits this
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _main(end: object, parcel: bytes) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function, args = pickle.loads(parcel)
    function(end, *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
