"""The agreement records that the questions are answered on; `experiments.scripts.record_agreement` makes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.agreement import AgreementRecord

DATA = Path(__file__).parent / "data"
TEMPERATURES = (0, 1)


@cache
def read_record(name: str) -> AgreementRecord:
    """A record by name: `library`, `editor`, `smollm2` or `long`, then `_t0` or `_t1`."""
    return AgreementRecord.read(DATA / f"{name}.parquet")


def calibration_of(record: AgreementRecord) -> AgreementRecord:
    """The prompts that rules may learn from: excerpts of the two splits stand in turns."""
    return record.select(np.arange(0, record.num_prompts, 2))


def held_out_of(record: AgreementRecord) -> AgreementRecord:
    """The prompts that rules are judged by."""
    return record.select(held_out_numbers(record))


def held_out_numbers(record: AgreementRecord) -> NDArray[np.int64]:
    """Which prompts these are."""
    return np.arange(1, record.num_prompts, 2)
