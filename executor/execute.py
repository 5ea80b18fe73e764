"""Policy + workload + loaded pair -> Trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from executor.concurrency import Runner
from executor.draft_failure import ExpendableDraft, OnDraftFailure
from executor.loops import Draft, autoregressive, speculative, speculative_speculative
from executor.sequence import NewTokens, OpenBatch, Request
from executor.target import Target
from sim.errors import BadInput
from sim.policy import Autoregressive, Policy, Speculative, SpeculativeSpeculative
from sim.trace import Sequence, Trace
from sim.workload import Workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def execute(
    policy: Policy,
    workload: Workload,
    runner: Runner,
    seed: int = 0,
    progress: Callable[[Sequence], None] | None = None,
    on_draft_failure: str = OnDraftFailure.RAISE,
    on_tokens: Callable[[NewTokens], None] | None = None,
    *,
    log_probs: bool = False,
) -> Trace:
    """Decode the prompts, `workload.batch_size` at a time, for real; `progress` is called after each sequence.

    The same seed gives the same tokens whatever the order of the prompts and, up to rounding, whoever is decoded beside
    them; fallback `draft` is the exception, which drafts a whole batch anew: above temperature 0 its tokens then agree
    in law only. Tokens of different policies agree at temperature 0; above it they agree in law only.

    A draft process that dies, raises or hangs ends the run with `DraftFailed`; with `on_draft_failure` `continue` the
    target goes on alone from the tokens committed so far, and `meta["draft_failure"]` says since when and why.

    `on_tokens` gets the tokens of every sequence as they are committed, after the prefill and after each round, outside
    what is recorded as an operation. With `log_probs` the trace holds the target's log-probability of every token.

    Where a text outgrows the positions of the draft it goes on without draft tokens, as AR; `meta["without_draft"]`
    lists the prompts that leave the draft model no room at all.

    Raises `BadInput` if a prompt leaves the target too few positions, or holds a token that the pair does not know.
    """
    check_room(policy, workload, runner)
    trace = Trace(policy=policy.to_dict(), workload=workload.identity())
    draft: Draft = runner.draft
    expendable = ExpendableDraft(draft)
    if on_draft_failure not in list(OnDraftFailure):
        raise BadInput("on_draft_failure", f"must be one of {', '.join(OnDraftFailure)}", on_draft_failure)
    if on_draft_failure == OnDraftFailure.CONTINUE:
        draft = expendable
    num_bad_rows_before = runner.target.num_bad_draft_rows
    asked = [replace(request, log_probs=log_probs) for request in requests(workload, seed)]
    tokenizer = tokenizer_for(workload, runner, is_shown=on_tokens is not None)
    for start in range(0, len(asked), workload.batch_size):
        batch = OpenBatch(asked[start : start + workload.batch_size], tokenizer, on_tokens)
        sequences = _decode(policy, batch, runner.target, draft, trace)
        trace.sequences += sequences
        if progress is not None:
            for sequence in sequences:
                progress(sequence)
    trace.meta = {
        "producer": "executor",
        "identity": runner.identity(),
        "seed": seed,
        "own_seeds": {str(index): s.seed for index, s in enumerate(workload.sampling) if s.seed is not None},
        "num_bad_draft_rows": runner.target.num_bad_draft_rows - num_bad_rows_before,
        "draft_failure": expendable.failure,
        "without_draft": [] if isinstance(policy, Autoregressive) else _beyond_the_draft(workload, runner),
    }
    return trace


def _beyond_the_draft(workload: Workload, runner: Runner) -> list[int]:
    """The prompts that fill the draft's positions."""
    return [index for index, prompt in enumerate(workload.prompts) if len(prompt) >= runner.pair.max_positions]


def requests(workload: Workload, seed: int) -> Iterator[Request]:
    """One request per prompt, in order. A request with a seed of its own is not told from its repetition."""
    seen: Counter[tuple[int, ...]] = Counter()
    for index, prompt in enumerate(workload.prompts):
        sampling = workload.sampling_of(index)
        if sampling.seed is None:
            own_seed, occurrence = seed, seen[prompt]
            seen[prompt] += 1
        else:
            own_seed, occurrence = sampling.seed, 0
        rules = (workload.max_new_tokens, sampling.law, workload.stop_ids, own_seed, occurrence)
        yield Request(index, prompt, *rules, stop_strings=workload.stop_strings)


def tokenizer_for(workload: Workload, runner: Runner, *, is_shown: bool = False) -> Tokenizer | None:
    """The pair's, if stop strings need it or if the text `is_shown` and there is one. Raises `BadInput` if stop strings
    need it and there is none."""
    if not workload.stop_strings:
        return runner.pair.tokenizer if is_shown else None
    if runner.pair.tokenizer is None:
        raise BadInput("workload.stop_strings", "need a pair with a tokenizer", runner.pair.name)
    return runner.pair.tokenizer


def check_room(policy: Policy, workload: Workload, runner: Runner) -> None:
    """Every position that a text may have must exist in the target; the policy must be one that the executor runs.

    The draft may have fewer: speculation shrinks to nothing before its end.
    """
    check_runs(policy, workload)
    limit = runner.target.model.max_positions
    for index, prompt in enumerate(workload.prompts):
        needed = len(prompt) + workload.max_new_tokens
        if needed > limit:
            rule = f"prompt {index} with max_new_tokens must fit the target's {limit} positions"
            raise BadInput("workload", rule, needed)
        unknown = [token for token in prompt if not 0 <= token < runner.pair.vocab_size]
        if unknown:
            raise BadInput(f"workload: prompt {index}", f"token ids must be below {runner.pair.vocab_size}", unknown[0])


def check_runs(policy: Policy, workload: Workload) -> None:
    """Raises `BadInput` on what the executor cannot run, or what would mean nothing."""
    if isinstance(policy, SpeculativeSpeculative) and policy.downweight != 1 and workload.temperature == 0:
        raise BadInput("downweight", "must be 1 at temperature 0, where no token is sampled", policy.downweight)


def _decode(policy: Policy, batch: OpenBatch, target: Target, draft: Draft, trace: Trace) -> list[Sequence]:
    """Decode the sequences of a batch; their spans and rounds go into the trace."""
    recorder = target.recorder
    recorder.begin_batch([request.index for request in batch.requests])
    if batch.requests[0].max_new_tokens > 0:
        _run_loop(policy, batch, target, draft)
        spans = recorder.spans if isinstance(policy, Autoregressive) else recorder.spans + draft.spans()
        trace.spans += sorted(spans, key=lambda span: span.start_s)
        trace.rounds += recorder.rounds
    end_s = {r.sequence: r.end_s for r in recorder.rounds}
    return [
        Sequence(
            index=sequence.request.index,
            prompt_length=len(sequence.request.prompt),
            tokens=tuple(sequence.tokens),
            prefill_start_s=recorder.prefill_start_s,
            decode_start_s=recorder.decode_start_s,
            end_s=end_s.get(sequence.request.index, recorder.decode_start_s),
            stopped=sequence.stopped,
            stopped_by_string=sequence.stopped_by_string,
            log_probs=tuple(target.log_probs[row][: len(sequence.tokens)]) if sequence.tokens else (),
        )
        for row, sequence in enumerate(batch.sequences)
    ]


def _run_loop(policy: Policy, batch: OpenBatch, target: Target, draft: Draft) -> None:
    match policy:
        case Autoregressive():
            autoregressive(batch, target)
        case Speculative():
            speculative(policy, batch, target, draft)
        case SpeculativeSpeculative():
            speculative_speculative(policy, batch, target, draft)
