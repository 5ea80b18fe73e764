"""Measuring several policies so that they can be compared: the same prompts, interleaved, repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sim.policy import Policy
from sim.trace import Trace
from sim.workload import Workload

Execute = Callable[[Policy, Workload, int], Trace]  # policy, workload, seed


def measure_interleaved(
    execute: Execute,
    policies: Sequence[Policy],
    workload: Workload,
    *,
    repeats: int,
    seed: int,
    on_sequence: Callable[[], None],
    between: Callable[[], None] = lambda: None,
) -> list[list[Trace]]:
    """One trace per policy and repeat, each over all prompts of `workload`.

    Every prompt is decoded under every policy before the next prompt, and the order of the policies rotates, so that
    drift of the machine hits all policies alike. Each repeat has a seed of its own. `on_sequence` is called after each
    decoded sequence, `between` after each prompt.
    """
    pieces: list[list[list[Trace]]] = [[[] for _ in range(repeats)] for _ in policies]
    for repeat in range(repeats):
        for prompt in range(len(workload.prompts)):
            single = workload.select([prompt])
            for turn in range(len(policies)):
                number = (turn + prompt + repeat) % len(policies)
                pieces[number][repeat].append(execute(policies[number], single, seed + repeat))
                on_sequence()
            between()
    return [[join(parts) for parts in of_policy] for of_policy in pieces]


class CompanionRuns:
    """Runs of reference policies on calibration prompts in between measured ones: they tell how fast the machine was.

    Every call runs the next policy, prompt after prompt.
    """

    def __init__(self, execute: Execute, policies: Sequence[Policy], workload: Workload, seed: int) -> None:
        self._execute, self._policies, self._workload, self._seed = execute, policies, workload, seed
        self.traces: list[Trace] = []

    def __call__(self) -> None:
        round_, turn = divmod(len(self.traces), len(self._policies))
        prompt = round_ % len(self._workload.prompts)
        single = self._workload.select([prompt])
        self.traces.append(self._execute(self._policies[turn], single, self._seed))

    def by_policy(self) -> list[Trace]:
        """One trace per policy that ran."""
        num = len(self._policies)
        return [join(self.traces[turn::num]) for turn in range(min(num, len(self.traces)))]


def join(parts: Sequence[Trace]) -> Trace:
    """One trace of the same policy over the prompts of all parts, in order; counts in `meta` (`num_...`) add up."""
    counts = {name: sum(part.meta[name] for part in parts) for name in parts[0].meta if name.startswith("num_")}
    whole = Trace(policy=parts[0].policy, workload=parts[0].workload, meta=parts[0].meta | counts)
    for part in parts:
        offset = len(whole.sequences)
        whole.sequences += [replace(s, index=s.index + offset) for s in part.sequences]
        whole.rounds += [replace(r, sequence=r.sequence + offset) for r in part.rounds]
        whole.spans += [replace(s, sequence=s.sequence + offset) for s in part.spans]
    return whole
