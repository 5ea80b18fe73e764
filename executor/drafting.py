"""What the draft model does: continuations token by token, or the branches of speculation caches in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from executor.draws import Purpose
from executor.kv_cache import branch_mask
from executor.language_model import LanguageModel
from executor.recorder import Recorder
from executor.sampling import (
    by_rank,
    down_weight,
    draw,
    penalise,
    penalised,
    process,
    seen_along,
    uniform_tokens,
)
from executor.sequence import Request
from executor.speculation_cache import Speculation, SpeculationCache
from sim.policy import Drafting
from sim.trace import Operation, Outcome
from sim.workload import Sampling

Caches = Mapping[int, SpeculationCache]  # by row
Laws = list[Tensor | None]  # by row: what its tokens were drawn from; None where the row is greedy


class Drafter:
    """The draft model on the rows of a batch. Of a row's committed tokens the last is pending, not yet in the KV cache.

    Invariant after `commit`: the KV cache holds a prefix of the committed tokens, the pending one left out. What is
    missing (after full acceptance also the last draft token) is fed by the next pass. Where a text outgrows the draft
    model's positions nothing more is fed: the row then has no room for draft tokens.
    """

    def __init__(self, model: LanguageModel, recorder: Recorder, requests: Sequence[Request]) -> None:
        self.model = model
        self._recorder = recorder
        self._sampling = [request.sampling for request in requests]
        self._draws = [request.draws() for request in requests]
        self._is_audited = requests[0].audit
        self.committed = [list(request.prompt) for request in requests]
        model.begin(len(requests))
        rows = [row for row, prompt in enumerate(self.committed) if len(prompt) < model.max_positions]
        if rows:
            prompts = [self.committed[row] for row in rows]
            with recorder.span(Operation.PREFILL, sum(map(len, prompts)), contexts=[0] * len(rows)):
                model.feed(rows, prompts, num_logits=[1] * len(rows))

    def keep(self, rows: Sequence[int]) -> None:
        """The other rows have ended."""
        self.model.keep(rows)
        self._recorder.at_work(rows[0])

    def contexts(self, rows: Iterable[int]) -> list[int]:
        """KV entries of each row."""
        return [self.model.length_of(row) for row in rows]

    def room(self, row: int) -> int:
        """How many tokens can be drafted one after another: all but the last of them are fed."""
        return max(0, self.model.max_positions - len(self.committed[row]) + 1)

    def has_room_to_build(self, row: int, num_drafted: int) -> bool:
        """Whether every branch beside a verification of `num_drafted` tokens has room for at least one token."""
        return len(self.committed[row]) + num_drafted < self.model.max_positions

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Append committed tokens; forget the keys and values of everything that was not committed.

        Raises `KvCacheCorrupt` if the batch is audited and something else remains.
        """
        committed, fed = self.committed[row], self.model.texts[row]
        num_kept = min(len(committed), len(fed))
        committed += tokens
        while num_kept < min(len(fed), len(committed) - 1) and fed[num_kept] == committed[num_kept]:
            num_kept += 1
        self.model.roll_back(num_kept, row)
        if self._is_audited:
            self.model.audit(row, committed[:num_kept])

    def draft(self, num_tokens: Mapping[int, int], drafting: Drafting) -> dict[int, Speculation]:
        """For each row so many draft tokens one after another. A DRAFT_STEP takes all rows that want one more."""
        uniforms = {row: self._uniforms(row, Purpose.DRAFT, num) for row, num in num_tokens.items()}
        unfed = {row: self.committed[row][self.model.length_of(row) :] for row in num_tokens}
        tokens: dict[int, list[int]] = {row: [] for row in num_tokens}
        probs: dict[int, list[Tensor]] = {row: [] for row in num_tokens}
        for index in range(max(num_tokens.values(), default=0)):
            rows = [row for row, num in num_tokens.items() if num > index]
            fed = [unfed[row] for row in rows]
            with self._recorder.span(Operation.DRAFT_STEP, sum(map(len, fed)), self.contexts(rows)):
                logits = self.model.feed(rows, fed, num_logits=[1] * len(rows))
                logits = [self._penalised(row, own) for row, own in zip(rows, logits, strict=True)]
                numbers = _together([uniforms[row][index : index + 1] for row in rows])
                drawn, laws = self._sample(rows, _together(logits), numbers, drafting, index)
                for row, token, law in zip(rows, drawn.tolist(), laws, strict=True):
                    tokens[row].append(token)
                    unfed[row] = [token]
                    if law is not None:
                        probs[row].append(law)
        return {
            row: Speculation(drafting.source, tuple(tokens[row]), torch.stack(probs[row]) if probs[row] else None)
            for row in num_tokens
        }

    def filler(self, row: int, num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` tokens drawn uniformly from the vocabulary, at any temperature."""
        uniforms = self._draws[row].uniforms(Purpose.FILLER, self._recorder.round, num_tokens)
        return tuple(uniform_tokens(uniforms, self.model.vocab_size).tolist())

    def build(
        self,
        drafted: Mapping[int, Sequence[int]],
        fan_out: Mapping[int, Sequence[int]],
        prepared: Drafting,
        is_needed: Callable[[Caches], bool] | None = None,
    ) -> Caches:
        """Prepare a speculation, as `prepared` says, for each likely outcome of verifying `drafted` of each row.

        `fan_out[row][k]` bonus tokens for accept count k = 0 .. len(drafted[row]). One GLUE pass, then a TREE_STEP over
        all branches of all rows for each token of a speculation; afterwards the KV cache holds the committed tokens and
        `drafted`. `is_needed` is asked before each TREE_STEP, told of the outcomes; where it says no the rest is
        dropped. Near the end of the model's positions there are as many steps as every branch has room for.
        """
        outcomes = self._glue(drafted, fan_out)
        building = [row for row, likely in outcomes.items() if likely]
        without_steps = {row: SpeculationCache(likely) for row, likely in outcomes.items()}
        if not building:
            return without_steps
        lengths = self.contexts(building)
        room = min(self.room(row) - 1 - len(drafted[row]) for row in building)
        prepared = replace(prepared, num_drafted=min(prepared.num_drafted, room))
        branches = {row: outcomes[row] for row in building}
        seen = self._seen_by_branches(branches, drafted)
        steps = self._tree_steps(branches, seen, prepared, lambda: is_needed is None or is_needed(without_steps))
        for row, length in zip(building, lengths, strict=True):
            self.model.roll_back(length, row)
        if len(steps) < prepared.num_drafted:
            return without_steps
        built = {row: SpeculationCache(outcomes[row], _of_row(steps, place)) for place, row in enumerate(building)}
        return without_steps | built

    def _glue(
        self, drafted: Mapping[int, Sequence[int]], fan_out: Mapping[int, Sequence[int]]
    ) -> dict[int, list[Outcome]]:
        """Feed the pending tokens and `drafted`; choose the outcomes to prepare for."""
        rows = list(drafted)
        for row in rows:
            self.model.roll_back(min(self.model.length_of(row), len(self.committed[row]) - 1), row)
        unfed = [[*self.committed[row][self.model.length_of(row) :], *drafted[row]] for row in rows]
        with self._recorder.span(Operation.GLUE, sum(map(len, unfed)), self.contexts(rows)):
            logits = self.model.feed(rows, unfed, num_logits=[len(drafted[row]) + 1 for row in rows])
            return {
                row: likely_outcomes(self._penalised(row, own), drafted[row], fan_out[row])
                for row, own in zip(rows, logits, strict=True)
            }

    def _seen_by_branches(
        self, outcomes: Mapping[int, Sequence[Outcome]], drafted: Mapping[int, Sequence[int]]
    ) -> Tensor | None:
        """(rows, B, V) which tokens stand before the first one of each branch, its bonus token included; None where no
        repetition is penalised."""
        if all(self._sampling[row].repetition_penalty == 1 for row in outcomes):
            return None
        seen = torch.zeros(len(outcomes), max(map(len, outcomes.values())), self.model.vocab_size, dtype=torch.bool)
        for own, (row, likely) in zip(seen, outcomes.items(), strict=True):
            text = [*self.committed[row], *drafted[row]]
            along = seen_along(text, len(drafted[row]) + 1, self.model.vocab_size)
            own[: len(likely)] = along[[outcome.num_accepted for outcome in likely]]
            own[range(len(likely)), [outcome.bonus_token for outcome in likely]] = True
        return seen

    def _tree_steps(
        self,
        outcomes: Mapping[int, list[Outcome]],
        seen: Tensor | None,
        prepared: Drafting,
        go_on: Callable[[], bool],
    ) -> list[tuple[Tensor, Laws]]:
        """The draft steps of all branches, as far as `go_on` lets them: (rows, B) tokens and each row's (B, V) laws.

        In a pass all rows have as many branches as the one that has most; those that stand for nothing continue the
        row's first token. Spans tell what each row needs.
        """
        rows = list(outcomes)
        num_tokens = sum(map(len, outcomes.values()))
        num_branches, num_steps = max(map(len, outcomes.values())), prepared.num_drafted
        own_slots = self.contexts(rows)
        num_slots = self.model.level(rows)
        starts = [
            [len(self.committed[row]) + outcome.num_accepted for outcome in likely] for row, likely in outcomes.items()
        ]
        positions = torch.tensor([own + [1] * (num_branches - len(own)) for own in starts])
        bonus_tokens = [[outcome.bonus_token for outcome in likely] for likely in outcomes.values()]
        tokens = torch.tensor([own + [0] * (num_branches - len(own)) for own in bonus_tokens])
        mask = branch_mask(positions, num_slots, num_steps, self.model.dtype)
        uniforms = self._branch_uniforms(outcomes, num_branches, num_steps)
        penalties = torch.tensor([self._sampling[row].repetition_penalty for row in rows], dtype=torch.float64)
        steps: list[tuple[Tensor, Laws]] = []
        while len(steps) < num_steps and go_on():
            step = len(steps)
            contexts = [slots + step * len(own) for slots, own in zip(own_slots, outcomes.values(), strict=True)]
            with self._recorder.span(Operation.TREE_STEP, num_tokens, contexts):
                visible = mask[..., : num_slots + (step + 1) * num_branches]
                logits = self.model.append_branches(rows, tokens, positions + step, visible)
                if seen is not None:
                    logits = penalise(logits, penalties[:, None, None], seen)
                steps.append(self._sample(rows, logits, uniforms[..., step], prepared, step))
                tokens = steps[-1][0]
                if seen is not None:
                    seen.scatter_(-1, tokens[..., None], value=True)
        return steps

    def _branch_uniforms(self, outcomes: Mapping[int, Sequence[Outcome]], num_branches: int, num_steps: int) -> Tensor:
        """(rows, num_branches, num_steps), those of a row's own branches the same however many stand beside them."""
        uniforms = torch.zeros(len(outcomes), num_branches, num_steps, dtype=torch.float64)
        for place, (row, own) in enumerate(outcomes.items()):
            if self._sampling[row].temperature > 0:
                drawn = self._uniforms(row, Purpose.BRANCH, len(own) * num_steps)
                uniforms[place, : len(own)] = drawn.view(len(own), num_steps)
        return uniforms

    def _penalised(self, row: int, logits: Tensor) -> Tensor:
        """Logits after the last tokens that the row was fed."""
        return penalised(logits, self._sampling[row].repetition_penalty, self.model.texts[row])

    def _sample(
        self, rows: Sequence[int], logits: Tensor, uniforms: Tensor, drafting: Drafting, draft_index: int
    ) -> tuple[Tensor, Laws]:
        """(rows, ..., V) logits, (rows, ...) uniform numbers -> (rows, ...) tokens, each row's (..., V) laws.

        The tokens are those of draft index `draft_index` in a round that drafts as `drafting` says. Rows of the same
        settings are processed together.
        """
        alike: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault(self._sampling[row], []).append(place)
        if len(alike) == 1:
            tokens, probs = _sample_alike(logits, uniforms, self._sampling[rows[0]], drafting, draft_index)
            return tokens, [None] * len(rows) if probs is None else list(probs)
        tokens = torch.zeros(logits.shape[:-1], dtype=torch.long)
        laws: Laws = [None] * len(rows)
        for sampling, places in alike.items():
            tokens[places], probs = _sample_alike(logits[places], uniforms[places], sampling, drafting, draft_index)
            for place, law in zip(places, [None] * len(places) if probs is None else probs, strict=True):
                laws[place] = law
        return tokens, laws

    def _uniforms(self, row: int, purpose: Purpose, num: int) -> Tensor:
        if self._sampling[row].temperature == 0:
            return torch.zeros(num, dtype=torch.float64)
        return self._draws[row].uniforms(purpose, self._recorder.round, num)


def _together(rows: Sequence[Tensor]) -> Tensor:
    """Concatenation, without a copy of one."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _of_row(steps: Sequence[tuple[Tensor, Laws]], place: int) -> list[tuple[Tensor, Tensor | None]]:
    """One row's (B,) tokens and (B, V) laws of each step."""
    return [(tokens[place], laws[place]) for tokens, laws in steps]


def _sample_alike(
    logits: Tensor, uniforms: Tensor, sampling: Sampling, drafting: Drafting, draft_index: int
) -> tuple[Tensor, Tensor | None]:
    """(..., V) logits, (...) uniform numbers -> (...) tokens, (..., V) laws or None at temperature 0."""
    if sampling.temperature == 0:
        return logits.argmax(-1), None
    probs = process(logits, sampling)
    num_downweighted = drafting.num_downweighted(draft_index)
    if num_downweighted:
        probs = down_weight(probs, logits, num_downweighted, drafting.downweight)
    return draw(probs, uniforms), probs


def likely_outcomes(logits: Tensor, drafted: Sequence[int], fan_out: Sequence[int]) -> list[Outcome]:
    """The outcomes to prepare for: after k accepted tokens the `fan_out[k]` most likely of row k of (n+1, V) logits.

    A rejected draft token cannot be the bonus token, so `drafted[k]` is left out for k < len(drafted).
    """
    ranked = by_rank(logits, max(fan_out) + 1).tolist()
    outcomes = []
    for k, (row, num_tokens) in enumerate(zip(ranked, fan_out, strict=True)):
        left_out = drafted[k] if k < len(drafted) else None
        bonus_tokens = [token for token in row if token != left_out]
        outcomes += [Outcome(k, token) for token in bonus_tokens[:num_tokens]]
    return outcomes
