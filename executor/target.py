"""What the target model does: the prefill, and verification."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.draws import Draws, Purpose
from executor.language_model import LanguageModel
from executor.recorder import Recorder
from executor.sampling import draw, process, stated_probs, verify, verify_greedy
from executor.speculation_cache import Speculation
from sim.trace import Operation, Outcome


class Target:
    """The target model on one sequence. Its KV cache holds the committed tokens but the last, which is `pending`."""

    def __init__(self, model: LanguageModel, recorder: Recorder) -> None:
        self.model = model
        self.recorder = recorder
        self.num_bad_draft_rows = 0  # draft distributions that were not finite, in all verifications so far

    def prefill(self, prompt: tuple[int, ...], temperature: float, draws: Draws) -> Outcome:
        """Feed the prompt; the outcome's bonus token is the first token of the text."""
        self._temperature = temperature
        self._draws = draws
        self.model.roll_back(0)
        with self.recorder.span(Operation.PREFILL, num_tokens=len(prompt), context=0):
            logits = self.model.append(prompt, num_logits=1)
            return self._emit(Outcome(*self._sample(logits)))

    def verify(self, speculation: Speculation) -> Outcome:
        """One pass over the pending token and the speculation, acceptance, roll-back to what was accepted.

        Raises FloatingPointError, naming sequence and position, if the target's logits define no distribution.
        """
        drafted = speculation.tokens
        context = self.model.length
        with self.recorder.span(Operation.VERIFY, num_tokens=len(drafted) + 1, context=context):
            logits = self.model.append((self.pending, *drafted))
            outcome = self._emit(Outcome(*self._sample(logits, speculation)))
            self.model.roll_back(context + 1 + outcome.num_accepted)
            return outcome

    def _emit(self, outcome: Outcome) -> Outcome:
        self.pending = outcome.bonus_token
        return outcome

    def _sample(self, logits: Tensor, speculation: Speculation | None = None) -> tuple[int, int]:
        """(n+1, V) logits -> number of accepted draft tokens and bonus token."""
        drafted = speculation.tokens if speculation else ()
        if self._temperature == 0:
            largest, tokens = logits.max(-1)
            self._require_finite(largest)
            return verify_greedy(tokens.tolist(), drafted)
        target_probs = process(logits, self._temperature)
        self._require_finite(target_probs[:, 0])
        if not drafted:
            return 0, int(draw(target_probs[0], self._uniforms(Purpose.BONUS)[0]))
        assert speculation is not None
        draft_tokens, draft_probs = torch.tensor(drafted), speculation.draft_probs
        if draft_probs is None:
            draft_probs = stated_probs(speculation.proposer, draft_tokens, self.model.vocab_size)
        self.num_bad_draft_rows += int(draft_probs[:, 0].isnan().sum())
        num_accepted, bonus_token = verify(
            target_probs,
            draft_tokens,
            draft_probs,
            accept_uniforms=self._uniforms(Purpose.ACCEPT, len(drafted)),
            residual_uniform=self._uniforms(Purpose.RESIDUAL)[0],
            bonus_uniform=self._uniforms(Purpose.BONUS)[0],
        )
        return int(num_accepted), int(bonus_token)

    def _uniforms(self, purpose: Purpose, num: int = 1) -> Tensor:
        return self._draws.uniforms(purpose, self.recorder.round, num)

    def _require_finite(self, rows: Tensor) -> None:
        finite = rows.isfinite()
        if not finite.all():
            position = self.model.length - len(rows) + int(finite.long().argmin()) + 1
            where = f"sequence {self.recorder.sequence}, position {position}"
            raise FloatingPointError(f"{where}: the target's logits are not finite")
