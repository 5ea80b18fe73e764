"""How verification and build run together: in two processes, in two threads of one, or one after the other."""

from __future__ import annotations

import os
import platform
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from executor.device import CPU, num_usable_cores, resolve, warn_of_slow_arithmetic
from executor.draft_client import ANSWER_TIMEOUT_S, DraftClient
from executor.draft_process import ProcessDraft
from executor.draft_thread import ThreadDraft
from executor.folder_pair import ROLES
from executor.pairs import DTYPES, Pair
from executor.place import Place
from executor.recorder import Recorder, clock_of
from executor.serial_draft import SerialDraft
from executor.static_pass import PassCounts
from executor.target import Target
from sim.errors import BadInput, require_number
from sim.trace import Lane

CONCURRENCY_KINDS = ("auto", "processes", "streams", "serial")


OVERLAP = {"processes": "two processes", "streams": "two threads", "serial": "none"}


@dataclass(frozen=True)
class Runner:
    """A loaded pair with its roles in place. `concurrency` is `processes`, `streams` or `serial`."""

    pair: Pair
    concurrency: str
    target: Target
    draft: SerialDraft | DraftClient
    placement: dict[str, Any]

    @property
    def overlaps(self) -> bool:
        """Whether the draft works while the target verifies, as far as the device lets it."""
        return self.concurrency != "serial"

    @property
    def graphs(self) -> bool:
        """Whether passes have fixed shapes, which are recorded where the device can."""
        return "passes" in self.placement

    def capture(self) -> dict[str, PassCounts]:
        """Record the passes that earlier runs have met, where `graphs` were asked for; what was done so far, by role.

        Called before a run, so that no recording is in a measured time.
        """
        target = self.target.model.capture()  # one after the other: a recording wants the device for itself
        self.draft.start("capture")
        return {"target": target, "draft": self.draft.result()}

    def identity(self) -> dict[str, Any]:
        """What must be the same before a record of one run speaks about another."""
        return {
            "pair": self.pair.name,
            "sha256": self.pair.hashes,
            "cpu_model": _cpu_model(),
            "num_cores": os.cpu_count(),
            "dtype": str(self.target.model.dtype).removeprefix("torch."),
            "attention": self.target.model.attention,
            "concurrency": self.concurrency,
            "overlap": OVERLAP[self.concurrency],
            **self.placement,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        }


@contextmanager
def open_runner(
    pair: Pair,
    concurrency: str = "auto",
    dtype: str = "float32",
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
    *,
    device: str = "cpu",
    draft_device: str | None = None,
    graphs: bool = False,
) -> Iterator[Runner]:
    """Load the pair and keep it ready: `with open_runner(pair) as runner`.

    `device` is `cpu`, `cuda` or `cuda:i`, and both roles' unless the draft has a `draft_device` of its own.

    `processes`: the draft in a child, on CPUs each role pinned to a core of its own with one torch thread. `streams`:
    both in this process, the draft in a thread, on a GPU each with a stream of its own; the way to share one GPU, which
    two processes could use in turn only. `serial`: both in this process, one thread, no overlap. `auto`: processes
    where each role has a device or a core of its own, streams where they share a GPU, else serial with a warning.

    With `graphs` the passes after a prefill have fixed shapes. On a GPU a shape that a run has met is recorded as a
    CUDA graph before the next run, and replayed from then on; on a CPU nothing is recorded and nothing gained.

    The caller's affinity and threads are restored at the end, and no process is left. A draft that a decoder waits for
    longer than `answer_timeout_s` is taken to hang.
    """
    if dtype not in DTYPES:
        raise BadInput("dtype", f"must be one of {', '.join(DTYPES)}", dtype)
    require_number("answer_timeout_s", answer_timeout_s, 0, above=True)
    devices = resolve("device", device), resolve("draft_device", draft_device or device)
    with _unpinned():
        kind = _resolve(concurrency, *devices)
        if CPU in devices:
            warn_of_slow_arithmetic(dtype)
        yield from _opened(pair, kind, dtype, _places(kind, *devices, graphs), answer_timeout_s)


_PINNED: dict[int, tuple[set[int], set[int]]] = {}  # by thread with a runner open: the cores it has, and had before


