"""The draft role: everything the draft model does on request, in the calling process or in a child."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from executor.device import on_host, put
from executor.drafting import Drafter
from executor.language_model import LanguageModel
from executor.latency_cells import DraftCell, measure_draft
from executor.recorder import Recorder, clock_of
from executor.sequence import Question, Request
from executor.speculation_cache import Speculation
from executor.speculator import Speculator, Upcoming
from executor.static_pass import PassCounts
from sim.trace import Lane, Operation, Span


class DraftService:
    """Holds the draft model. `interrupted` tells an endless job that the next request has arrived, `upcoming` an
    unfinished build what it is."""

    def __init__(self, model: LanguageModel, interrupted: Callable[[], bool], upcoming: Upcoming) -> None:
        self.model = model
        self._recorder = Recorder(Lane.DRAFT, clock_of(model.device))
        self._interrupted = interrupted
        self._upcoming = upcoming

    # ------------------------------------------------------------------------------------------------- decoding

    def begin(self, requests: Sequence[Request]) -> None:
        """Prefill the prompts of a batch."""
        self._recorder.begin_batch([request.index for request in requests])
        drafter = Drafter(self.model, self._recorder, requests)
        self._recorder.wait()  # the first round begins after the prefill
        self._speculator = Speculator(drafter, self._recorder, self._upcoming)

    def speculate(self, question: Question) -> dict[int, Speculation]:
        self._first_of_answer = self._recorder.num_spans
        speculations = self._speculator.speculate(question)
        self._first_of_build = self._recorder.num_spans
        return speculations

    def prepare(self) -> None:
        """What follows an answer while the target verifies."""
        self._is_built = self._speculator.prepare()

    def draft_s(self) -> float:
        """How long the drafting for the last answer took."""
        spans = self._recorder.spans[self._first_of_answer : self._first_of_build]
        return _seconds([span for span in spans if span.operation is Operation.DRAFT_STEP])

    def build_s(self) -> float:
        """How long the build took that followed it; 0 if nothing was built."""
        return _seconds(self._recorder.spans[self._first_of_build :]) if self._is_built else 0.0

    def capture(self) -> PassCounts:
        """Record the passes that earlier runs have met."""
        return self.model.capture()

    def spans(self) -> list[Span]:
        """The draft's spans of the batch."""
        return self._recorder.spans

    # ------------------------------------------------------------------------------------------------ profiling

    def score(self, texts: Sequence[Sequence[int]], num_rows: int) -> NDArray[np.floating]:
        """Texts of equal length -> (num_texts, num_rows, V) logits after each of the last `num_rows` tokens."""
        rows = self.model.with_rows(len(texts))
        return on_host(rows.append_rows(put(texts, self.model.device), num_logits=num_rows)).numpy()

    def measure(self, cells: Sequence[DraftCell], num_repeats: int) -> list[Span]:
        """Time every cell once, in the order given."""
        return [span for cell in cells for span in measure_draft(self.model, cell, num_repeats)]

    def keep_busy(self, cells: Sequence[DraftCell]) -> int:
        """Work through `cells` again and again until the next request; return how many were done."""
        num_done = 0
        while not self._interrupted():
            measure_draft(self.model, cells[num_done % len(cells)], num_repeats=1)
            num_done += 1
        return num_done

    def answer(self) -> None:
        """Nothing, at once: ends `keep_busy`."""


def _seconds(spans: Sequence[Span]) -> float:
    """From the start of the first to the end of the last."""
    return spans[-1].end_s - spans[0].start_s if spans else 0.0
