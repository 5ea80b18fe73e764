"""Play SSD on simulated clocks and print its first rounds: what was verified, and what each device did."""

from pathlib import Path

from experiments.planning import read_plan
from sim import SpeculativeSpeculative, simulate

plan = read_plan(Path("experiments/configs/from_numbers.yaml"))
trace = simulate(SpeculativeSpeculative(3, (3, 2, 2, 2), (3, 2, 2, 2)), plan.workload, plan.system, seed=3)
for round_ in trace.rounds[:6]:
    print(
        f"round {round_.index}: after a {round_.source.value}, {round_.num_accepted} of {round_.num_drafted} accepted"
    )
    for span in (span for span in trace.spans if span.round == round_.index):
        lasts = f"{1e3 * span.start_s:7.1f} to {1e3 * span.end_s:7.1f} ms"
        print(f"  {lasts}  {span.lane.value:<6} {span.operation.value}, {span.num_tokens} tokens")
