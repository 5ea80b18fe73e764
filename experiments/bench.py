"""A pair on this machine, ready to be measured: the door through which an experiment file reaches the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from experiments.config import ExperimentConfig
from experiments.stages import Stages
from sim.agreement import AgreementRecord
from sim.errors import BadInput
from sim.latency import LatencySample
from sim.policy import Policy
from sim.trace import Trace
from sim.workload import Workload

if TYPE_CHECKING:
    from executor.concurrency import Runner

Progress = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True)
class Bench:
    """A loaded pair and what an experiment measures with it."""

    config: ExperimentConfig
    runner: Runner

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Pair, device, precision, threads and library versions."""
        return self.runner.identity()

    def workload(self, split: str, num_prompts: int) -> Workload:
        """The first prompts of a split (`calibration` or `test`) under the experiment's rules."""
        rules, pair = self.config.workload, self.runner.pair
        return Workload(
            dataset=pair.dataset,
            prompts=pair.prompts(split, num_prompts, rules.prompt_tokens),
            max_new_tokens=rules.max_new_tokens,
            stop_ids=pair.stop_ids if rules.stop_at_end_of_text else (),
            batch_size=rules.batch_size,
            sampling=(rules.sampling,) * num_prompts,
            stop_strings=rules.stop_strings,
        )

    def check_runs(self, policy: Policy, workload: Workload) -> None:
        """Raises `BadInput` if the executor does not run the policy on the workload."""
        from executor.execute import check_runs

        check_runs(policy, workload)

    def execute(self, policy: Policy, workload: Workload, seed: int, *, on_draft_failure: str = "raise") -> Trace:
        """Decode the workload for real."""
        from executor.execute import execute

        return execute(policy, workload, self.runner, seed, on_draft_failure=on_draft_failure)

    def measure_agreement(self, workload: Workload, progress: Progress) -> AgreementRecord:
        """The target's own texts on the workload, scored by both models."""
        from executor.profiling import measure_agreement

        candidates = self.config.profile.num_candidates
        return measure_agreement(self.runner, workload, self.config.seed, candidates, progress)

    def measure_latency(self, progress: Progress) -> list[LatencySample]:
        """Every operation that the search may ask for, alone and beside a busy other lane."""
        from executor.profiling import LatencyGrid, measure_latency

        settings = self.config.profile
        grid = LatencyGrid(
            settings.max_speculation_length,
            settings.branch_counts,
            settings.contexts,
            self.config.workload.sampling,
            self.config.workload.batch_size,
        )
        budget_s = settings.latency_budget_s
        return measure_latency(self.runner, grid, budget_s, self.config.seed, progress=progress).samples

    def generate(self, workload: Workload) -> Trace:
        """The texts of transformers' own greedy decoding."""
        from executor.reference import generate

        return generate(self.runner, workload)

    def top2_gap(self, tokens: tuple[int, ...]) -> float:
        """The target's gap between its two largest logits after `tokens`."""
        from executor.profiling import top2_gap

        return top2_gap(self.runner, tokens)


@contextmanager
def open_bench(config: ExperimentConfig, stages: Stages) -> Iterator[Bench]:
    """Load the pair that `config` names. Raises `BadInput` if a file of it, or a library for it, is missing."""
    with model_libraries():
        from executor.pairs import load_pair

        pair = load_pair(config.pair)
        from executor.concurrency import open_runner
    with ExitStack() as stack:
        with stages.stage("load the pair"):
            runner = stack.enter_context(
                open_runner(
                    pair,
                    config.concurrency,
                    config.dtype,
                    device=config.device,
                    draft_device=config.draft_device,
                    graphs=config.graphs,
                )
            )
        yield Bench(config, runner)


@contextmanager
def model_libraries() -> Iterator[None]:
    """For what imports the executor: raises `BadInput` if a library for models is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        rule = "is needed to run models; pip install 'saguaro-planner[executor]'"
        raise BadInput(str(error.name or error), rule) from None
