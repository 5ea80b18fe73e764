"""Profiling a pair on this machine: how target and draft agree, and how long every operation takes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.concurrency import Runner
from executor.device import on_host, put
from executor.draws import Purpose
from executor.execute import check_room, requests, tokenizer_for
from executor.language_model import LanguageModel
from executor.latency_cells import (
    BuildCell,
    DraftCell,
    DraftStepCell,
    LookupCell,
    PrefillCell,
    TargetCell,
    VerifyCell,
    measure_target,
    samples,
)
from executor.recorder import now_s
from executor.sampling import by_rank, draw, penalised, process, processed_logits, rank
from executor.sequence import OpenSequence, Request
from sim.agreement import AgreementRecord
from sim.errors import BadInput, require_count
from sim.latency import LatencySample
from sim.trace import Operation
from sim.workload import Sampling, Workload, sampling_to_dict

Progress = Callable[[int, int], None]  # done, in all
MAX_ROWS = 32  # sequences decoded at once for an agreement record
MIN_BLOCKS = 5
NUM_REPEATS = 3  # kept samples of a draft's cell per block
NUM_VERIFICATIONS = 6  # the same of a target's, whose warming up takes longer than these

# ------------------------------------------------------------------------------------------------------- agreement


def measure_agreement(
    runner: Runner, workload: Workload, seed: int = 0, num_candidates: int = 32, progress: Progress | None = None
) -> AgreementRecord:
    """One autoregressive run of the target per prompt, scored by the draft along the same tokens.

    Prompts of equal length are decoded as one batch. They draw the random numbers that an AR run with this seed
    draws, so the texts are AR's but for rounding. `progress` is called with the prompts done. Raises `BadInput` if the
    prompts' sampling settings differ: a record is of one law. So it does where the draft has too few positions to score
    a text to its end.
    """
    num_candidates = require_count("num_candidates", num_candidates, 1)
    check_room(workload, runner)
    _check_room_to_score(workload, runner.pair.max_positions)
    if workload.max_new_tokens == 0:
        raise BadInput("workload.max_new_tokens", "must be at least 1 for an agreement record", 0)
    if len(workload.laws) > 1:
        rule = "must have the same settings for all prompts in an agreement record"
        raise BadInput("workload.sampling", rule, [sampling_to_dict(law) for law in set(workload.laws)])
    (sampling,) = workload.laws
    tokenizer = tokenizer_for(workload, runner)
    rows: dict[int, _ScoredText] = {}
    for batch in _batches(list(requests(workload, seed))):
        for scored in _score_batch(runner, [OpenSequence(request, tokenizer) for request in batch]):
            rows[scored.sequence.request.index] = scored
        if progress is not None:
            progress(len(rows), len(workload.prompts))
    texts = [rows[index] for index in range(len(workload.prompts))]
    columns = [_columns(text, sampling, num_candidates) for text in texts]
    lengths = [len(text.sequence.tokens) for text in texts]
    values: dict[str, Any] = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    hashes = runner.pair.hashes
    identity = workload.identity() | {"pair": runner.pair.name, "target": hashes["target"], "draft": hashes["draft"]}
    return AgreementRecord(
        identity=identity | {"vocab_size": runner.pair.vocab_size, "seed": seed},
        prompt_length=np.array([len(prompt) for prompt in workload.prompts]),
        stopped=np.array([text.sequence.stopped for text in texts]),
        prompt=np.repeat(np.arange(len(texts)), lengths),
        position=np.concatenate([np.arange(length) for length in lengths]),
        prompt_tokens=workload.prompts,
        **values,
    )


def _check_room_to_score(workload: Workload, limit: int) -> None:
    """Raises `BadInput` unless all but the last token of every text have positions in both models."""
    needed = max(map(len, workload.prompts)) + workload.max_new_tokens - 1
    if needed > limit:
        raise BadInput("workload", f"prompts with max_new_tokens must fit the draft's {limit} positions", needed)


@dataclass(frozen=True)
class _ScoredText:
    """n generated tokens and the (n, V) logits, penalised, that both models gave for their positions."""

    sequence: OpenSequence
    target_logits: Tensor
    draft_logits: Tensor


def _batches(all_requests: Sequence[Request]) -> Iterator[list[Request]]:
    by_length: dict[int, list[Request]] = defaultdict(list)
    for request in all_requests:
        by_length[len(request.prompt)].append(request)
    for group in by_length.values():
        for start in range(0, len(group), MAX_ROWS):
            yield group[start : start + MAX_ROWS]


def _score_batch(runner: Runner, batch: Sequence[OpenSequence]) -> list[_ScoredText]:
    tokens, target_logits = _decode_batch(runner.target.model, batch)
    texts = [[*s.request.prompt, *row[:-1]] for s, row in zip(batch, tokens.tolist(), strict=True)]
    runner.draft.start("score", texts, num_rows=tokens.shape[1])
    draft_logits = torch.from_numpy(runner.draft.result())
    scored = []
    for row, sequence in enumerate(batch):
        num, penalty = len(sequence.tokens), sequence.request.sampling.repetition_penalty
        text = texts[row][: len(sequence.request.prompt) + num - 1]
        logits = [penalised(own[row, :num], penalty, text) for own in (target_logits, draft_logits)]
        scored.append(_ScoredText(sequence, *logits))
    return scored


def _decode_batch(model: LanguageModel, batch: Sequence[OpenSequence]) -> tuple[Tensor, Tensor]:
    """(rows, n) tokens and (rows, n, V) logits of an autoregressive run, n as long as the longest row needs; on the
    host."""
    rows = model.with_rows(len(batch))
    draws = [sequence.request.draws() for sequence in batch]
    texts = [list(sequence.request.prompt) for sequence in batch]
    sampling = batch[0].request.sampling
    unfed = put(texts, model.device)
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    while any(sequence.is_open for sequence in batch):
        logits.append(rows.append_rows(unfed, num_logits=1)[:, 0])
        own = [
            penalised(row[None], sampling.repetition_penalty, text) for row, text in zip(logits[-1], texts, strict=True)
        ]
        probs = process(torch.cat(own), sampling)
        if probs.isnan().any():
            index = batch[int(probs.isnan().any(-1).long().argmax())].request.index
            raise FloatingPointError(f"sequence {index}, token {len(tokens)}: the target's logits are not finite")
        uniforms = torch.cat([d.uniforms(Purpose.BONUS, len(tokens) - 1, 1) for d in draws])
        tokens.append(draw(probs, put(uniforms, model.device)))
        unfed = tokens[-1][:, None]
        for sequence, text, token in zip(batch, texts, tokens[-1].tolist(), strict=True):
            text.append(token)
            if sequence.is_open:
                sequence.append(token)
    return on_host(torch.stack(tokens, 1)), on_host(torch.stack(logits, 1))


def _columns(text: _ScoredText, sampling: Sampling, num_candidates: int) -> dict[str, Any]:
    """The per-row columns of an `AgreementRecord`; probabilities at temperature 1 if the run was greedy."""
    law = replace(sampling, temperature=sampling.temperature or 1.0)
    tokens = torch.tensor(text.sequence.tokens)
    log_p, log_q = (processed_logits(own, law).log_softmax(-1) for own in (text.target_logits, text.draft_logits))
    top_token = by_rank(text.draft_logits, num_candidates)
    columns = {
        "token": tokens,
        "log_p": log_p.gather(-1, tokens[:, None])[:, 0],
        "log_q": log_q.gather(-1, tokens[:, None])[:, 0],
        "rank": rank(text.draft_logits, tokens),
        "overlap": torch.minimum(log_p, log_q).exp().sum(-1),
        "top_token": top_token,
        "top_p": log_p.gather(-1, top_token).exp(),
        "top_q": log_q.gather(-1, top_token).exp(),
    }
    return {name: column.numpy() for name, column in columns.items()}


def top2_gap(runner: Runner, tokens: Sequence[int]) -> float:
    """Difference of the target's two largest logits after `tokens`, teacher-forced in one pass."""
    model = runner.target.model
    model.begin(1)
    largest = model.append(tokens, num_logits=1)[0].topk(2).values
    model.roll_back(0)
    return float(largest[0] - largest[1])


