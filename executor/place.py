"""Where a role works: a device, on the CPU a core, on a GPU a stream."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from executor.cuda_graphs import graph_capture
from executor.device import CPU, describe
from executor.language_model import LanguageModel
from executor.pairs import Pair

_LOADING = threading.Lock()  # transformers changes settings of the whole process while it loads a model


@dataclass(frozen=True)
class Place:
    """`core` is the only one that the role's thread may use; None leaves it free."""

    device: torch.device = CPU
    core: int | None = None
    graphs: bool = False  # passes of fixed shapes, recorded where the device can

    def settle(self) -> dict[str, Any]:
        """Bring the calling thread here, with one torch thread; returns what can be read back about it."""
        torch.set_num_threads(1)
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        pinned = {} if self.core is None else {"core": next(iter(os.sched_getaffinity(0)))}
        return {**describe(self.device), "threads": torch.get_num_threads(), "graphs": self.graphs, **pinned}

    def load(self, pair: Pair, role: str, dtype: str) -> LanguageModel:
        """A model of the pair, where this place is."""
        with _LOADING:
            model = pair.load(role, dtype, str(self.device))
        if self.graphs:
            model.use_static_passes(graph_capture(self.device) if self.device.type == "cuda" else None)
        return model

    def stream(self, *, is_short_work: bool = False) -> AbstractContextManager[Any]:
        """On a GPU the role's own stream, which work of another role neither orders nor delays.

        Short work goes first where the device has to choose: it would else wait for kernels that fill the device.
        """
        if self.device.type == "cpu":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1 if is_short_work else 0))
