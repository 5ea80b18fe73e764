"""How verification and build run together: one after the other, or in two processes on two cores."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from executor.draft_process import ANSWER_TIMEOUT_S, ProcessDraft, pin
from executor.draft_service import DraftService
from executor.language_model import LanguageModel
from executor.observation import DraftWork
from executor.pairs import DTYPES, Pair
from executor.recorder import Recorder
from executor.sequence import Question, Request
from executor.speculation_cache import Speculation
from executor.target import Target
from sim.errors import BadInput
from sim.trace import Lane, Span

CONCURRENCY_KINDS = ("auto", "processes", "serial")


class SerialDraft:
    """The draft role in this process: a build runs before the verification, nothing overlaps."""

    def __init__(self, model: LanguageModel) -> None:
        self._service = DraftService(model, interrupted=lambda: True, upcoming=lambda: None)
        self._result: Any = None

    @property
    def work(self) -> DraftWork:
        return self._service.work

    def begin(self, requests: Sequence[Request], *, tells_builds: bool = False) -> None:
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


@dataclass(frozen=True)
class Runner:
    """A loaded pair with its roles in place. `concurrency` is `processes` or `serial`."""

    pair: Pair
    concurrency: str
    target: Target
    draft: SerialDraft | ProcessDraft
    placement: dict[str, Any]

    @property
    def overlaps(self) -> bool:
        """Whether the draft works while the target verifies."""
        return self.concurrency == "processes"

    def identity(self) -> dict[str, Any]:
        """What must be the same before a record of one run speaks about another."""
        return {
            "pair": self.pair.name,
            "sha256": self.pair.hashes,
            "device": "cpu",
            "cpu_model": _cpu_model(),
            "num_cores": os.cpu_count(),
            "dtype": str(self.target.model.dtype).removeprefix("torch."),
            "attention": self.target.model.attention,
            "concurrency": self.concurrency,
            "overlap": "two processes" if self.overlaps else "none",
            **self.placement,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        }


@contextmanager
def open_runner(
    pair: Pair, concurrency: str = "auto", dtype: str = "float32", answer_timeout_s: float = ANSWER_TIMEOUT_S
) -> Iterator[Runner]:
    """Load the pair and keep it ready: `with open_runner(pair) as runner`.

    `processes`: the draft in a child, each role pinned to a core of its own with one torch thread. `serial`: both in
    this process, one thread, no overlap. `auto`: processes where the affinity mask has two cores, else serial with a
    warning. The caller's affinity and threads are restored at the end, and no process is left. A draft process that a
    decoder waits for longer than `answer_timeout_s` is taken to hang.
    """
    if dtype not in DTYPES:
        raise BadInput("dtype", f"must be one of {', '.join(DTYPES)}", dtype)
    kind = _resolve(concurrency)
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        yield from (_processes(pair, dtype, answer_timeout_s) if kind == "processes" else _serial(pair, dtype))
    finally:
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads(threads)


def _resolve(concurrency: str) -> str:
    if concurrency not in CONCURRENCY_KINDS:
        raise BadInput("concurrency", f"must be one of {', '.join(CONCURRENCY_KINDS)}", concurrency)
    num_cores = len(os.sched_getaffinity(0))
    if concurrency == "processes" and num_cores < 2:
        raise BadInput("concurrency", "processes needs two cores in the affinity mask; use serial", num_cores)
    if concurrency == "auto" and num_cores < 2:
        warnings.warn("one core only: draft and target run serially, overlap: none", stacklevel=3)
        return "serial"
    return "processes" if concurrency == "auto" else concurrency


def _serial(pair: Pair, dtype: str) -> Iterator[Runner]:
    torch.set_num_threads(1)
    draft = SerialDraft(pair.load("draft", dtype))
    target = Target(pair.load("target", dtype), Recorder(Lane.TARGET))
    yield Runner(pair, "serial", target, draft, {"threads": {"both": torch.get_num_threads()}})


def _processes(pair: Pair, dtype: str, answer_timeout_s: float) -> Iterator[Runner]:
    target_core, draft_core = sorted(os.sched_getaffinity(0))[:2]
    draft = ProcessDraft(pair, dtype, draft_core, answer_timeout_s)
    try:
        target_threads = pin(target_core)
        target = Target(pair.load("target", dtype), Recorder(Lane.TARGET))
        draft.wait_until_loaded()
        placement = {
            "threads": {"target": target_threads, "draft": draft.placement["threads"]},
            "pinned_cores": {"target": target_core, "draft": draft.placement["core"]},
        }
        yield Runner(pair, "processes", target, draft, placement)
    finally:
        draft.close()


@cache
def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