@contextmanager
def _unpinned() -> Iterator[None]:
    """Where an open runner has pinned the calling thread, it has its cores again; at the end all is as it is now."""
    thread, cores, num_threads = threading.get_native_id(), os.sched_getaffinity(0), torch.get_num_threads()
    outer = _PINNED.get(thread, (cores, cores))
    if cores == outer[0]:
        os.sched_setaffinity(0, outer[1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)
        _PINNED[thread] = outer


def _resolve(concurrency: str, device: torch.device, draft_device: torch.device) -> str:
    if concurrency not in CONCURRENCY_KINDS:
        raise BadInput("concurrency", f"must be one of {', '.join(CONCURRENCY_KINDS)}", concurrency)
    shares_gpu = device == draft_device != CPU
    too_few_cores = device == draft_device == CPU and len(os.sched_getaffinity(0)) < 2
    if concurrency == "processes" and shares_gpu:
        rule = "processes would take turns on one GPU; use streams, or a draft_device"
        raise BadInput("concurrency", rule, str(device))
    if concurrency == "processes" and too_few_cores:
        raise BadInput("concurrency", "processes needs two cores in the affinity mask; use serial", 1)
    if concurrency != "auto":
        return concurrency
    if too_few_cores:
        warnings.warn("one core only: draft and target run serially, overlap: none", stacklevel=4)
        return "serial"
    return "streams" if shares_gpu else "processes"


def _places(kind: str, device: torch.device, draft_device: torch.device, graphs: bool) -> dict[str, Place]:
    """Roles that run side by side on the CPU have a core each, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    is_pinned = kind != "serial" and len(cores) > 1
    return {
        role: Place(own, cores[number] if is_pinned and own == CPU else None, graphs)
        for number, (role, own) in enumerate(zip(ROLES, (device, draft_device), strict=True))
    }


def _opened(
    pair: Pair, kind: str, dtype: str, places: Mapping[str, Place], answer_timeout_s: float
) -> Iterator[Runner]:
    """The target here, the draft where `kind` says."""
    num_cores = num_usable_cores()
    with ExitStack() as stack:
        draft: SerialDraft | DraftClient | None = None
        if kind != "serial":
            starting = ProcessDraft if kind == "processes" else ThreadDraft
            draft = stack.enter_context(closing(starting(pair, dtype, places["draft"], answer_timeout_s)))
        before = os.sched_getaffinity(0)
        settled = {"target": places["target"].settle()}
        _PINNED[threading.get_native_id()] = os.sched_getaffinity(0), before
        stack.enter_context(places["target"].stream())
        model = places["target"].load(pair, "target", dtype)
        target = Target(model, Recorder(Lane.TARGET, clock_of(model.device)))
        if isinstance(draft, DraftClient):
            draft.wait_until_loaded()
            settled["draft"] = draft.placement
            _warn_of_crowding(settled, num_cores)
        else:
            settled["draft"] = places["draft"].settle()
            draft = SerialDraft(places["draft"].load(pair, "draft", dtype))
        yield Runner(pair, kind, target, draft, _placement(kind, settled))


def _placement(kind: str, settled: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the roles read back about themselves, for `Runner.identity`."""
    devices = {role: own["device"] for role, own in settled.items()}
    threads = {role: own["threads"] for role, own in settled.items()}
    cores = {role: own["core"] for role, own in settled.items() if "core" in own}
    gpus = {role: own["gpu"] for role, own in settled.items() if "gpu" in own}
    return {
        "device": devices["target"] if devices["target"] == devices["draft"] else devices,
        "threads": threads if kind != "serial" else {"both": threads["target"]},
        **({"pinned_cores": cores} if cores else {}),
        **({"gpus": gpus} if gpus else {}),
        **({"passes": "of fixed shapes"} if settled["target"]["graphs"] else {}),
    }


def _warn_of_crowding(settled: Mapping[str, Mapping[str, Any]], num_cores: int) -> None:
    """More threads than cores wait for each other, and everything takes several times as long."""
    threads = sum(own["threads"] for own in settled.values())
    if threads > num_cores:
        found = f"draft and target have {threads} threads, but affinity and control group {num_cores} cores"
        warnings.warn(f"{found}: times will be far too long", stacklevel=4)


@cache
def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
