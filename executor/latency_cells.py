"""Cells of the latency grid: one operation at one size and context, timed through the code that decodes.

Sizes are those of each row. Its rows have ragged contexts, as where each accepts what it accepts, whose mean is the
cell's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from executor.drafting import Drafter
from executor.language_model import LanguageModel
from executor.recorder import Recorder, clock_of, now_s
from executor.sampling import draw, process
from executor.sequence import Question, Request, Verified
from executor.speculation_cache import Speculation
from executor.speculator import Speculator
from executor.target import Target
from sim.latency import LatencySample
from sim.policy import Drafting, Fallback, Proposer, SpeculativeSpeculative, uniform_fan_out
from sim.trace import Lane, Operation, Outcome, Source, Span
from sim.workload import Sampling

SEED = 0  # of the random tokens that fill the contexts
# The first passes after work of another size are slow, by a third where the model is small: caches are full of
# something else, and wide passes slow the processor's clock. A target that repeats one size is past that.
WARM_UP_S = 0.02


@dataclass(frozen=True)
class PrefillCell:
    """Either model: the forward pass over a prompt of `context` tokens."""

    context: int
    sampling: Sampling
    num_rows: int = 1


@dataclass(frozen=True)
class VerifyCell:
    """Target: verification of `num_tokens` - 1 draft tokens."""

    context: int
    num_tokens: int
    sampling: Sampling
    num_rows: int = 1


@dataclass(frozen=True)
class DraftStepCell:
    """Draft: one step that feeds `num_tokens` tokens."""

    context: int
    num_tokens: int
    sampling: Sampling
    num_rows: int = 1


@dataclass(frozen=True)
class BuildCell:
    """Draft: a build beside a verification of `num_drafted` tokens; the samples of `operation` are kept."""

    context: int
    num_drafted: int
    num_branches: int
    num_steps: int
    operation: Operation
    sampling: Sampling
    num_rows: int = 1


@dataclass(frozen=True)
class LookupCell:
    """Draft: a look-up in a speculation cache of `num_branches` outcomes."""

    context: int
    num_branches: int
    sampling: Sampling
    num_rows: int = 1


TargetCell = PrefillCell | VerifyCell
DraftCell = PrefillCell | DraftStepCell | BuildCell | LookupCell


def measure_target(target: Target, cell: TargetCell, num_repeats: int) -> list[Span]:
    """The spans of `num_repeats` repeats of the cell's operation, after the repeats of `WARM_UP_S`, one at least, that
    are dropped; of a prefill one is."""
    recorder = target.recorder
    contexts = _contexts(cell)
    recorder.begin_batch(range(cell.num_rows))
    requests = _requests(cell, target.model.vocab_size)
    if isinstance(cell, PrefillCell):
        for _ in range(1 + num_repeats):
            target.prefill(requests)
        return recorder.spans[1:]
    target.prefill(requests)
    recorder.begin_decoding()
    speculation = _speculation(cell, target.model.vocab_size)

    def verify() -> None:
        for row, context in enumerate(contexts):
            target.model.roll_back(context, row)
        target.verify(dict.fromkeys(range(cell.num_rows), speculation))

    _warm_up(verify)
    num_dropped = len(recorder.spans)
    for _ in range(num_repeats):
        verify()
    return recorder.spans[num_dropped:]


def measure_draft(model: LanguageModel, cell: DraftCell, num_repeats: int) -> list[Span]:
    """The spans of `num_repeats` repeats of the cell's operation, after one that is dropped: beside a target the draft
    never works long enough to be as warm as that is."""
    recorder = Recorder(Lane.DRAFT, clock_of(model.device))
    recorder.begin_batch(range(cell.num_rows))
    drafter = _begin(model, recorder, cell)
    recorder.begin_decoding()

    def work() -> None:
        recorder.forget()
        match cell:
            case PrefillCell():
                _begin(model, recorder, cell)
            case DraftStepCell():
                _draft_step(drafter, cell)
            case BuildCell():
                _build(drafter, cell)
            case LookupCell():
                _look_up(model, recorder, cell)

    kept: list[Span] = []
    work()
    for _ in range(num_repeats):
        work()
        kept += [span for span in recorder.spans if span.operation is _operation(cell)]
    return kept


def _warm_up(work: Callable[[], None]) -> None:
    start_s = now_s()
    work()
    while now_s() < start_s + WARM_UP_S:
        work()


def samples(spans: Iterable[Span], *, busy: bool, block: int) -> list[LatencySample]:
    """Spans as the samples of one block."""
    return [
        LatencySample(
            s.lane, s.operation, s.num_tokens // s.batch_size, s.context, busy, block, s.duration_s, s.batch_size
        )
        for s in spans
    ]


def _operation(cell: DraftCell) -> Operation:
    match cell:
        case PrefillCell():
            return Operation.PREFILL
        case DraftStepCell():
            return Operation.DRAFT_STEP
        case BuildCell():
            return cell.operation
        case LookupCell():
            return Operation.LOOKUP


def _begin(model: LanguageModel, recorder: Recorder, cell: DraftCell) -> Drafter:
    return Drafter(model, recorder, _requests(cell, model.vocab_size))


def _requests(cell: TargetCell | DraftCell, vocab_size: int) -> list[Request]:
    """One for each row; they never end."""
    prompts = [_tokens(context, vocab_size) for context in _contexts(cell)]
    rules = (1 << 30, cell.sampling, ())
    return [Request(row, prompt, *rules, seed=SEED) for row, prompt in enumerate(prompts)]


def _contexts(cell: TargetCell | DraftCell) -> list[int]:
    pairs = [cell.context + shift for _ in range(cell.num_rows // 2) for shift in (-1, 1)]
    return pairs + [cell.context] * (cell.num_rows % 2)


def _draft_step(drafter: Drafter, cell: DraftStepCell) -> None:
    for row, context in enumerate(_contexts(cell)):
        drafter.committed[row] = list(_tokens(context + cell.num_tokens, drafter.model.vocab_size))
        drafter.model.roll_back(context, row)
    drafter.draft(dict.fromkeys(range(cell.num_rows), 1), _drafting(1))


def _build(drafter: Drafter, cell: BuildCell) -> None:
    drafted = {}
    for row, context in enumerate(_contexts(cell)):
        tokens = _tokens(context + 1 + cell.num_drafted, drafter.model.vocab_size)
        drafter.committed[row], drafted[row] = list(tokens[: context + 1]), tokens[context + 1 :]
    fan_out = uniform_fan_out(cell.num_drafted, cell.num_branches)
    drafter.build(drafted, dict.fromkeys(drafted, fan_out), _drafting(cell.num_steps))


def _drafting(num_tokens: int) -> Drafting:
    return Drafting(Proposer.DRAFT_MODEL, num_tokens, (), Source.SYNCHRONOUS)


def _look_up(model: LanguageModel, recorder: Recorder, cell: LookupCell) -> None:
    policy = SpeculativeSpeculative(1, (0, 0), (cell.num_branches,), Fallback.NONE)
    speculator = Speculator(_begin(model, recorder, cell), recorder, upcoming=lambda: None)
    for remaining in (8, 7):
        verified = Verified(Outcome(0, 0), remaining)
        speculator.speculate(Question(policy, dict.fromkeys(range(cell.num_rows), verified)))
        if remaining == 8:
            speculator.prepare()


def _tokens(num: int, vocab_size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(SEED)
    return tuple(torch.randint(vocab_size, (num,), generator=generator).tolist())


def _speculation(cell: VerifyCell, vocab_size: int) -> Speculation:
    num_drafted = cell.num_tokens - 1
    if cell.sampling.temperature == 0 or num_drafted == 0:
        return Speculation(Source.SYNCHRONOUS, _tokens(num_drafted, vocab_size))
    generator = torch.Generator().manual_seed(SEED)
    probs = process(torch.randn(num_drafted, vocab_size, generator=generator), cell.sampling)
    uniforms = torch.rand(num_drafted, generator=generator, dtype=torch.float64)
    return Speculation(Source.SYNCHRONOUS, tuple(draw(probs, uniforms).tolist()), probs)
