"""Predict AR, SD and SSD from a file of numbers, by expectation and by the event engine."""

from pathlib import Path

from experiments.planning import read_plan
from sim import Autoregressive, Fallback, Speculative, SpeculativeSpeculative, predict
from sim.policy import uniform_fan_out

plan = read_plan(Path("experiments/configs/from_numbers.yaml"))
fan_out = uniform_fan_out(3, 16)
for policy in (
    Autoregressive(),
    Speculative(3),
    SpeculativeSpeculative(3, fan_out, fan_out, Fallback.DRAFT),
    SpeculativeSpeculative(3, fan_out, (16,), Fallback.NONE),
):
    exact = predict(policy, plan.workload, plan.system)
    played = predict(policy, plan.workload, plan.system, engine="des", seed=0)
    hits = "" if exact.hit_rate is None else f", {100 * exact.hit_rate.value:.1f} % hits"
    print(
        f"{policy.name}: {exact.tokens_per_s.value:.1f} tokens/s exactly, {played.tokens_per_s.value:.0f} played{hits}"
    )
