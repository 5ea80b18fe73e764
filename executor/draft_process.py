"""The draft role in a process of its own."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from executor.channel import PipeChannel
from executor.draft_client import ANSWER_TIMEOUT_S, DraftClient, serve, upcoming
from executor.draft_service import DraftService
from executor.pairs import Pair
from executor.place import Place
from executor.recorder import now_s

_STOP_TIMEOUT_S = 5.0
_DUMP_TIMEOUT_S = 1.0  # for a hanging child to say where it hangs
DUMP_SIGNAL = signal.SIGUSR1  # a child that gets it writes down where it is


class ProcessDraft(DraftClient):
    """The draft role in a child process, which dies with its parent."""

    def __init__(self, pair: Pair, dtype: str, place: Place, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._dump = NamedTemporaryFile(prefix="draft-")  # noqa: SIM115 - as long as the process
        context = multiprocessing.get_context("spawn")
        own_end, child_end = context.Pipe()
        args = (child_end, pair, dtype, place, self._dump.name)
        self.process = context.Process(target=run, args=args, daemon=True, name="draft")
        self.process.start()
        child_end.close()  # the child's own copy must be the last one, or its death would go unnoticed
        super().__init__(PipeChannel(own_end), answer_timeout_s)

    def _how_it_died(self) -> str:
        self.process.join(_STOP_TIMEOUT_S)
        return f"the draft process died with exit code {self.process.exitcode}"

    def _give_up(self) -> str:
        where = self._where_it_hangs()
        self.process.kill()
        return f"its process was ended\n{where}"

    def _where_it_hangs(self) -> str:
        """The child's traceback, if it is able to give one."""
        assert self.process.pid is not None  # it was started
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, DUMP_SIGNAL)
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


def run(connection: Connection, pair: Pair, dtype: str, place: Place, dump: str) -> None:
    """Main function of the child: serve until the caller closes its end of the pipe."""
    dump_file = Path(dump).open("w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(DUMP_SIGNAL, dump_file, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides; it closes the pipe
    channel = PipeChannel(connection)
    try:
        serve(channel, partial(_load, channel, pair, dtype, place))
    finally:
        channel.close()
    os._exit(0)  # nothing is left to do, and the interpreter would take seconds to wind down


def _load(channel: PipeChannel, pair: Pair, dtype: str, place: Place) -> tuple[DraftService, dict[str, Any]]:
    placement = {"pid": os.getpid(), **place.settle()}
    model = place.load(pair, "draft", dtype)
    return DraftService(model, interrupted=channel.is_ready, upcoming=lambda: upcoming(channel)), placement
