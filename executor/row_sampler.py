"""How tokens of the rows of a batch are drawn: settings, random numbers and penalties of each row's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from executor.device import CPU, put
from executor.draws import Purpose
from executor.sampling import down_weight, draw, penalise, penalised, process, uniform_tokens
from executor.sequence import Request
from sim.policy import Drafting
from sim.workload import Sampling

Laws = list[Tensor | None]  # by row: what its tokens were drawn from; None where the row is greedy


class RowSampler:
    """Of every row of a batch its settings and its random numbers."""

    def __init__(self, requests: Sequence[Request], vocab_size: int, device: torch.device) -> None:
        self._sampling = [request.sampling for request in requests]
        self._are_alike = len(set(self._sampling)) == 1
        self._draws = [request.draws() for request in requests]
        self._vocab_size = vocab_size
        self._device = device

    def uniforms(self, row: int, purpose: Purpose, round_number: int, num: int) -> Tensor:
        """(num,) numbers of a round, which a greedy row does not look at."""
        if self._sampling[row].temperature == 0:
            return torch.zeros(num, dtype=torch.float64, device=self._device)
        return put(self._draws[row].uniforms(purpose, round_number, num), self._device)

    def branch_uniforms(self, rows: Sequence[int], num_own: Sequence[int], num_steps: int, round_number: int) -> Tensor:
        """(rows, B, num_steps) on the host, those of a row's own branches the same however many stand beside them."""
        uniforms = torch.zeros(len(rows), max(num_own), num_steps, dtype=torch.float64, device=CPU)
        for place, (row, num) in enumerate(zip(rows, num_own, strict=True)):
            if self._sampling[row].temperature > 0:
                drawn = self._draws[row].uniforms(Purpose.BRANCH, round_number, num * num_steps)
                uniforms[place, :num] = drawn.view(num, num_steps)
        return uniforms

    def filler(self, row: int, round_number: int, num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` tokens drawn uniformly from the vocabulary, at any temperature."""
        uniforms = self._draws[row].uniforms(Purpose.FILLER, round_number, num_tokens)
        return tuple(uniform_tokens(uniforms, self._vocab_size).tolist())

    def penalised(self, row: int, logits: Tensor, text: Sequence[int]) -> Tensor:
        """Logits after the last tokens of a row's text."""
        return penalised(logits, self._sampling[row].repetition_penalty, text)

    def penalise(self, rows: Sequence[int], logits: Tensor, seen: Tensor) -> Tensor:
        """(rows, ..., V) logits; `seen` tells of the same tokens whether they stand in the text before."""
        penalties = put([self._sampling[row].repetition_penalty for row in rows], self._device, torch.float64)
        return penalise(logits, penalties.view(-1, *(1 for _ in logits.shape[1:])), seen)

    def penalises(self, rows: Iterable[int]) -> bool:
        """Whether any of the rows penalises repetition."""
        return any(self._sampling[row].repetition_penalty != 1 for row in rows)

    def sample(
        self, rows: Sequence[int], logits: Tensor, uniforms: Tensor, drafting: Drafting, draft_index: int
    ) -> tuple[Tensor, Laws]:
        """(rows, ..., V) logits, (rows, ...) uniform numbers -> (rows, ...) tokens, each row's (..., V) laws.

        The tokens are those of draft index `draft_index` in a round that drafts as `drafting` says. Rows of the same
        settings are processed together.
        """
        if self._are_alike:
            tokens, probs = _sample_alike(logits, uniforms, self._sampling[0], drafting, draft_index)
            return tokens, [None] * len(rows) if probs is None else list(probs.unbind())
        alike: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault(self._sampling[row], []).append(place)
        tokens = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        laws: Laws = [None] * len(rows)
        for sampling, places in alike.items():
            at = put(places, logits.device)
            tokens[at], probs = _sample_alike(logits[at], uniforms[at], sampling, drafting, draft_index)
            for place, law in zip(places, [None] * len(places) if probs is None else probs, strict=True):
                laws[place] = law
        return tokens, laws


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
