"""CPUs and GPUs: which there are, what they can do, and how small things get onto them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.recorder import now_s
from sim.errors import BadInput

CPU = torch.device("cpu")
PROBE_S = 1.0
_PROBE_SIZE = 512  # rows and columns of the matrix that is multiplied with one vector and with eight
_HALVES = ("bfloat16", "float16")


def resolve(name: str, device: str) -> torch.device:
    """`cpu`, `cuda` (the first one) or `cuda:i` -> the device. Raises `BadInput` if there is none of that name."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise BadInput(name, "must be cpu, cuda or cuda:i", device) from None
    if found.type == "cpu":
        return CPU
    if found.type != "cuda":
        raise BadInput(name, "must be cpu, cuda or cuda:i", device)
    num_gpus = torch.cuda.device_count()
    index = found.index or 0
    if index >= num_gpus:
        rule = (
            f"must be one of the {num_gpus} CUDA devices that torch finds" if num_gpus else "torch finds no CUDA device"
        )
        raise BadInput(name, rule, device)
    return torch.device("cuda", index)


def describe(device: torch.device) -> dict[str, Any]:
    """What distinguishes a device from another of the same name."""
    if device.type == "cpu":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {"device": str(device), "gpu": properties.name, "gpu_memory": properties.total_memory}


def describe_gpus() -> list[str]:
    """Every CUDA device that torch finds, in words."""
    described = [describe(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return [f"{gpu['device']}: {gpu['gpu']}, {gpu['gpu_memory'] / 2**30:.0f} GiB" for gpu in described]


def put(values: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host as a tensor of a device, without waiting for what the device is doing."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # only from pinned memory does a copy not wait


def on_host(tensor: Tensor) -> Tensor:
    """The same numbers for NumPy, which knows no bfloat16."""
    if tensor.is_floating_point():
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor.cpu()


def finish(tensors: Iterable[Tensor | None]) -> None:
    """Wait until tensors of a GPU hold what they are going to hold, for a reader in another stream."""
    for device in {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def together(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenation, without a copy of one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def num_usable_cores() -> int:
    """Cores of the affinity mask, or fewer where a control group grants less time."""
    granted = _quota(Path("/sys/fs/cgroup"))
    num_cores = len(os.sched_getaffinity(0))
    return num_cores if granted is None else max(1, min(num_cores, math.floor(granted)))


def _quota(cgroup: Path) -> float | None:
    """CPUs that a control group, of version 2 or 1, may use; None if it says nothing."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us, period_us = (int((cgroup / "cpu" / f"cpu.cfs_{n}_us").read_text()) for n in ("quota", "period"))
        return None if quota_us < 0 else quota_us / period_us
    except (OSError, ValueError):
        return None


def warn_of_slow_arithmetic(dtype: str, budget_s: float = PROBE_S) -> None:
    """Many CPUs only emulate 16-bit numbers, at a tenth of the speed of float32 or less: say so if this one does."""
    if dtype not in _HALVES:
        return
    ratio = time_against_float32(getattr(torch, dtype), budget_s)
    if ratio > 1:
        warnings.warn(f"{dtype} takes {ratio:.1f} times as long as float32 on this CPU", stacklevel=2)


def time_against_float32(dtype: torch.dtype, budget_s: float) -> float:
    """Time of a matrix multiplication in `dtype` over that in float32, medians of alternating measurements."""
    single = [_operands(torch.float32, num_rows) for num_rows in (1, 8)]
    half = [_operands(dtype, num_rows) for num_rows in (1, 8)]
    seconds: list[tuple[float, float]] = []
    give_up_s = now_s() + budget_s
    while len(seconds) < 2 or now_s() < give_up_s:
        seconds.append((_seconds(half), _seconds(single)))
    slow, fast = torch.tensor(seconds[1:], dtype=torch.float64).median(0).values.tolist()
    return slow / fast


def _operands(dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(num_rows, _PROBE_SIZE, dtype=dtype), torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)


@torch.inference_mode()
def _seconds(operands: Sequence[tuple[Tensor, Tensor]]) -> float:
    start_s = now_s()
    for rows, weight in operands:
        torch.nn.functional.linear(rows, weight)
    return now_s() - start_s
