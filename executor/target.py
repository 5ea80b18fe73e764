"""What the target model does: the prefill, and verification."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from executor.draws import Purpose
from executor.language_model import LanguageModel
from executor.recorder import Recorder
from executor.sampling import draw, penalised, process, stated_probs, verify, verify_greedy
from executor.sequence import Request
from executor.speculation_cache import Speculation
from sim.trace import Operation, Outcome, Source

NOTHING_DRAFTED = Speculation(Source.SYNCHRONOUS)


class Target:
    """The target model on the rows of a batch. Its KV cache holds each row's committed tokens but the last, which is
    `pending`."""

    def __init__(self, model: LanguageModel, recorder: Recorder) -> None:
        self.model = model
        self.recorder = recorder
        self.num_bad_draft_rows = 0  # draft distributions that were not finite, in all verifications so far
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
            return {row: self._emit(row, logits[row], NOTHING_DRAFTED) for row in rows}

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
            outcomes = {}
            logits = self.model.feed(rows, fed, widths)
            for row, context, own_logits in zip(rows, contexts, logits, strict=True):
                outcomes[row] = self._emit(row, own_logits, speculations[row])
                self.model.roll_back(context + 1 + outcomes[row].num_accepted, row)
            return outcomes

    def contexts(self, rows: Iterable[int]) -> list[int]:
        """KV entries of each row."""
        return [self.model.length_of(row) for row in rows]

    def keep(self, rows: Sequence[int]) -> None:
        """The other rows have ended."""
        self.model.keep(rows)
        self.recorder.at_work(rows[0])

    def _emit(self, row: int, logits: Tensor, speculation: Speculation) -> Outcome:
        """(n+1, V) logits of a row, as the model gives them -> what it emits."""
        request = self._requests[row]
        own_logits = penalised(logits, request.sampling.repetition_penalty, self.model.texts[row])
        num_accepted, bonus_token = self._sample(row, own_logits, speculation)
        if request.log_probs:
            emitted = torch.tensor([*speculation.tokens[:num_accepted], bonus_token])
            log_probs = logits[: len(emitted)].double().log_softmax(-1)
            self.log_probs[row] += log_probs.gather(-1, emitted[:, None])[:, 0].tolist()
        self.pending[row] = bonus_token
        return Outcome(num_accepted, bonus_token)

    def _sample(self, row: int, logits: Tensor, speculation: Speculation) -> tuple[int, int]:
        """(n+1, V) logits of a row -> number of accepted draft tokens and bonus token."""
        drafted, sampling = speculation.tokens, self._requests[row].sampling
        if sampling.temperature == 0:
            largest, tokens = logits.max(-1)
            self._require_finite(row, largest)
            return verify_greedy(tokens.tolist(), drafted)
        target_probs = process(logits, sampling)
        self._require_finite(row, target_probs[:, 0])
        if not drafted:
            return 0, int(draw(target_probs[0], self._uniforms(row, Purpose.BONUS)[0]))
        draft_tokens, draft_probs = torch.tensor(drafted), speculation.draft_probs
        if draft_probs is None:
            draft_probs = stated_probs(speculation.proposer, draft_tokens, self.model.vocab_size)
        self.num_bad_draft_rows += int(draft_probs[:, 0].isnan().sum())
        num_accepted, bonus_token = verify(
            target_probs,
            draft_tokens,
            draft_probs,
            accept_uniforms=self._uniforms(row, Purpose.ACCEPT, len(drafted)),
            residual_uniform=self._uniforms(row, Purpose.RESIDUAL)[0],
            bonus_uniform=self._uniforms(row, Purpose.BONUS)[0],
        )
        return int(num_accepted), int(bonus_token)

    def _uniforms(self, row: int, purpose: Purpose, num: int = 1) -> Tensor:
        return self._draws[row].uniforms(purpose, self.recorder.round, num)

    def _require_finite(self, row: int, values: Tensor) -> None:
        finite = [math.isfinite(value) for value in values.tolist()]
        if not all(finite):
            position = self.model.length_of(row) - len(finite) + finite.index(False) + 1
            where = f"sequence {self.recorder.sequences[row]}, position {position}"
            raise FloatingPointError(f"{where}: the target's logits are not finite")
