"""Measuring several policies so that they can be compared: the same prompts, interleaved, repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.ledger import NOWHERE, TRACE, Ledger, piece_name
from sim.policy import Policy
from sim.trace import Trace
from sim.workload import Workload

Execute = Callable[[Policy, Workload, int], Trace]  # policy, workload, seed
MEASURED, COMPANIONS = "measured", "companions"  # in a ledger


def measure_interleaved(
    execute: Execute,
    policies: Sequence[Policy],
    workload: Workload,
    *,
    repeats: int,
    seed: int,
    on_sequence: Callable[[], None],
    between: Callable[[], None] = lambda: None,
    ledger: Ledger = NOWHERE,
    name: str = MEASURED,
) -> list[list[Trace]]:
    """One trace per policy and repeat, each over all prompts of `workload`.

    Every batch of prompts is decoded under every policy before the next batch, and the order of the policies rotates,
    so that drift of the machine hits all policies alike. Each repeat has a seed of its own. `on_sequence` is called for
    each decoded sequence, `between` after each batch. What the `ledger` holds under `name` is not measured again.
    """
    pieces: list[list[list[Trace]]] = [[[] for _ in range(repeats)] for _ in policies]
    for repeat in range(repeats):
        for index, batch in enumerate(batches(workload)):
            for number in turns(len(policies), repeat, index):
                piece = partial(execute, policies[number], batch, seed + repeat)
                pieces[number][repeat].append(ledger.once(piece_name(name, repeat, index, number), TRACE, piece))
                for _ in batch.prompts:
                    on_sequence()
            between()
    return [[join(parts) for parts in of_policy] for of_policy in pieces]


def turns(num_policies: int, repeat: int, batch: int) -> list[int]:
    """The order of the policies on a batch of prompts."""
    return [(turn + batch + repeat) % num_policies for turn in range(num_policies)]


class Warm:
    """Executes after a warm-up, which happens before the first run and not at all if there is none."""

    def __init__(self, execute: Execute, warm_up: Callable[[], None]) -> None:
        self._execute, self._warm_up = execute, warm_up
        self._is_warm = False

    def __call__(self, policy: Policy, workload: Workload, seed: int) -> Trace:
        if not self._is_warm:
            self._warm_up()
            self._is_warm = True
        return self._execute(policy, workload, seed)


def warm_up(execute: Execute, policies: Sequence[Policy], workload: Workload) -> None:
    """Run every policy once, so that no first call of anything is measured."""
    first = batches(workload)[0]
    for policy in policies:
        execute(policy, first, 0)


def batches(workload: Workload) -> list[Workload]:
    """The workload batch by batch; the last may have fewer prompts."""
    numbers = range(len(workload.prompts))
    return [workload.select(numbers[start : start + workload.batch_size]) for start in numbers[:: workload.batch_size]]


class CompanionRuns:
    """Runs of reference policies on calibration prompts in between measured ones: they tell how fast the machine was.

    Every call runs the next policy, batch after batch. Runs whose draft failed tell nothing of it and are not kept.
    """

    def __init__(
        self, execute: Execute, policies: Sequence[Policy], workload: Workload, seed: int, ledger: Ledger = NOWHERE
    ) -> None:
        self._execute, self._policies, self._seed, self._ledger = execute, policies, seed, ledger
        self._batches = batches(workload)
        self._num_calls = 0
        self._traces: list[list[Trace]] = [[] for _ in policies]

    def __call__(self) -> None:
        index, turn = divmod(self._num_calls, len(self._policies))
        name = f"{COMPANIONS}/{self._num_calls}"
        self._num_calls += 1
        batch = self._batches[index % len(self._batches)]
        trace = self._ledger.once(name, TRACE, partial(self._execute, self._policies[turn], batch, self._seed))
        if draft_failure(trace) is None:
            self._traces[turn].append(trace)

    def by_policy(self) -> list[Trace]:
        """One trace per policy that ran."""
        return [join(traces) for traces in self._traces if traces]


def draft_failure(trace: Trace) -> dict[str, Any] | None:
    """When and why the draft of a run failed that the target then ended alone; None of a run of what was asked for."""
    return trace.meta.get("draft_failure")


def join(parts: Sequence[Trace]) -> Trace:
    """One trace of the same policy over the prompts of all parts, in order. Counts in `meta` (`num_...`) add up; the
    first failure of a draft is that of the whole."""
    counts = {name: sum(part.meta[name] for part in parts) for name in parts[0].meta if name.startswith("num_")}
    whole = Trace(policy=parts[0].policy, workload=parts[0].workload, meta=parts[0].meta | counts)
    for part in parts:
        offset = len(whole.sequences)
        failure = draft_failure(part)
        if failure is not None and draft_failure(whole) is None:
            whole.meta["draft_failure"] = failure | {"sequence": failure["sequence"] + offset}
        whole.sequences += [replace(s, index=s.index + offset) for s in part.sequences]
        whole.rounds += [replace(r, sequence=r.sequence + offset) for r in part.rounds]
        whole.spans += [replace(s, sequence=s.sequence + offset) for s in part.spans]
    return whole
