"""What a controller is told about a system before its first round."""

from __future__ import annotations

from sim.beliefs import AffineTime, ExpectedTimes
from sim.system import HostTerm, System
from sim.trace import Lane, Operation
from sim.workload import Workload


def expected_times(system: System, workload: Workload, longest: int, widest: int) -> ExpectedTimes:
    """Times as a profile of the system says them: lines through what `longest` draft tokens and `widest` branches take
    and what one takes, at the context in the middle of the texts and the workload's number of rows."""
    rows = workload.batch_size
    context = int(system.agreement.prompt_length.mean()) + workload.max_new_tokens // 2

    def line(lane: Lane, operation: Operation, most: int, *, beside: bool = False) -> AffineTime:
        """Over the tokens of all rows; an operation that gets faster with more tokens is taken to be constant."""
        first_s, last_s = (
            float(system.mean_s(lane, operation, width, context, beside=beside, batch_size=rows)) for width in (1, most)
        )
        per_token_s = max(0.0, last_s - first_s) / max(1, rows * (most - 1))
        return AffineTime(max(0.0, first_s - rows * per_token_s), per_token_s)

    return ExpectedTimes(
        verify=line(Lane.TARGET, Operation.VERIFY, longest + 1),
        draft_step=line(Lane.DRAFT, Operation.DRAFT_STEP, 1),
        tree_step=line(Lane.DRAFT, Operation.TREE_STEP, widest, beside=True),
        glue=line(Lane.DRAFT, Operation.GLUE, longest + 1, beside=True),
        host_s=system.host_s[HostTerm.HIT],
        contention=system.slowdown(Lane.TARGET, beside=True),
    )
