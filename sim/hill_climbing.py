"""The controller without a model: it tries its neighbours on a grid of policies and stays where it was faster.

It changes its policy at most once every `interval` rounds, whatever is observed.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import Any

from sim.beliefs import Pace
from sim.decider import RoundSeen, RowsOfRounds
from sim.errors import require_count, require_number
from sim.policy import Fallback, LateBuild, Policy, uniform_fan_out
from sim.policy_grid import check_grid, grid_name, json_safe, num_drafted_after_miss, policy_of


@dataclass(frozen=True)
class HillClimbing:
    """Neighbours on the grid of speculation lengths and budgets are tried in turn and kept if they were faster.

    The baseline without a model. It starts at the smallest K and budget (K = 0 is AR, budget 0 is SD; fan-outs are
    uniform), runs `interval` rounds, then as many with a neighbour, and keeps it if its measured tokens per second are
    better by more than a share `margin`; else it goes back, measures itself anew and tries the next neighbour. If
    none is better it rests for `rest` intervals and tries all of them again.

    - `interval`: accepted counts vary by about 60 % of their mean, so that 200 rounds leave an error of 4 %.
    - `margin`: below the error of the comparison, or nothing would ever pass; above 0, or half of all ties would.
    - `rest`: trying costs up to four neighbours in eight intervals; 16 intervals of rest make that a third of the time.
    - `most_candidates`: the largest entry of a fan-out list; lists are cut to it. None sets no limit.
    """

    speculation_lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    fallback: Fallback = Fallback.DRAFT
    on_late_build: LateBuild = LateBuild.WAIT
    interval: int = 200
    margin: float = 0.03
    rest: int = 16
    most_candidates: int | None = None

    def __post_init__(self) -> None:
        check_grid(self)
        object.__setattr__(self, "margin", require_number("margin", self.margin, 0))
        for name in ("interval", "rest"):
            object.__setattr__(self, name, require_count(name, getattr(self, name), 1))

    @property
    def name(self) -> str:
        return f"hill climbing {grid_name(self)}"

    def start(self) -> HillClimbingController:
        """A controller without any past."""
        return HillClimbingController(self)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "hill_climbing", **json_safe(asdict(self))}


class HillClimbingController:
    """One run of `HillClimbing`."""

    def __init__(self, config: HillClimbing) -> None:
        self.config = config
        self.num_rounds = self.num_switches = 0
        self._rounds = RowsOfRounds()
        self._climb = self._climbing()
        self._place = next(self._climb)
        self._tokens = self._seconds = 0.0

    @property
    def policy(self) -> Policy:
        return self._policies[self._place]

    def observe(self, seen: RoundSeen) -> None:
        rows = self._rounds.add(seen)
        if not rows:
            return
        self._tokens += sum(row.num_accepted + 1 for row in rows)
        self._seconds += seen.round_s
        self.num_rounds += 1
        if self.num_rounds % self.config.interval == 0:
            rate = Pace(self._tokens, self._seconds).tokens_per_s
            self._tokens = self._seconds = 0.0
            before, self._place = self.policy, self._climb.send(rate)
            self.num_switches += before != self.policy

    def _climbing(self) -> Generator[tuple[int, int], float, None]:
        """Yields the place of the next interval on the grid (indices of K and budget), is sent its tokens/s."""
        here = (0, 0)
        while True:
            for place in self._neighbours(here):
                rate_here = yield here
                if (yield place) > (1 + self.config.margin) * rate_here:
                    here = place
                    break
            else:
                for _ in range(self.config.rest):
                    yield here

    def _neighbours(self, here: tuple[int, int]) -> list[tuple[int, int]]:
        """Places next to this one whose policy is another: more first, a longer speculation before a larger budget."""
        K, budget = here
        around = [(K + 1, budget), (K, budget + 1), (K - 1, budget), (K, budget - 1)]
        return [place for place in around if place in self._policies and self._policies[place] != self._policies[here]]

    @cached_property
    def _policies(self) -> dict[tuple[int, int], Policy]:
        config = self.config
        return {
            (i, j): policy_of(
                config, K, uniform_fan_out(K, budget), uniform_fan_out(num_drafted_after_miss(config, K), budget)
            )
            for (i, K), (j, budget) in product(enumerate(config.speculation_lengths), enumerate(config.budgets))
        }
