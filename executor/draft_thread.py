"""The draft role in a thread of its own: on a GPU with a stream of its own beside the target's."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

from executor.channel import QueueChannel, queue_channels
from executor.draft_client import ANSWER_TIMEOUT_S, DraftClient, serve, upcoming
from executor.draft_service import DraftService
from executor.pairs import Pair
from executor.place import Place
from executor.recorder import now_s

_STOP_TIMEOUT_S = 5.0


class ThreadDraft(DraftClient):
    """The draft role in a thread of this process. One that hangs cannot be ended, only left behind."""

    def __init__(self, pair: Pair, dtype: str, place: Place, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        own_end, its_end = queue_channels()
        super().__init__(own_end, answer_timeout_s)
        self.thread = threading.Thread(target=_run, args=(its_end, pair, dtype, place), daemon=True, name="draft")
        self.thread.start()

    def _worked_s(self) -> float:
        return now_s()  # it may wait for another thread that works for it

    def _how_it_died(self) -> str:
        return "the draft thread has ended"

    def _give_up(self) -> str:
        frame = sys._current_frames().get(self.thread.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame else "it has ended"
        return f"its thread is left behind\n{where}"

    def close(self) -> None:
        self._channel.close()
        self.thread.join(_STOP_TIMEOUT_S)


def _run(channel: QueueChannel, pair: Pair, dtype: str, place: Place) -> None:
    def load() -> tuple[DraftService, dict[str, Any]]:
        placement = place.settle()
        model = place.load(pair, "draft", dtype)
        return DraftService(model, interrupted=channel.is_ready, upcoming=lambda: upcoming(channel)), placement

    try:
        with place.stream(is_short_work=True):
            serve(channel, load)
    finally:
        channel.close()
