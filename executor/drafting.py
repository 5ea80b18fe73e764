"""What the draft model does: one continuation token by token, or the branches of a speculation cache in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor.draws import Draws, Purpose
from executor.kv_cache import branch_mask
from executor.language_model import LanguageModel
from executor.recorder import Recorder
from executor.sampling import by_rank, down_weight, draw, process, uniform_tokens
from executor.speculation_cache import Speculation, SpeculationCache
from sim.policy import Drafting
from sim.trace import Operation, Outcome


class Drafter:
    """The draft model on one sequence. Of the committed tokens the last is pending, not yet in the KV cache.

    Invariant after `commit`: the KV cache holds a prefix of the committed tokens, the pending one left out. What is
    missing (after full acceptance also the last draft token) is fed by the next pass.
    """

    def __init__(
        self, model: LanguageModel, recorder: Recorder, temperature: float, draws: Draws, prompt: Sequence[int]
    ) -> None:
        self.model = model
        self._recorder = recorder
        self._temperature = temperature
        self._draws = draws
        self.committed = list(prompt)
        model.roll_back(0)
        with recorder.span(Operation.PREFILL, num_tokens=len(prompt), context=0):
            model.append(prompt, num_logits=1)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens; forget the keys and values of everything that was not committed."""
        num_kept = min(len(self.committed), self.model.length)
        self.committed += tokens
        fed = self.model.tokens
        while num_kept < min(len(fed), len(self.committed) - 1) and fed[num_kept] == self.committed[num_kept]:
            num_kept += 1
        self.model.roll_back(num_kept)

    def draft(self, num_tokens: int, drafting: Drafting) -> Speculation:
        """`num_tokens` draft tokens one after another: that many DRAFT_STEPs."""
        uniforms = self._uniforms(Purpose.DRAFT, num_tokens)
        steps: list[tuple[Tensor, Tensor | None]] = []
        unfed = self.committed[self.model.length :]
        for position in range(num_tokens):
            with self._recorder.span(Operation.DRAFT_STEP, num_tokens=len(unfed), context=self.model.length):
                logits = self.model.append(unfed, num_logits=1)
                steps.append(self._sample(logits, uniforms[position : position + 1], drafting, position))
                unfed = steps[-1][0].tolist()
        tokens = tuple(int(token) for token, _ in steps)
        rows = [probs for _, probs in steps if probs is not None]
        return Speculation(drafting.source, tokens, torch.cat(rows) if rows else None)

    def filler(self, num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` tokens drawn uniformly from the vocabulary, at any temperature."""
        uniforms = self._draws.uniforms(Purpose.FILLER, self._recorder.round, num_tokens)
        return tuple(uniform_tokens(uniforms, self.model.vocab_size).tolist())

    def build(
        self,
        drafted: Sequence[int],
        fan_out: Sequence[int],
        prepared: Drafting,
        is_needed: Callable[[SpeculationCache], bool] | None = None,
    ) -> SpeculationCache:
        """Prepare a speculation, as `prepared` says, for each likely outcome of verifying `drafted`.

        `fan_out[k]` bonus tokens for accept count k = 0 .. len(drafted). One GLUE pass, then a TREE_STEP over all
        branches at once for each token of a speculation; afterwards the KV cache holds the committed tokens and
        `drafted`. `is_needed` is asked before each TREE_STEP, told of the outcomes; where it says no the rest is
        dropped.
        """
        outcomes = self._glue(drafted, fan_out)
        without_steps = SpeculationCache(outcomes)
        if not outcomes:
            return without_steps
        speculation_length = prepared.num_drafted
        num_slots = self.model.length
        num_branches = len(outcomes)
        positions = torch.tensor([len(self.committed) + outcome.num_accepted for outcome in outcomes])
        mask = branch_mask(positions, num_slots, speculation_length, self.model.dtype)
        uniforms = self._uniforms(Purpose.BRANCH, num_branches * speculation_length)
        uniforms = uniforms.view(num_branches, speculation_length)
        tokens = torch.tensor([outcome.bonus_token for outcome in outcomes])
        steps: list[tuple[Tensor, Tensor | None]] = []
        for step in range(speculation_length):
            if is_needed is not None and not is_needed(without_steps):
                self.model.roll_back(num_slots)
                return without_steps
            context = self.model.length
            with self._recorder.span(Operation.TREE_STEP, num_tokens=num_branches, context=context):
                visible = mask[..., : context + num_branches]
                logits = self.model.append_branches(tokens, positions + step, visible)
                steps.append(self._sample(logits, uniforms[:, step], prepared, step))
                tokens = steps[-1][0]
        self.model.roll_back(num_slots)
        return SpeculationCache(outcomes, steps)

    def _glue(self, drafted: Sequence[int], fan_out: Sequence[int]) -> list[Outcome]:
        """Feed the pending token and `drafted`; choose the outcomes to prepare for."""
        self.model.roll_back(min(self.model.length, len(self.committed) - 1))
        unfed = self.committed[self.model.length :] + list(drafted)
        with self._recorder.span(Operation.GLUE, num_tokens=len(unfed), context=self.model.length):
            logits = self.model.append(unfed, num_logits=len(drafted) + 1)
            return likely_outcomes(logits, drafted, fan_out)

    def _sample(
        self, logits: Tensor, uniforms: Tensor, drafting: Drafting, draft_index: int
    ) -> tuple[Tensor, Tensor | None]:
        """(n, V) logits, (n,) uniform numbers -> (n,) tokens and the (n, V) distributions, None at temperature 0.

        The tokens are those of draft index `draft_index` in a round that drafts as `drafting` says.
        """
        if self._temperature == 0:
            return logits.argmax(-1), None
        probs = process(logits, self._temperature)
        num_downweighted = drafting.num_downweighted(draft_index)
        if num_downweighted:
            probs = down_weight(probs, logits, num_downweighted, drafting.downweight)
        return draw(probs, uniforms), probs

    def _uniforms(self, purpose: Purpose, num: int) -> Tensor:
        if self._temperature == 0:
            return torch.zeros(num)
        return self._draws.uniforms(purpose, self._recorder.round, num)


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
