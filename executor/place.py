"""Where a role works: a device, on the CPU a core, on a GPU a stream."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from executor.device import CPU, describe


@dataclass(frozen=True)
class Place:
    """`core` is the only one that the role's thread may use; None leaves it free."""

    device: torch.device = CPU
    core: int | None = None

    def settle(self) -> dict[str, Any]:
        """Bring the calling thread here, with one torch thread; returns what can be read back about it."""
        torch.set_num_threads(1)
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        pinned = {} if self.core is None else {"core": next(iter(os.sched_getaffinity(0)))}
        return {**describe(self.device), "threads": torch.get_num_threads(), **pinned}

    def stream(self, *, is_short_work: bool = False) -> AbstractContextManager[Any]:
        """On a GPU the role's own stream, which work of another role neither orders nor delays.

        Short work goes first where the device has to choose: it would else wait for kernels that fill the device.
        """
        if self.device.type == "cpu":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1 if is_short_work else 0))
