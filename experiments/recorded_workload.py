"""The workload of a system's own agreement."""

from __future__ import annotations

from sim.agreement import Agreement
from sim.workload import Workload


def recorded_workload(agreement: Agreement) -> Workload:
    """The rules that the agreement was measured under; of the prompts only the lengths, all that a prediction needs."""
    identity = agreement.identity
    return Workload(
        dataset=identity["dataset"],
        prompts=tuple((0,) * int(length) for length in agreement.prompt_length),
        max_new_tokens=agreement.max_new_tokens,
        stop_ids=tuple(identity["stop_ids"]),
        sampling=(agreement.sampling,) * agreement.num_prompts,
        stop_strings=agreement.stop_strings,
    )
