"""What a search maximises, and how many devices a policy takes for it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sim.policy import Policy
from sim.serving import draws_on_draft
from sim.simulate import Prediction
from sim.system import System


class Objective(StrEnum):
    """Of tokens per second. Of one batch size the first two rank alike."""

    TOKENS_PER_S = "tokens_per_s"  # of one sequence
    THROUGHPUT = "throughput"  # of all rows of all targets
    THROUGHPUT_PER_DEVICE = "throughput_per_device"  # the same over the devices, those of the draft included
    GOODPUT = "goodput"  # of requests that meet their promise under a load (`sim.goodput`)

    def weight(self, policy: Policy, system: System, batch_size: int) -> float:
        """What makes the objective of tokens/s of a target; goodput is that of a load, and first screened by
        throughput."""
        num_targets = system.placement.num_targets
        if self is Objective.TOKENS_PER_S:
            return 1 / batch_size
        if self is Objective.THROUGHPUT_PER_DEVICE:
            return num_targets / num_devices(policy, system)
        return float(num_targets)


def num_devices(policy: Policy, system: System) -> int:
    """The targets, and the draft devices of a policy that drafts on devices of their own."""
    return system.num_devices(uses_draft=draws_on_draft(policy))


def tpot_s(prediction: Prediction[Any], batch_size: int) -> float:
    """Time per token of one of `batch_size` rows, counted until the last row of its batch ends, in seconds."""
    return batch_size / max(prediction.tokens_per_s.value, 1e-300)
