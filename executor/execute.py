"""Policy + workload + loaded pair -> Trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from executor.concurrency import Runner
from executor.loops import autoregressive, speculative, speculative_speculative
from executor.sequence import OpenSequence, Request
from sim.errors import BadInput
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative
from sim.trace import Sequence, Trace
from sim.workload import Workload


def execute(
    policy: Policy,
    workload: Workload,
    runner: Runner,
    seed: int = 0,
    progress: Callable[[Sequence], None] | None = None,
) -> Trace:
    """Decode the prompts one after another, for real; `progress` is called after each sequence.

    The same seed gives the same tokens whatever the order of the prompts. Tokens of different policies agree at
    temperature 0; above it they agree in law only. Raises `BadInput` if a prompt leaves too few positions, or holds a
    token that the pair does not know.
    """
    check_room(policy, workload, runner)
    trace = Trace(policy=policy.to_dict(), workload=workload.identity())
    num_bad_rows_before = runner.target.num_bad_draft_rows
    for request in requests(workload, seed):
        sequence = _decode(policy, request, runner, trace)
        trace.sequences.append(sequence)
        if progress is not None:
            progress(sequence)
    trace.meta = {
        "producer": "executor",
        "identity": runner.identity(),
        "seed": seed,
        "num_bad_draft_rows": runner.target.num_bad_draft_rows - num_bad_rows_before,
    }
    return trace


def requests(workload: Workload, seed: int) -> Iterator[Request]:
    """One request per prompt, in order."""
    seen: Counter[tuple[int, ...]] = Counter()
    for index, prompt in enumerate(workload.prompts):
        rules = (workload.max_new_tokens, workload.temperature, workload.stop_ids, seed)
        yield Request(index, prompt, *rules, occurrence=seen[prompt])
        seen[prompt] += 1


def check_room(policy: Policy, workload: Workload, runner: Runner) -> None:
    """Every position that may be fed, look-ahead included, must exist in both models; the policy must be one that the
    executor runs."""
    check_runs(policy, workload)
    look_ahead = policy.speculation_length + 1 if isinstance(policy, SpeculativeSpeculative) else 0
    for index, prompt in enumerate(workload.prompts):
        needed = len(prompt) + workload.max_new_tokens + look_ahead
        if needed > runner.pair.max_positions:
            rule = f"prompt {index} with max_new_tokens and {look_ahead} positions of look-ahead must fit the models'"
            raise BadInput("workload", f"{rule} {runner.pair.max_positions} positions", needed)
        unknown = [token for token in prompt if not 0 <= token < runner.pair.vocab_size]
        if unknown:
            raise BadInput(f"workload: prompt {index}", f"token ids must be below {runner.pair.vocab_size}", unknown[0])


def check_runs(policy: Policy, workload: Workload) -> None:
    """Raises `BadInput` on what the executor cannot run, or what would mean nothing."""
    if workload.batch_size != 1:
        raise BadInput(
            "workload.batch_size", "must be 1: the executor decodes one sequence at a time", workload.batch_size
        )
    if isinstance(policy, SpeculativeSpeculative) and policy.downweight != 1 and workload.temperature == 0:
        raise BadInput("downweight", "must be 1 at temperature 0, where no token is sampled", policy.downweight)


def _decode(policy: Policy, request: Request, runner: Runner, trace: Trace) -> Sequence:
    recorder = runner.target.recorder
    recorder.begin_sequence(request.index)
    sequence = OpenSequence(request)
    if request.max_new_tokens > 0:
        sequence = _run_loop(policy, request, runner)
        spans = recorder.spans if isinstance(policy, Autoregressive) else recorder.spans + runner.draft.spans()
        trace.spans += sorted(spans, key=lambda span: span.start_s)
        trace.rounds += recorder.rounds
    return Sequence(
        index=request.index,
        prompt_length=len(request.prompt),
        tokens=tuple(sequence.tokens),
        prefill_start_s=recorder.prefill_start_s,
        decode_start_s=recorder.decode_start_s,
        end_s=recorder.end_s,
        stopped=sequence.stopped,
    )


def _run_loop(policy: Policy, request: Request, runner: Runner) -> OpenSequence:
    match policy:
        case Autoregressive():
            return autoregressive(request, runner.target)
        case Speculative():
            return speculative(policy, request, runner.target, runner.draft)
        case SpeculativeSpeculative():
            return speculative_speculative(policy, request, runner.target, runner.draft)
