"""Decider + workload + loaded pair -> Trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from executor.concurrency import Runner
from executor.draft_client import DraftFailed
from executor.draft_failure import ExpendableDraft, OnDraftFailure
from executor.forced import ForcedTarget
from executor.loops import Choose, Draft, autoregressive, speculative
from executor.observation import Observer
from executor.sequence import NewTokens, OpenBatch, Request
from executor.static_pass import PassCounts
from executor.target import Target
from sim.decider import Chooser, Decider
from sim.errors import BadInput, require_count
from sim.policy import Policy, PolicyTable, SpeculativeSpeculative
from sim.trace import FORCED, Sequence, Trace
from sim.workload import Sampling, Workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def execute(
    decider: Decider,
    workload: Workload,
    runner: Runner,
    seed: int = 0,
    progress: Callable[[Sequence], None] | None = None,
    on_draft_failure: str = OnDraftFailure.RAISE,
    on_tokens: Callable[[NewTokens], None] | None = None,
    *,
    log_probs: bool = False,
    forced_acceptance: Iterable[int] | None = None,
    audit: bool = False,
) -> Trace:
    """Decode the prompts, `workload.batch_size` at a time, for real; `progress` is called after each sequence.

    The same seed gives the same tokens whatever the order of the prompts and, up to rounding, whoever is decoded beside
    them. Above temperature 0 they agree in law only where the company decides how a row is drafted: with fallback
    `draft`, which drafts a whole batch anew, with tables and adaptive choices, and in batches near the end of the draft
    model's positions. Tokens of different policies agree at temperature 0; above it they agree in law only.

    A draft process that dies, raises or hangs ends the run with `DraftFailed`; with `on_draft_failure` `continue` the
    target goes on alone from the tokens committed so far, and `meta["draft_failure"]` says since when and why.

    `decider` is a policy, a table by the number of rows still open, or an adaptive choice, which starts without any
    past and is told of every row of every round with its times; the trace names the policy of every round. What was
    prepared under one SSD policy is verified under the next one (`executor.speculator`).

    `on_tokens` gets the tokens of every sequence as they are committed, after the prefill and after each round, outside
    what is recorded as an operation. With `log_probs` the trace holds the target's log-probability of every token.

    `forced_acceptance` is a cycle of accept counts, one a round, instead of verification: a run of known rounds to
    profile, whose text is no generation. The trace's policy says so, and comparisons refuse it (`ForcedTarget`).

    With `audit` both KV caches are compared with a fresh pass over the committed tokens after every round, which takes
    its time; one that holds anything else ends the run with `KvCacheCorrupt` (a draft process with `DraftFailed`).

    Where a text outgrows the positions of the draft it goes on without draft tokens, as AR; `meta["num_without_draft"]`
    counts the prompts that leave the draft model no room at all.

    Raises `BadInput` if a prompt leaves the target too few positions, or holds a token that the pair does not know, or
    if policies follow one another that cannot, and where an argument is not what it should be.
    """
    chooser = Chooser(decider)
    observer = None if chooser.controller is None else Observer(chooser.controller)
    if on_draft_failure not in list(OnDraftFailure):
        raise BadInput("on_draft_failure", f"must be one of {', '.join(OnDraftFailure)}", on_draft_failure)
    check_room(workload, runner)
    for policy in policies_of(decider):
        check_runs(policy, workload)
    trace = Trace(policy=decider.to_dict(), workload=workload.identity())
    target = runner.target
    if forced_acceptance is not None:
        target = forced = ForcedTarget(target, forced_acceptance)
        trace.policy |= {FORCED: list(forced.accept_counts)}
    expendable = ExpendableDraft(runner.draft)
    draft: Draft = expendable if on_draft_failure == OnDraftFailure.CONTINUE else runner.draft
    captures = _captures(runner, on_draft_failure) if runner.graphs else {}
    num_bad_rows_before = target.num_bad_draft_rows
    asked = [replace(request, log_probs=log_probs, audit=audit) for request in requests(workload, seed)]
    tokenizer = tokenizer_for(workload, runner, is_shown=on_tokens is not None)
    role = draft if observer is not None or any(p.speculation_length for p in policies_of(decider)) else None

    def choose(num_rows: int) -> Policy:
        policy = chooser.at(num_rows)
        check_runs(policy, workload)  # what a controller chooses nobody knows before
        return policy

    for start in range(0, len(asked), workload.batch_size):
        batch = OpenBatch(asked[start : start + workload.batch_size], tokenizer, on_tokens)
        sequences = _decode(choose, batch, target, role, observer, trace)
        trace.sequences += sequences
        if progress is not None:
            for sequence in sequences:
                progress(sequence)
    trace.meta = {
        "producer": "executor",
        "identity": runner.identity(),
        "seed": seed,
        "own_seeds": {str(index): s.seed for index, s in enumerate(workload.sampling) if s.seed is not None},
        "num_bad_draft_rows": target.num_bad_draft_rows - num_bad_rows_before,
        "draft_failure": expendable.failure,
        "captures": {role: asdict(counts) for role, counts in captures.items()},
        "num_without_draft": 0 if role is None else _beyond_the_draft(workload, runner),
    }
    return trace


def _captures(runner: Runner, on_draft_failure: str) -> dict[str, PassCounts]:
    """What the roles have recorded; nothing where the draft has failed and the run goes on without it."""
    try:
        return runner.capture()
    except DraftFailed:
        if on_draft_failure != OnDraftFailure.CONTINUE:
            raise
        return {}


def _beyond_the_draft(workload: Workload, runner: Runner) -> int:
    """How many prompts fill the draft's positions."""
    return sum(len(prompt) >= runner.pair.max_positions for prompt in workload.prompts)


def requests(workload: Workload, seed: int) -> Iterator[Request]:
    """One request per prompt, in order. A request with a seed of its own is not told from its repetition."""
    seed = require_count("seed", seed, 0)
    seen: Counter[tuple[tuple[int, ...], Sampling]] = Counter()
    for index, prompt in enumerate(workload.prompts):
        sampling = workload.sampling_of(index)
        if sampling.seed is None:
            own_seed, occurrence = seed, seen[prompt, sampling]
            seen[prompt, sampling] += 1
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


def policies_of(decider: Decider) -> tuple[Policy, ...]:
    """Those that are known before the run: none of an adaptive choice."""
    if isinstance(decider, PolicyTable):
        return tuple(policy for _, policy in decider.entries)
    return (decider,) if isinstance(decider, Policy) else ()


def check_room(workload: Workload, runner: Runner) -> None:
    """Raises `BadInput` unless every position that a text may have exists in the target, and every token of a prompt in
    the pair.

    The draft may have fewer positions: speculation shrinks to nothing before its end.
    """
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


def _decode(
    choose: Choose, batch: OpenBatch, target: Target, draft: Draft | None, observer: Observer | None, trace: Trace
) -> list[Sequence]:
    """Decode the sequences of a batch; their spans and rounds go into the trace. Without a draft by AR."""
    recorder = target.recorder
    recorder.begin_batch([request.index for request in batch.requests])
    if batch.requests[0].max_new_tokens > 0:
        if draft is None:
            autoregressive(choose, batch, target)
            spans = recorder.spans
        else:
            speculative(choose, batch, target, draft, observer)
            spans = recorder.spans + draft.spans()
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
