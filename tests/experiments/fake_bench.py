"""A bench without models: the simulator plays the machine, with latencies that the pipeline must recover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from executor.execute import check_runs
from experiments.config import ExperimentConfig
from sim.agreement import AgreementRecord
from sim.latency import LatencySample
from sim.policy import Autoregressive, Policy
from sim.simulate import simulate
from sim.system import System
from sim.trace import Lane, Operation, Trace
from sim.workload import Workload
from tests.sim.strategies import batched
from tests.sim.toy import system_of

VERIFY_S, DRAFT_STEP_S, GLUE_S, TREE_STEP_S, HOST_S = 0.010, 0.002, 0.0021, 0.0025, 0.0004
IDENTITY = {
    "pair": "fake",
    "sha256": {"target": "t", "draft": "d"},
    "device": "none",
    "concurrency": "processes",
    "threads": {"target": 1, "draft": 1},
}


def greedy_record(
    *,
    num_prompts: int,
    length: int,
    prompt_length: int,
    seed: int,
    accepted: float = 0.8,
    prepared: float = 0.7,
    temperature: float = 0.0,
) -> AgreementRecord:
    """Greedy texts: the token stands at rank 0 of q with probability `accepted`, else at 1 (`prepared`) or 40. Another
    temperature makes them pass for sampled ones where only the pipeline is looked at."""
    rng = np.random.default_rng(seed)
    n = num_prompts * length
    rank = np.where(rng.random(n) < accepted, 0, np.where(rng.random(n) < prepared, 1, 40))
    top_q = np.tile(np.geomspace(0.4, 1e-5, 32), (n, 1))
    return AgreementRecord(
        identity={
            "dataset": "fake/prompts.jsonl",
            "temperature": temperature,
            "stop_ids": [],
            "max_new_tokens": length,
        },
        prompt_length=np.full(num_prompts, prompt_length),
        stopped=np.zeros(num_prompts, dtype=bool),
        prompt=np.repeat(np.arange(num_prompts), length),
        position=np.tile(np.arange(length), num_prompts),
        token=rng.integers(0, 100, n),
        log_p=np.zeros(n),
        log_q=np.full(n, -1.0),
        rank=rank,
        overlap=np.full(n, 0.8),
        top_token=np.tile(np.arange(32), (n, 1)),
        top_p=np.zeros((n, 32)),
        top_q=top_q,
    )


@dataclass
class FakeBench:
    """Prompt number i of a split is the token sequence (split, i, i, ...): the text that follows is the record's."""

    config: ExperimentConfig
    identity: dict[str, Any] = field(default_factory=lambda: dict(IDENTITY))
    slowness: float = 1.0  # of every real run against what the profile says
    alter: Callable[[Policy, Trace], Trace] = field(default=lambda policy, trace: trace)
    gap: float = 1.0
    truth: dict[str, System] = field(init=False)
    executed: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules, validation = self.config.workload, self.config.validation
        fresh_prompts = validation.fresh_prompts if validation else 0
        sizes = {"calibration": rules.calibration_prompts, "test": rules.test_prompts + fresh_prompts}
        self.truth = {
            split: self._system(
                greedy_record(
                    num_prompts=size,
                    length=rules.max_new_tokens,
                    prompt_length=rules.prompt_tokens,
                    seed=number,
                    temperature=rules.temperature,
                )
            )
            for number, (split, size) in enumerate(sizes.items())
        }

    def _system(self, record: AgreementRecord) -> System:
        times = {
            "verify_s": VERIFY_S,
            "draft_step_s": DRAFT_STEP_S,
            "glue_s": GLUE_S,
            "tree_step_s": TREE_STEP_S,
            "host_s": HOST_S,
        }
        system = system_of(record, **{name: seconds * self.slowness for name, seconds in times.items()})
        num_rows = self.config.workload.batch_size
        return system if num_rows == 1 else batched(system, 0.0)

    def workload(self, split: str, num_prompts: int) -> Workload:
        rules = self.config.workload
        number = list(self.truth).index(split)
        return Workload(
            dataset="fake/prompts.jsonl",
            prompts=tuple((number, *[i] * (rules.prompt_tokens - 1)) for i in range(num_prompts)),
            max_new_tokens=rules.max_new_tokens,
            temperature=rules.temperature,
            batch_size=rules.batch_size,
        )

    def check_runs(self, policy: Policy, workload: Workload) -> None:
        check_runs(policy, workload)

    def execute(self, policy: Policy, workload: Workload, seed: int, *, on_draft_failure: str = "raise") -> Trace:
        split = list(self.truth)[workload.prompts[0][0]]
        system = self.truth[split]
        picked = system.agreement.select(np.array([prompt[1] for prompt in workload.prompts]))
        self.executed.append((policy.name, workload.prompts[0][1]))
        return self.alter(policy, simulate(policy, workload, replace(system, agreement=picked), seed))

    def measure_agreement(self, workload: Workload, progress: Callable[[int, int], None]) -> AgreementRecord:
        progress(1, 1)
        return self.truth["calibration"].agreement

    def measure_latency(self, progress: Callable[[int, int], None]) -> list[LatencySample]:
        profile = self.config.profile
        widths = range(1, profile.max_speculation_length + 2)
        operations = [
            (Lane.TARGET, Operation.VERIFY, widths, VERIFY_S),
            (Lane.DRAFT, Operation.DRAFT_STEP, (1, 2), DRAFT_STEP_S),
            (Lane.DRAFT, Operation.GLUE, widths, GLUE_S),
            (Lane.DRAFT, Operation.TREE_STEP, profile.branch_counts, TREE_STEP_S),
        ]
        contexts = (1, 1000)
        samples = [
            LatencySample(lane, operation, width, context, busy, block, seconds, rows)
            for lane, operation, widths_of, seconds in operations
            for width, context, busy, block in product(widths_of, contexts, (False, True), range(5))
            for rows in {1, self.config.workload.batch_size}
        ]
        progress(1, 1)
        return samples

    def generate(self, workload: Workload) -> Trace:
        return self.execute(Autoregressive(), workload, 0)

    def top2_gap(self, tokens: tuple[int, ...]) -> float:
        return self.gap
