"""Rivals that the executor runs as policies, predicted and run: `python -m experiments.scripts.run_rivals PROFILE`.

PROFILE is the folder of a profile of the packaged pair, as `saguaro profile experiments/configs/quickstart.yaml`
writes it. Prompt look-up and SSD that prepares all accepted only are run beside AR, SD and SSD on held-out prompts;
*predicted* is at the speed that the machine has during the run, which reference policies tell in between.
"""

import sys
from pathlib import Path

from rich.console import Console

from calibration.fit import at_speed_of, fit
from calibration.profile import Profile, check_identity, check_prompts
from calibration.slow_moments import usual_runs
from experiments.bench import open_bench
from experiments.config import QUICKSTART, load_config
from experiments.measurement import CompanionRuns, Warm, measure_interleaved
from experiments.recorded_workload import recorded_workload
from experiments.rivals import in_markdown
from experiments.run import trace_policies, warm_up
from experiments.stages import Stages
from sim.metrics import tokens_per_s
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative, uniform_fan_out
from sim.simulate import predict
from sim.strategies.all_accepted import all_accepted_only
from sim.strategies.prompt_lookup import prompt_lookup_policy
from sim.system import System
from sim.trace import Trace

NUM_PROMPTS, REPEATS, SEED = 24, 2, 0
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


def run(profile: Profile) -> tuple[list[list[Trace]], list[Trace]]:
    """The repeats of every policy on held-out prompts, and the reference runs in between."""
    config = load_config(QUICKSTART)
    with open_bench(config, Stages(Console(stderr=True))) as bench:
        test = bench.workload("test", NUM_PROMPTS)
        check_identity(profile.identity, bench.identity)
        check_prompts(profile.manifest["workload"]["prompts"], test)
        calibration = bench.workload("calibration", config.workload.calibration_prompts)
        companions = CompanionRuns(bench.execute, trace_policies(config), calibration, SEED)
        traces = measure_interleaved(
            Warm(bench.execute, lambda: warm_up(bench.execute, POLICIES, test)),
            POLICIES,
            test,
            repeats=REPEATS,
            seed=SEED,
            on_sequence=lambda: None,
            between=companions,
        )
        return traces, companions.by_policy()


def row(policy: Policy, repeats: list[Trace], systems: tuple[System, System]) -> tuple[str, ...]:
    """Of the table; the systems are those of forecast and prediction."""
    forecast, predicted = (predict(policy, recorded_workload(system.agreement), system) for system in systems)
    measured = tokens_per_s(repeats)
    assert predicted.mean_acceptance_length is not None
    return (
        policy.name,
        f"{forecast.tokens_per_s.value:.0f}",
        f"{predicted.tokens_per_s.value:.0f}",
        f"{measured:.0f}",
        f"{100 * (predicted.tokens_per_s.value / measured.value - 1):+.1f} %",
        f"{predicted.mean_acceptance_length:.2f}",
        f"{tokens_per_round(repeats):.2f}",
    )


def main() -> None:
    profile = Profile.read(Path(sys.argv[1]))
    traces, reference = run(profile)
    system = fit(profile)
    systems = system, at_speed_of(system, usual_runs(reference))
    head = ("policy", "forecast", "predicted", "measured tokens/s", "error", "predicted tokens/round", "measured")
    print(in_markdown(head, [row(policy, repeats, systems) for policy, repeats in zip(POLICIES, traces, strict=True)]))


if __name__ == "__main__":  # the draft's process imports this file
    main()
