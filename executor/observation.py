"""What a controller is told of the rounds, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sim.decider import Controller, RoundSeen
from sim.policy import Policy
from sim.trace import Round


@dataclass
class DraftWork:
    """What the draft did for one round, in seconds.

    `draft_s` is drafting that the target waited for. `build_s` is the build beside the round, 0 if there was none or it
    was abandoned; None as long as that is not known.
    """

    draft_s: float = 0.0
    build_s: float | None = 0.0


class Observer:
    """Tells a controller of rounds, oldest first. One whose build goes on is told once the build has ended."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._unseen: deque[tuple[RoundSeen, DraftWork]] = deque()

    def end_round(self, policy: Policy, rows: Iterable[Round], verify_s: float, work: DraftWork) -> None:
        """A round of these rows has ended under `policy`; its verification took `verify_s`."""
        together = list(rows)
        for r in together:
            seen = RoundSeen(
                source=r.source,
                num_drafted=r.num_drafted,
                num_accepted=r.num_accepted,
                policy=policy,
                round_s=r.end_s - r.start_s,
                verify_s=verify_s,
                draft_s=work.draft_s,
                build_s=0.0,
                batch_size=len(together),
            )
            self._unseen.append((seen, work))
        while self._unseen and (build_s := self._unseen[0][1].build_s) is not None:
            seen, _ = self._unseen.popleft()
            self._controller.observe(replace(seen, build_s=build_s))
