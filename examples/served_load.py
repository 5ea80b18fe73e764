"""Serve requests that arrive at random, few and many: how long to speculate depends on the load."""

from pathlib import Path

from experiments.planning import read_plan
from sim import Autoregressive, OpenLoop, Poisson, Speculative, serve

plan = read_plan(Path("experiments/configs/serving_numbers.yaml"))
for rate_per_s in (1.0, 5.0):
    load = OpenLoop(Poisson(rate_per_s), max_batch_size=16, num_requests=400)
    for policy in (Autoregressive(), Speculative(1), Speculative(3)):
        report = serve(policy, load, plan.workload, plan.system, seed=0)
        if report.ttft_s is None or report.tpot_s is None:
            print(f"{rate_per_s} requests/s, {report.name}: requests queue up without end")
        else:
            first, others = 1e3 * report.ttft_s.p99, 1e3 * report.tpot_s.p50
            print(f"{rate_per_s} requests/s, {report.name}: {first:.0f} ms to the first token (p99), then {others:.1f}")
