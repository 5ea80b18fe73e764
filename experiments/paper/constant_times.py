"""Systems whose operations take constant times, stated in verifications: what a question is asked on."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.agreement import Agreement
from sim.latency import LatencyModel, OperationLatency
from sim.placement import Placement
from sim.system import HostTerm, System
from sim.trace import Lane, Operation

ANY_NUMBER = 2**31  # of tokens, of KV entries
MOST_ROWS = 64  # of a batch, which takes as long as one row


@dataclass(frozen=True)
class StepCosts:
    """A verification takes `verify_s`, however many tokens it verifies; all else is in verifications. A tree step
    drafts one token of every branch, `glue` begins a build.

    The defaults are between what is published of a 1B draft beside a 70B target on four devices (a draft step of about
    .1) and a sweep of a public engine (.22): a build of four tokens fits beside a verification.
    """

    draft_step: float = 0.15
    tree_step: float = 0.15
    glue: float = 0.15
    verify_s: float = 0.010
    placement: Placement = field(default_factory=Placement)

    @classmethod
    def of_ratio(cls, draft_over_verify: float) -> StepCosts:
        """Every step of the draft at one cost."""
        return cls(draft_over_verify, draft_over_verify, draft_over_verify)

    def build(self, speculation_length: int) -> float:
        """In verifications."""
        return self.glue + speculation_length * self.tree_step

    def system(self, agreement: Agreement) -> System:
        """Roles on devices of their own that do not slow each other, without host time."""
        costs = {
            (Lane.TARGET, Operation.VERIFY): 1.0,
            (Lane.DRAFT, Operation.DRAFT_STEP): self.draft_step,
            (Lane.DRAFT, Operation.GLUE): self.glue,
            (Lane.DRAFT, Operation.TREE_STEP): self.tree_step,
        }
        tables = {key: _constant(key[1], cost * self.verify_s) for key, cost in costs.items()}
        return System(
            latency=LatencyModel(tables),
            contention=dict.fromkeys(Lane, 1.0),
            host_s=dict.fromkeys(HostTerm, 0.0),
            agreement=agreement,
            identity={"source": "constant times"},
            placement=self.placement,
        )


def _constant(operation: Operation, seconds: float) -> OperationLatency:
    knots = {width: ((0, seconds), (ANY_NUMBER, seconds)) for width in (1, ANY_NUMBER)}
    return OperationLatency(operation, knots, (1.0,), {MOST_ROWS: knots})
