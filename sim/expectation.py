"""Expected totals of a policy over texts, whichever engine found them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Expectation:
    """Expected totals of each prompt under one policy; arrays are (num_prompts,), or (2, num_prompts) by source of the
    round that ends with the look-up: after a hit, after a miss.

    `doubt` is the largest half-width of a mean hit probability that the agreement record leaves open; 0 where its law
    is exact. `notes` say what the totals leave out. `batch` (num_prompts,) is the number of the batch that a prompt is
    decoded in, from 0 on; None stands for batches of prompts that follow one another.
    """

    num_tokens: FloatArray
    num_rounds: FloatArray
    seconds: FloatArray
    num_lookups: FloatArray
    num_hits: FloatArray
    doubt: float = 0.0
    notes: tuple[str, ...] = ()
    batch: IntArray | None = None
