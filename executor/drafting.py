"""What the draft model does: continuations token by token, or the branches of speculation caches in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from executor.device import put, together
from executor.draws import Purpose
from executor.kv_cache import branch_mask
from executor.language_model import LanguageModel
from executor.likely_outcomes import Likely, likely_outcomes, outcomes_only, read_build
from executor.recorder import Recorder
from executor.row_sampler import Laws, RowSampler
from executor.sampling import seen_along
from executor.sequence import Request
from executor.speculation_cache import Speculation, SpeculationCache
from sim.policy import Drafting
from sim.trace import Operation

Caches = Mapping[int, SpeculationCache]  # by row


class Drafter:
    """The draft model on the rows of a batch. Of a row's committed tokens the last is pending, not yet in the KV cache.

    Invariant after `commit`: the KV cache holds a prefix of the committed tokens, the pending one left out. What is
    missing (after full acceptance also the last draft token) is fed by the next pass. Where a text outgrows the draft
    model's positions nothing more is fed: the row then has no room for draft tokens.
    """

    def __init__(self, model: LanguageModel, recorder: Recorder, requests: Sequence[Request]) -> None:
        self.model = model
        self._recorder = recorder
        self._sampler = RowSampler(requests, model.vocab_size, model.device)
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
        """For each row so many draft tokens one after another. A DRAFT_STEP takes all rows that want one more.

        The tokens stay on the device, where the next step finds them, and are read when all are drawn.
        """
        uniforms = {
            row: self._sampler.uniforms(row, Purpose.DRAFT, self._recorder.round, num)
            for row, num in num_tokens.items()
        }
        unfed = {row: self.committed[row][self.model.length_of(row) :] for row in num_tokens}
        seen = self._seen(list(num_tokens)) if self._sampler.penalises(num_tokens) else None
        steps: list[_Step] = []
        for index in range(max(num_tokens.values(), default=0)):
            rows = [row for row, num in num_tokens.items() if num > index]
            fed = [unfed[row] if index == 0 else (0,) for row in rows]
            numbers = together([uniforms[row][index : index + 1] for row in rows])
            with self._recorder.span(Operation.DRAFT_STEP, sum(map(len, fed)), self.contexts(rows)):
                if index == 0:
                    logits = together(self.model.feed(rows, fed, num_logits=[1] * len(rows)))
                else:
                    logits = self.model.feed_drawn(rows, steps[-1].tokens_of(rows))
                if seen is not None:
                    logits = self._sampler.penalise(rows, logits, seen.of(rows))
                step = _Step(rows, *self._sampler.sample(rows, logits, numbers, drafting, index))
                if seen is not None:
                    seen.add(rows, step.tokens)
            steps.append(step)
        return self._speculations(num_tokens, steps, drafting)

    def _speculations(self, rows: Iterable[int], steps: Sequence[_Step], drafting: Drafting) -> dict[int, Speculation]:
        """Read what was drawn."""
        numbers = iter(together([step.tokens for step in steps]).tolist() if steps else ())
        tokens: dict[int, list[int]] = {row: [] for row in rows}
        laws: dict[int, list[Tensor]] = {row: [] for row in rows}
        for step in steps:
            for row, law in zip(step.rows, step.laws, strict=True):
                tokens[row].append(next(numbers))
                if law is not None:
                    laws[row].append(law)
        for row, own in tokens.items():
            self.model.name_last(row, own[:-1])  # the last one was not fed
        return {
            row: Speculation(drafting.source, tuple(own), torch.stack(laws[row]) if laws[row] else None)
            for row, own in tokens.items()
        }

    def filler(self, row: int, num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` tokens drawn uniformly from the vocabulary, at any temperature."""
        return self._sampler.filler(row, self._recorder.round, num_tokens)

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
        likely = self._glue(drafted, fan_out)
        building = {row: own for row, own in likely.items() if own.num_accepted}
        if not building:
            return {row: SpeculationCache() for row in likely}
        without_steps = {} if is_needed is None else outcomes_only(likely)
        lengths = self.contexts(building)
        room = min(self.room(row) - 1 - len(drafted[row]) for row in building)
        prepared = replace(prepared, num_drafted=min(prepared.num_drafted, room))
        steps = self._tree_steps(
            building,
            self._seen_by_branches(building, drafted),
            prepared,
            lambda: is_needed is None or is_needed(without_steps),
        )
        for row, length in zip(building, lengths, strict=True):
            self.model.roll_back(length, row)
        if len(steps) < prepared.num_drafted:
            return without_steps
        return {row: SpeculationCache() for row in likely} | read_build(building, steps)

    def _glue(self, drafted: Mapping[int, Sequence[int]], fan_out: Mapping[int, Sequence[int]]) -> dict[int, Likely]:
        """Feed the pending tokens and `drafted`; choose the outcomes to prepare for."""
        rows = list(drafted)
        for row in rows:
            self.model.roll_back(min(self.model.length_of(row), len(self.committed[row]) - 1), row)
        unfed = [[*self.committed[row][self.model.length_of(row) :], *drafted[row]] for row in rows]
        with self._recorder.span(Operation.GLUE, sum(map(len, unfed)), self.contexts(rows)):
            logits = self.model.feed(rows, unfed, num_logits=[len(drafted[row]) + 1 for row in rows])
            return {
                row: likely_outcomes(
                    self._sampler.penalised(row, own, self.model.texts[row]), drafted[row], fan_out[row]
                )
                for row, own in zip(rows, logits, strict=True)
            }

    def _seen_by_branches(self, likely: Mapping[int, Likely], drafted: Mapping[int, Sequence[int]]) -> Tensor | None:
        """(rows, B, V) which tokens stand before the first one of each branch, its bonus token included; None where no
        repetition is penalised."""
        if not self._sampler.penalises(likely):
            return None
        V, device = self.model.vocab_size, self.model.device
        num_branches = max(len(own.num_accepted) for own in likely.values())
        seen = torch.zeros(len(likely), num_branches, V, dtype=torch.bool, device=device)
        for of_row, (row, own) in zip(seen, likely.items(), strict=True):
            along = seen_along([*self.committed[row], *drafted[row]], len(drafted[row]) + 1, V, device)
            along = along[put(own.num_accepted, device)].scatter_(-1, own.bonus_tokens[:, None], True)
            of_row[: len(along)] = along
        return seen

    def _tree_steps(
        self,
        likely: Mapping[int, Likely],
        seen: Tensor | None,
        prepared: Drafting,
        go_on: Callable[[], bool],
    ) -> list[tuple[Tensor, Laws]]:
        """The draft steps of all branches, as far as `go_on` lets them: (rows, B) tokens and each row's (B, V) laws.

        In a pass all rows have as many branches as the one that has most; those that stand for nothing continue the
        row's first token. Spans tell what each row needs. Nothing is read from the device.
        """
        rows, device = list(likely), self.model.device
        num_own = [len(own.num_accepted) for own in likely.values()]
        num_branches, num_steps = max(num_own), prepared.num_drafted
        own_slots = self.contexts(rows)
        num_slots = self.model.level(rows)
        starts = [[len(self.committed[row]) + k for k in own.num_accepted] for row, own in likely.items()]
        positions = put([own + [1] * (num_branches - len(own)) for own in starts], device)
        tokens = pad_sequence([own.bonus_tokens for own in likely.values()], batch_first=True)
        mask = branch_mask(positions, num_slots, num_steps, self.model.dtype)
        uniforms = put(self._sampler.branch_uniforms(rows, num_own, num_steps, self._recorder.round), device)
        steps: list[tuple[Tensor, Laws]] = []
        while len(steps) < num_steps and go_on():
            step = len(steps)
            contexts = [slots + step * num for slots, num in zip(own_slots, num_own, strict=True)]
            with self._recorder.span(Operation.TREE_STEP, sum(num_own), contexts):
                visible = mask[..., : num_slots + (step + 1) * num_branches]
                logits = self.model.append_branches(rows, tokens, positions + step, visible)
                if seen is not None:
                    logits = self._sampler.penalise(rows, logits, seen)
                steps.append(self._sampler.sample(rows, logits, uniforms[..., step], prepared, step))
                tokens = steps[-1][0]
                if seen is not None:
                    seen.scatter_(-1, tokens[..., None], value=True)
        return steps

    def _seen(self, rows: Sequence[int]) -> _Seen:
        """What the rows' texts hold."""
        texts = (self.committed[row] for row in rows)
        return _Seen(rows, torch.cat([seen_along(t, 1, self.model.vocab_size, self.model.device) for t in texts]))


class _Step(NamedTuple):
    """One draft token of each of some rows, on the device."""

    rows: list[int]
    tokens: Tensor  # (rows,)
    laws: Laws

    def tokens_of(self, rows: Sequence[int]) -> Tensor:
        """Those of some of its rows."""
        return _of(self.tokens, self.rows, rows)


class _Seen:
    """Which tokens the texts of some rows hold, those included that were drawn and not read."""

    def __init__(self, rows: Sequence[int], seen: Tensor) -> None:
        self._rows = list(rows)
        self._seen = seen  # (rows, V) bool

    def of(self, rows: Sequence[int]) -> Tensor:
        return _of(self._seen, self._rows, rows)

    def add(self, rows: Sequence[int], tokens: Tensor) -> None:
        self._seen[put([self._rows.index(row) for row in rows], tokens.device), tokens] = True


def _of(values: Tensor, rows: Sequence[int], some: Sequence[int]) -> Tensor:
    """(rows, ...) values -> those of some rows, without a copy of all."""
    return values if list(some) == list(rows) else values[put([rows.index(row) for row in some], values.device)]
