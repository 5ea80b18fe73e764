"""Rivals that the executor runs as policies, predicted and run: `python -m experiments.scripts.run_rivals PROFILE`.

PROFILE is the folder of a profile of the packaged pair, as `saguaro profile experiments/configs/quickstart.yaml` writes
it. Prompt look-up and SSD that prepares all accepted only are run beside AR, SD and SSD on held-out prompts; *predicted*
is at the speed that the machine has during the run, which reference policies tell in between.
"""

import sys
from pathlib import Path

from rich.console import Console

from calibration.fit import at_speed_of, fit
from calibration.profile import Profile, check_identity, check_prompts
from experiments.bench import open_bench
from experiments.config import QUICKSTART, load_config
from experiments.measurement import CompanionRuns, Warm, measure_interleaved
from experiments.rivals import in_markdown
from experiments.run import trace_policies, warm_up
from experiments.stages import Stages
from sim.metrics import tokens_per_s
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative, uniform_fan_out
from sim.simulate import predict
from sim.strategies.all_accepted import all_accepted_only
from sim.strategies.prompt_lookup import prompt_lookup_policy
from sim.trace import Trace

NUM_PROMPTS, REPEATS, SEED = 32, 2, 0
POLICIES: list[Policy] = [
    Autoregressive(),
    Speculative(3),
    SpeculativeSpeculative(3, uniform_fan_out(3, 8), uniform_fan_out(3, 8)),
    *(all_accepted_only(K) for K in (3, 6)),
    *(prompt_lookup_policy(K) for K in (3, 6)),
]


def tokens_per_round(repeats: list[Trace]) -> float:
    rounds = [one for trace in repeats for one in trace.rounds]
    return sum(one.num_emitted for one in rounds) / len(rounds)


profile = Profile.read(Path(sys.argv[1]))
config = load_config(QUICKSTART)
console = Console(stderr=True)
with open_bench(config, Stages(console)) as bench:
    test = bench.workload("test", NUM_PROMPTS)
    calibration = bench.workload("calibration", config.workload.calibration_prompts)
    check_identity(profile.identity, bench.identity)
    check_prompts(profile.manifest["workload"]["prompts"], test)
    companions = CompanionRuns(bench.execute, trace_policies(config), calibration, SEED)
    traces = measure_interleaved(
        Warm(bench.execute, lambda: warm_up(bench, POLICIES, test)),
        POLICIES,
        test,
        repeats=REPEATS,
        seed=SEED,
        on_sequence=lambda: None,
        between=companions,
    )
system = fit(profile)
system_then = at_speed_of(system, companions.by_policy())
rows = []
for policy, repeats in zip(POLICIES, traces, strict=True):
    forecast, predicted = (predict(policy, test, each) for each in (system, system_then))
    measured = tokens_per_s(repeats)
    assert measured is not None
    assert predicted.mean_acceptance_length is not None
    rows.append(
        (
            policy.name,
            f"{forecast.tokens_per_s.value:.0f}",
            f"{predicted.tokens_per_s.value:.0f}",
            f"{measured:.0f}",
            f"{100 * (predicted.tokens_per_s.value / measured.value - 1):+.1f} %",
            f"{predicted.mean_acceptance_length.value:.2f}",
            f"{tokens_per_round(repeats):.2f}",
        )
    )
head = ("policy", "forecast", "predicted", "measured tokens/s", "error", "predicted tokens/round", "measured")
print(in_markdown(head, rows))
