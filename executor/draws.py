"""Uniform random numbers that depend on what they are for, never on when they are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """One random stream each: a draw that is reused for two purposes bends the emitted law."""

    DRAFT = 0  # draft tokens drafted one after another
    BRANCH = 1  # draft tokens of the branches of a build
    ACCEPT = 2  # acceptance tests
    RESIDUAL = 3  # bonus token after a rejection
    BONUS = 4  # bonus token after full acceptance; the first token
    FILLER = 5  # tokens drawn uniformly from the vocabulary


class Draws:
    """Counter-based generator (Philox) of one sequence, keyed by the seed, the prompt and the prompt's occurrence.

    The same prompt gets the same numbers wherever it stands in the workload; when it occurs again under the same
    settings it gets others.
    """

    def __init__(self, seed: int, prompt: Sequence[int], occurrence: int) -> None:
        text = f"{seed};{occurrence};{','.join(map(str, prompt))}"
        key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype=np.uint64)
        self._generator = np.random.Philox(key=key)
        self._start = self._generator.state  # nothing drawn, nothing buffered

    def uniforms(self, purpose: Purpose, round_index: int, num: int) -> Tensor:
        """(num,) float64 in [0, 1). Number i is the same for every `num`. `round_index` -1 is the prefill."""
        self._start["state"]["counter"][:] = (0, 0, round_index + 1, purpose)
        self._generator.state = self._start  # quicker than a new generator
        return torch.from_numpy((self._generator.random_raw(num) >> np.uint64(11)) * 2.0**-53)
