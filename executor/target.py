"""What the target model does: the prefill, and verification."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from executor.device import put
from executor.draws import Purpose
from executor.language_model import LanguageModel
from executor.recorder import Recorder
from executor.sampling import draw, penalised, process, stated_probs, verify, verify_greedy
from executor.sequence import Request
from executor.speculation_cache import NO_SPECULATION, Speculation
from sim.trace import Operation, Outcome


class Target:
    """The target model on the rows of a batch. Its KV cache holds each row's committed tokens but the last, which is
    `pending`."""

    def __init__(self, model: LanguageModel, recorder: Recorder) -> None:
        self.model = model
        self.recorder = recorder
        self.num_bad_draft_rows = 0  # distributions of drafts that were not finite, so far; greedy rows have none
        self.log_probs: list[list[float]] = []  # by row, of the tokens it was given, where its request asks for them

    def prefill(self, requests: Sequence[Request]) -> dict[int, Outcome]:
        """Feed the prompts; each outcome's bonus token is the first token of a text."""
        rows = range(len(requests))
        prompts = [request.prompt for request in requests]
        self._requests = requests
        self._draws = [request.draws() for request in requests]
        self.log_probs = [[] for _ in requests]
        self.pending = [0] * len(requests)
        self.model.begin(len(requests))
        with self.recorder.span(Operation.PREFILL, sum(map(len, prompts)), contexts=[0] * len(prompts)):
            logits = self.model.feed(rows, prompts, num_logits=[1] * len(prompts))
            return self._emit(dict.fromkeys(rows, NO_SPECULATION), logits)

    def verify(self, speculations: Mapping[int, Speculation]) -> dict[int, Outcome]:
        """One pass over the pending tokens and the speculations of all rows still open, acceptance, roll-back to what
        was accepted.

        Raises FloatingPointError, naming sequence and position, if the target's logits define no distribution.
        """
        rows = list(speculations)
        contexts = self.contexts(rows)
        fed = [(self.pending[row], *speculations[row].tokens) for row in rows]
        widths = [len(tokens) for tokens in fed]
        with self.recorder.span(Operation.VERIFY, sum(widths), contexts):
            outcomes = self._emit(speculations, self.model.feed(rows, fed, widths))
            for row, context in zip(rows, contexts, strict=True):
                self.model.roll_back(context + 1 + outcomes[row].num_accepted, row)
            return outcomes

    def contexts(self, rows: Iterable[int]) -> list[int]:
        """KV entries of each row."""
        return [self.model.length_of(row) for row in rows]

    def keep(self, rows: Sequence[int]) -> None:
        """The other rows have ended."""
        self.model.keep(rows)
        self.recorder.at_work(rows[0])

    def _emit(self, speculations: Mapping[int, Speculation], logits: Sequence[Tensor]) -> dict[int, Outcome]:
        """(n+1, V) logits of each row, as the model gives them -> what it emits. The device is waited for once."""
        judged = [
            self._judge(row, self._penalised(row, own), speculation)
            for (row, speculation), own in zip(speculations.items(), logits, strict=True)
        ]
        outcomes = {}
        for (row, speculation), own, numbers in zip(speculations.items(), logits, _read(judged), strict=True):
            outcomes[row] = outcome = self._outcome(row, speculation, numbers)
            if self._requests[row].log_probs:
                self.log_probs[row] += _log_probs(
                    own, (*speculation.tokens[: outcome.num_accepted], outcome.bonus_token)
                )
            self.pending[row] = outcome.bonus_token
        return outcomes

    def _penalised(self, row: int, logits: Tensor) -> Tensor:
        return penalised(logits, self._requests[row].sampling.repetition_penalty, self.model.texts[row])

    def _judge(self, row: int, logits: Tensor, speculation: Speculation) -> Tensor:
        """(n+1, V) penalised logits of a row -> float64 numbers on the device, which `_outcome` understands: what the
        outcome is, then one of each of the n+1 rows that is finite if the row is."""
        sampling, drafted = self._requests[row].sampling, speculation.tokens
        if sampling.temperature == 0:
            largest, tokens = logits.max(-1)
            return torch.cat((tokens.double(), largest.double()))
        target_probs = process(logits, sampling)
        first_probs = target_probs[:, 0]
        if not drafted:
            bonus_token = draw(target_probs, self._uniforms(row, Purpose.BONUS))
            nothing = torch.zeros_like(first_probs)
            return torch.cat((nothing, bonus_token.double(), nothing, first_probs))
        draft_tokens = put(drafted, self.model.device)
        if speculation.draft_probs is None:
            draft_probs = stated_probs(speculation.proposer, draft_tokens, self.model.vocab_size)
        else:
            draft_probs = put(speculation.draft_probs, self.model.device)
        num_accepted, bonus_token = verify(
            target_probs,
            draft_tokens,
            draft_probs,
            accept_uniforms=self._uniforms(row, Purpose.ACCEPT, len(drafted)),
            residual_uniform=self._uniforms(row, Purpose.RESIDUAL)[0],
            bonus_uniform=self._uniforms(row, Purpose.BONUS)[0],
        )
        num_bad = draft_probs[:, 0].isnan().sum()
        return torch.cat((torch.stack((num_accepted, bonus_token, num_bad)).double(), first_probs))

    def _outcome(self, row: int, speculation: Speculation, numbers: list[float]) -> Outcome:
        """What `_judge` found."""
        num_rows = len(speculation.tokens) + 1
        self._require_finite(row, numbers[-num_rows:])
        if self._requests[row].sampling.temperature == 0:
            return Outcome(*verify_greedy([int(token) for token in numbers[:num_rows]], speculation.tokens))
        num_accepted, bonus_token, num_bad = (int(number) for number in numbers[:3])
        self.num_bad_draft_rows += num_bad
        return Outcome(num_accepted, bonus_token)

    def _uniforms(self, row: int, purpose: Purpose, num: int = 1) -> Tensor:
        return put(self._draws[row].uniforms(purpose, self.recorder.round, num), self.model.device)

    def _require_finite(self, row: int, numbers: Sequence[float]) -> None:
        finite = [math.isfinite(number) for number in numbers]
        if not all(finite):
            position = self.model.length_of(row) - len(finite) + finite.index(False) + 1
            where = f"sequence {self.recorder.sequences[row]}, position {position}"
            raise FloatingPointError(f"{where}: the target's logits are not finite")


def _read(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Numbers of a device, all at once."""
    if len(tensors) == 1:
        return [tensors[0].tolist()]
    numbers = iter(torch.cat(list(tensors)).tolist())
    return [list(islice(numbers, len(tensor))) for tensor in tensors]


def _log_probs(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """(n+1, V) logits, at most n+1 tokens -> the log-probability of each at temperature 1."""
    log_probs = logits[: len(tokens)].double().log_softmax(-1)
    return log_probs.gather(-1, put(tokens, logits.device)[:, None])[:, 0].tolist()
