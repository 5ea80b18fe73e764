"""What a machine can do is asked, not assumed."""

import warnings

import pytest
import torch

from executor import device
from executor.concurrency import open_runner
from executor.device import num_usable_cores, put, resolve, time_against_float32, warn_of_slow_arithmetic
from executor.recorder import now_s
from executor.toy_model import FakePair, HashModel
from sim.errors import BadInput

CPU = torch.device("cpu")


def test_devices_that_are_not_there_are_refused(monkeypatch) -> None:
    assert resolve("device", "cpu") == CPU
    for name in ("gpu", "meta", "cuda:x", "cpu,cuda"):
        with pytest.raises(BadInput, match=r"draft_device: must be cpu, cuda or cuda:i"):
            resolve("draft_device", name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve("device", "cuda") == torch.device("cuda", 0)
    assert resolve("device", "cuda:1") == torch.device("cuda", 1)
    with pytest.raises(BadInput, match="must be one of the 2 CUDA devices"):
        resolve("device", "cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, match="device: torch finds no CUDA device, got 'cuda'"):
        resolve("device", "cuda")


def test_two_processes_do_not_share_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    models = {role: HashModel(16, 0) for role in ("target", "draft")}
    with (
        pytest.raises(BadInput, match="would take turns on one GPU; use streams"),
        open_runner(FakePair(models=models), "processes", device="cuda", draft_device="cuda:0"),
    ):
        pass


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_a_control_group_may_grant_less_than_the_affinity(files, expected, tmp_path, monkeypatch) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert device._quota(tmp_path) == expected
    monkeypatch.setattr(device, "_quota", lambda _: expected)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert num_usable_cores() == (3 if expected is None else 1)


def test_numbers_are_put_where_they_are_needed() -> None:
    assert put([[1, 2]], CPU).tolist() == [[1, 2]]
    assert put([0.5], CPU, torch.float64).dtype == torch.float64
    already = torch.zeros(2)
    assert put(already, CPU).data_ptr() == already.data_ptr()


def test_slow_arithmetic_is_measured_and_said_aloud(monkeypatch) -> None:
    start_s = now_s()
    ratio = time_against_float32(torch.bfloat16, budget_s=0.05)
    assert ratio > 0 and now_s() - start_s < 5
    monkeypatch.setattr(device, "time_against_float32", lambda dtype, budget_s: 9.4)
    with pytest.warns(UserWarning, match="float16 takes 9.4 times as long as float32"):
        warn_of_slow_arithmetic("float16")
    monkeypatch.setattr(device, "time_against_float32", lambda dtype, budget_s: 0.6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in ("float32", "bfloat16"):
            warn_of_slow_arithmetic(dtype)