# --------------------------------------------------------------------------------------------------------- latency


@dataclass(frozen=True)
class LatencyGrid:
    """What a policy search may ask for: speculation lengths up to K, numbers of branches, contexts, one law.

    Widths, branches and contexts are those of each row. Up to `batch_size` rows are timed: 1, 2, 4 .. and that number.
    """

    max_speculation_length: int
    branch_counts: tuple[int, ...]
    contexts: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    batch_size: int = 1

    def __post_init__(self) -> None:
        require_count("latency grid: batch_size", self.batch_size, 1)
        for name in ("branch_counts", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise BadInput(f"latency grid: {name}", "must hold at least one number, all >= 1", values)
        if self.batch_size > 1 and min(self.contexts) < 2:
            raise BadInput("latency grid: contexts", "must be >= 2 for batches, whose rows differ", self.contexts)
        if self.max_speculation_length < 1:
            raise BadInput("latency grid: max_speculation_length", "must be >= 1", self.max_speculation_length)

    def batch_sizes(self) -> list[int]:
        """Numbers of rows that are timed; what lies between is interpolated."""
        return sorted({2**power for power in range(self.batch_size.bit_length())} | {self.batch_size})

    def target_cells(self) -> list[TargetCell]:
        """The prefill and verifications of every width."""
        return [replace(cell, num_rows=rows) for rows in self.batch_sizes() for cell in self._target_cells_of_one_row()]

    def _target_cells_of_one_row(self) -> list[TargetCell]:
        law, widths = self.sampling, range(1, self.max_speculation_length + 2)
        verifications = [VerifyCell(context, width, law) for context in self.contexts for width in widths]
        return [*verifications, *(PrefillCell(context, law) for context in self.contexts)]

    def draft_cells(self, max_positions: int) -> list[DraftCell]:
        """The prefill, steps, glue passes of every width, and builds that span the contexts a tree step can meet.

        The slots before a tree step are the context, the glue pass and the earlier branch tokens: at the smallest
        context a build follows a glue pass of one token, elsewhere one of K + 1; one more context stands for the last
        tree step of the largest build, as far as the models have positions.
        """
        one_row = self._draft_cells_of_one_row(max_positions)
        return [replace(cell, num_rows=rows) for rows in self.batch_sizes() for cell in one_row]

    def _draft_cells_of_one_row(self, max_positions: int) -> list[DraftCell]:
        K, law = self.max_speculation_length, self.sampling
        smallest, largest = min(self.contexts), max(self.contexts)
        usual = sorted(self.branch_counts)[len(self.branch_counts) // 2]
        cells: list[DraftCell] = []
        for context in self.contexts:
            cells += [DraftStepCell(context, num_tokens, law) for num_tokens in (1, 2)]
            cells += [BuildCell(context, num_drafted, usual, 1, Operation.GLUE, law) for num_drafted in range(K + 1)]
            num_drafted = 0 if context == smallest else K
            cells += [BuildCell(context, num_drafted, b, K, Operation.TREE_STEP, law) for b in self.branch_counts]
            cells += [PrefillCell(context, law), LookupCell(context, usual, law)]
        if smallest == largest:
            cells += [BuildCell(largest, K, b, K, Operation.TREE_STEP, law) for b in self.branch_counts]
        farthest = min(largest + (K - 1) * max(self.branch_counts), max_positions - 2 * K - 2)
        if farthest > largest:
            cells += [BuildCell(farthest, K, b, 1, Operation.TREE_STEP, law) for b in self.branch_counts]
        return cells


@dataclass(frozen=True)
class LatencyProfile:
    """Samples, and how many cells were timed in how many interleaved blocks."""

    samples: list[LatencySample]
    num_cells: int
    num_blocks: int


def measure_latency(
    runner: Runner,
    grid: LatencyGrid,
    budget_s: float,
    seed: int = 0,
    min_blocks: int = MIN_BLOCKS,
    progress: Progress | None = None,
) -> LatencyProfile:
    """Time every operation the loops use, block after block until the budget is spent, never fewer than `min_blocks`.

    A block visits every cell once in shuffled order, so that drift meets all alike: the target's cells while the draft
    is idle, the draft's while the target is idle and, where roles run side by side, both again while the other works.
    `progress` is called after each block with the blocks done and the blocks expected; what it does itself costs
    nothing of the budget.
    """
    target_cells, draft_cells = grid.target_cells(), grid.draft_cells(runner.pair.max_positions)
    _check_grid(runner, grid)
    shuffle = random.Random(seed).shuffle
    collected: list[LatencySample] = []
    spent_s, num_blocks = 0.0, 0
    while num_blocks < min_blocks or spent_s * (num_blocks + 1) / num_blocks < budget_s:
        start_s = now_s()
        for busy in (False, True) if runner.overlaps else (False,):
            shuffle(target_cells)
            shuffle(draft_cells)
            collected += _target_block(runner, target_cells, draft_cells, busy=busy, block=num_blocks)
            collected += _draft_block(runner, draft_cells, target_cells, busy=busy, block=num_blocks)
        spent_s += now_s() - start_s
        num_blocks += 1
        if progress is not None:
            expected = int(budget_s * num_blocks / max(spent_s, 1e-9))
            progress(num_blocks, max(min_blocks, expected, num_blocks))
    return LatencyProfile(collected, len(target_cells) + len(draft_cells), num_blocks)


def _check_grid(runner: Runner, grid: LatencyGrid) -> None:
    needed = max(grid.contexts) + 2 * grid.max_speculation_length + 2 + (grid.batch_size > 1)
    if needed > runner.pair.max_positions:
        rule = f"with the look-ahead must fit the models' {runner.pair.max_positions} positions"
        raise BadInput("latency grid: contexts", rule, needed)


def _target_block(
    runner: Runner, cells: Sequence[TargetCell], company: Sequence[DraftCell], *, busy: bool, block: int
) -> list[LatencySample]:
    """The target's cells; busy: while the draft builds."""
    if busy:
        runner.draft.start("keep_busy", [cell for cell in company if isinstance(cell, BuildCell)])
    spans = [span for cell in cells for span in measure_target(runner.target, cell, NUM_VERIFICATIONS)]
    if busy:
        runner.draft.start("answer")
        runner.draft.result()
        runner.draft.result()
    return samples(spans, busy=busy, block=block)


def _draft_block(
    runner: Runner, cells: Sequence[DraftCell], company: Sequence[TargetCell], *, busy: bool, block: int
) -> list[LatencySample]:
    """The draft's cells; busy: while the target verifies."""
    runner.draft.start("measure", cells, NUM_REPEATS)
    verifications = cycle(cell for cell in company if isinstance(cell, VerifyCell))
    while busy and not runner.draft.is_done():
        measure_target(runner.target, next(verifications), num_repeats=8)
    return samples(runner.draft.result(), busy=busy, block=block)
