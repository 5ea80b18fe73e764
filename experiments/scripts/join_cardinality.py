"""A slow join, whose result falls into one of a few classes of size that call for different plans of what follows.

`python -m experiments.scripts.join_cardinality`. The times are an example, not measured.
"""

from dataclasses import replace
from itertools import pairwise
from math import exp, inf, log
from statistics import NormalDist

from experiments.preparation_table import best_of, by_budget
from sim.outcome_speculation import PossibleOutcome, SlowStep
from sim.policy import LateBuild

log10_rows = NormalDist(5.3, 0.8)  # the optimizer's estimate and its error
bounds = (-inf, 4, 5, 6, 7, inf)  # nested loops, three sizes of hash table, sort and merge
classes = [log10_rows.cdf(high) - log10_rows.cdf(low) for low, high in pairwise(bounds)]
costs_s = (0.04, 0.12, 0.20, 0.30, 0.40)  # to compile the plan and reserve its memory, beside the join or after it
outcomes = tuple(PossibleOutcome(*values) for values in zip(classes, costs_s, costs_s, strict=True))
join_s = tuple(exp(NormalDist(log(0.6), 0.5).inv_cdf((i + 0.5) / 20)) for i in range(20))
join = SlowStep(join_s, outcomes, predict_s=0.01, slowdown=1.04)


def dearer(factor: float) -> SlowStep:
    return replace(join, outcomes=tuple(replace(o, prepare_s=factor * o.prepare_s) for o in outcomes))


for rule in LateBuild:
    print(*by_budget(join, range(6), rule), "", sep="\n")
print(*best_of((f"preparing beside it takes {x:g} times as long", dearer(x), 0) for x in (1, 2, 4)), "", sep="\n")
print(
    *best_of((f"the join itself takes {x:g} times as long", replace(join, slowdown=x), 0) for x in (1, 1.1, 1.3)),
    sep="\n",
)
