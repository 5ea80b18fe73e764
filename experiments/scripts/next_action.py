"""A user's next action: while the user thinks, the screens that are likely to be asked for are fetched.

`python -m experiments.scripts.next_action`. The times are an example, not measured.
"""

from math import exp, inf, log
from statistics import NormalDist

from experiments.preparation_table import best_of, by_budget
from sim.outcome_speculation import PossibleOutcome, SlowStep
from sim.policy import LateBuild

FETCH_S, NUM_SCREENS, FORESEEN = 0.6, 8, 0.85


def user(think_s: float = 1.8, num_connections: int = 2, steepness: float = 1.2) -> SlowStep:
    """`think_s` is the median; the screen of rank r is asked for in proportion to r^-steepness."""
    weights = [rank**-steepness for rank in range(1, NUM_SCREENS + 1)]
    screens = [PossibleOutcome(FORESEEN * weight / sum(weights), FETCH_S, FETCH_S) for weight in weights]
    durations_s = tuple(exp(NormalDist(log(think_s), 0.8).inv_cdf((i + 0.5) / 20)) for i in range(20))
    return SlowStep(durations_s, (*screens, PossibleOutcome(1 - FORESEEN, inf, FETCH_S)), num_connections, 0.02)


print(*by_budget(user(), (0, 1, 2, 4, 6, 8), LateBuild.ABANDON), "", sep="\n")
print(*best_of((f"thinks for {s:g} s", user(s), 0) for s in (0.1, 0.5, 1.8, 6.0)), "", sep="\n")
print(*best_of((f"connections: {num}", user(num_connections=num), 0) for num in (1, 2, 4, 8)), "", sep="\n")
print(*best_of((f"a second of fetching is worth {x:g} s", user(), x) for x in (0, 0.05, 0.1, 0.2, 0.4)), "", sep="\n")
print(
    *best_of((f"thinks for {s:g} s, all screens alike", user(s, steepness=0), 0.1) for s in (0.1, 0.5, 1.8)), sep="\n"
)
