"""Choose a policy from a system.json or a file of numbers: `python -m experiments.scripts.choose SYSTEM|NUMBERS`."""

import sys
from pathlib import Path

from experiments.planning import read_plan
from sim import SearchSpace, search

plan = read_plan(Path(sys.argv[1]))
found = search(SearchSpace((1, 2, 3, 4), (4, 8, 16)), plan.workload, plan.system)
for best in map(found.best, ("ar", "sd", "ssd")):
    print(f"{best.policy.name}: {best.tokens_per_s.value:.1f} tokens/s")
print(found.in_words())
