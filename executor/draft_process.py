"""The draft role in a process of its own."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from executor.channel import PipeChannel, PipeEnd, open_end, pipe_ends
from executor.child import start_child
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
        own_end, child_end = pipe_ends()
        self.process = start_child(run, child_end, pair, dtype, place, self._dump.name, name="draft")
        child_end[0].close()  # the child's own copy must be the last one, or its death would go unnoticed
        super().__init__(open_end(own_end), answer_timeout_s)

    def _how_it_died(self) -> str:
        self.process.join(_STOP_TIMEOUT_S)
        code = self.process.exitcode
        return f"the draft process {'has closed its pipe' if code is None else f'died with exit code {code}'}"

    def _worked_s(self) -> float:
        """Its processor time, and the time as long as it waits for a disk."""
        try:
            state, *fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        return now_s() if state == "D" else sum(map(float, fields[10:12])) / os.sysconf("SC_CLK_TCK")

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


def run(end: PipeEnd, pair: Pair, dtype: str, place: Place, dump: str) -> None:
    """Main function of the child: serve until the caller closes its end of the pipe."""
    dump_file = Path(dump).open("w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(DUMP_SIGNAL, dump_file, all_threads=False)
    channel = open_end(end)
    try:
        serve(channel, partial(_load, channel, pair, dtype, place))
    finally:
        channel.close()
    os._exit(0)  # nothing is left to do, and the interpreter would take seconds to wind down


def _load(channel: PipeChannel, pair: Pair, dtype: str, place: Place) -> tuple[DraftService, dict[str, Any]]:
    placement = {"pid": os.getpid(), **place.settle()}
    model = place.load(pair, "draft", dtype)
    return DraftService(model, interrupted=channel.is_ready, upcoming=lambda: upcoming(channel)), placement
