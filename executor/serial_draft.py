"""The draft role in the process of its caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from executor.draft_service import DraftService
from executor.language_model import LanguageModel
from executor.observation import DraftWork
from executor.sequence import Question, Request
from executor.speculation_cache import Speculation
from sim.trace import Span


class SerialDraft:
    """The draft role in this process: a build runs before the verification, nothing overlaps."""

    def __init__(self, model: LanguageModel) -> None:
        self._service = DraftService(model, interrupted=lambda: True, upcoming=lambda: None)
        self._result: Any = None
        self._tells_builds = False

    @property
    def work(self) -> DraftWork:
        return DraftWork(self._service.draft_s(), self._service.build_s()) if self._tells_builds else DraftWork()

    def begin(self, requests: Sequence[Request], *, tells_builds: bool = False) -> None:
        self._tells_builds = tells_builds
        self._service.begin(requests)

    def wait(self) -> None:
        """`begin` has waited."""

    def speculate(self, question: Question) -> dict[int, Speculation]:
        speculations = self._service.speculate(question)
        self._service.prepare()
        return speculations

    def take_notice(self) -> None:
        """What it built is known."""

    def spans(self) -> list[Span]:
        return self._service.spans()

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the draft service; `result` returns what it gave."""
        self._result = getattr(self._service, method)(*args, **kwargs)

    def is_done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result
