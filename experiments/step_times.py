"""How long the steps of a pair take, from as many numbers as decide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from experiments.config import Count
from experiments.strict_yaml import Section
from sim.errors import BadInput

Milliseconds = Annotated[float, Field(ge=0)]
PositiveMilliseconds = Annotated[float, Field(gt=0)]
Ratio = Annotated[float, Field(gt=0)]
VERIFY_RATIO = (1.0, 1.5)  # plausible cost of verifying K + 1 tokens, in autoregressive steps
TREE_STEP_RATIO = (1.0, 1.5)  # of a step of all branches, in draft steps
GLUE_RATIO = 2.0  # of the glue pass, in draft steps, at most


class TimesConfig(Section):
    """Milliseconds of a step of all rows of a batch.

    `ar_ms` is an autoregressive step of the target; without it, verifying one token takes as long as more of them.
    `verify_ms` is a list over the number of tokens verified (1, 2, ..., all rows together), or one number for up to
    `verify_free_tokens` of them, to which each further token adds `verify_ms_per_token`. Likewise for every operation
    of the draft. `verify_over_ar` and `draft_over_ar` say the same in autoregressive steps. `sd_round_ms` is a whole
    round of speculative decoding with `sd_speculation_length` draft tokens: it stands for the draft step, which is what
    the verification leaves of it, or with both ratios for the autoregressive step.

    `service_ms` is the draft's fixed time per build, `tree_step_ms` a step of all branches at once (if not given, a
    draft step times `tree_step_over_draft`), `host_ms` the time per round that nothing else explains, `prefill_ms` what
    the prompt takes on the target, which only serving asks for (the draft's is taken to be done by then).
    """

    ar_ms: PositiveMilliseconds | None = None
    verify_ms: PositiveMilliseconds | tuple[PositiveMilliseconds, ...] | None = None
    verify_over_ar: Ratio | None = None
    verify_ms_per_token: Milliseconds = 0.0
    verify_free_tokens: Count = 1
    draft_step_ms: Milliseconds | None = None
    draft_over_ar: Annotated[float, Field(ge=0)] | None = None
    sd_round_ms: PositiveMilliseconds | None = None
    sd_speculation_length: Count | None = None
    glue_ms: Milliseconds = 0.0
    tree_step_ms: Milliseconds | None = None
    tree_step_over_draft: Ratio = 1.0
    draft_ms_per_token: Milliseconds = 0.0
    draft_free_tokens: Count = 1
    service_ms: Milliseconds = 0.0
    prefill_ms: Milliseconds | None = None
    host_ms: Milliseconds = 0.0

    def resolved(self, longest: int, batch_size: int) -> StepTimes:
        """Every step at speculation lengths up to `longest`. Raises `BadInput` if too few or too many numbers are
        given, or if they contradict each other."""
        self._check_verification(longest, batch_size)
        ar_ms, verify_ms, draft_ms = self._steps()
        return StepTimes(self, ar_ms, verify_ms, draft_ms)

    @property
    def is_flat(self) -> bool:
        """Whether one token takes as long to verify as more of them."""
        told = (self.ar_ms, self.verify_over_ar, self.verify_ms_per_token or None)
        return not isinstance(self.verify_ms, tuple) and all(number is None for number in told)

    def assumed_ranges(self) -> list[tuple[str, float, float, float, str]]:
        """Key, value, lower and upper end, reason of what stands for numbers that are not given."""
        _, verify_ms, draft_ms = self._steps()
        assumed = []
        if self.is_flat:
            assert isinstance(verify_ms, float)
            because = "no autoregressive step given; verifying K + 1 tokens takes 1 to 1.5 of them"
            assumed.append(("times.ar_ms", verify_ms, verify_ms / VERIFY_RATIO[1], verify_ms, because))
        if self.tree_step_ms is None:
            because = "no time of a step of all branches at once"
            assumed.append(("times.tree_step_over_draft", self.tree_step_over_draft, *TREE_STEP_RATIO, because))
        if not (self.glue_ms or self.service_ms) and draft_ms:
            because = "no time of what begins a build"
            assumed.append(("times.glue_ms", 0.0, 0.0, GLUE_RATIO * draft_ms, because))
        return assumed

    def _check_verification(self, longest: int, batch_size: int) -> None:
        if not isinstance(self.verify_ms, tuple):
            return
        most = batch_size * (longest + 1)
        if len(self.verify_ms) < most:
            raise BadInput("times.verify_ms", f"must have {most} entries, for 1 to {most} tokens", len(self.verify_ms))
        if self.verify_ms_per_token:
            rule = "must be 0 where verify_ms lists every number of tokens"
            raise BadInput("times.verify_ms_per_token", rule, self.verify_ms_per_token)
        for name in ("ar_ms", "verify_over_ar", "sd_round_ms"):
            if getattr(self, name) is not None:
                raise BadInput(f"times.{name}", "must be left out where verify_ms lists every number of tokens")

    def _steps(self) -> tuple[float | None, float | tuple[float, ...], float]:
        """Milliseconds of an autoregressive step (None: that of a verification), a verification and a draft step."""
        self._check_counts()
        ar_ms = self._ar_ms()
        verify_ms = self.verify_ms
        if self.verify_over_ar is not None:
            assert ar_ms is not None
            verify_ms = self.verify_over_ar * ar_ms
        assert verify_ms is not None
        if self.draft_step_ms is not None:
            return ar_ms, verify_ms, self.draft_step_ms
        if self.draft_over_ar is not None:
            assert ar_ms is not None
            return ar_ms, verify_ms, self.draft_over_ar * ar_ms
        assert isinstance(verify_ms, float)
        return ar_ms, verify_ms, self._draft_ms_of_round(verify_ms)

    def _ar_ms(self) -> float | None:
        if self.ar_ms is not None or self.sd_round_ms is None or self.verify_over_ar is None:
            return self.ar_ms
        assert self.draft_over_ar is not None and self.sd_speculation_length is not None
        return self._drafting_and_verification_ms(self.sd_round_ms) / (
            self.verify_over_ar + self.sd_speculation_length * self.draft_over_ar
        )

    def _draft_ms_of_round(self, verify_ms: float) -> float:
        assert self.sd_round_ms is not None and self.sd_speculation_length is not None
        drafting_ms = self._drafting_and_verification_ms(self.sd_round_ms) - verify_ms
        if drafting_ms < 0:
            rule = f"must be longer than its verification, which takes {verify_ms:g} ms, and the host's time"
            raise BadInput("times.sd_round_ms", rule, self.sd_round_ms)
        return drafting_ms / self.sd_speculation_length

    def _drafting_and_verification_ms(self, round_ms: float) -> float:
        if round_ms <= self.host_ms:
            raise BadInput("times.sd_round_ms", f"must be above times.host_ms = {self.host_ms:g}", round_ms)
        return round_ms - self.host_ms

    def _check_counts(self) -> None:
        """Raises `BadInput` unless the numbers given decide all of autoregressive step, verification and draft step."""
        if (self.verify_ms is None) == (self.verify_over_ar is None):
            raise BadInput("times", "must hold either verify_ms or verify_over_ar")
        if self.draft_step_ms is not None and self.draft_over_ar is not None:
            raise BadInput("times", "must hold draft_step_ms or draft_over_ar, not both")
        has_draft = self.draft_step_ms is not None or self.draft_over_ar is not None
        if self.sd_round_ms is None:
            self._check_without_round(has_draft)
        else:
            self._check_with_round(has_draft)

    def _check_without_round(self, has_draft: bool) -> None:
        if self.sd_speculation_length is not None:
            raise BadInput("times.sd_speculation_length", "goes with sd_round_ms")
        if not has_draft:
            raise BadInput("times.draft_step_ms", "this key is missing; draft_over_ar or sd_round_ms may stand for it")
        if self.ar_ms is None and (self.verify_over_ar is not None or self.draft_over_ar is not None):
            raise BadInput("times.ar_ms", "must be given with verify_over_ar or draft_over_ar")

    def _check_with_round(self, has_draft: bool) -> None:
        if self.sd_speculation_length is None:
            raise BadInput("times.sd_speculation_length", "must be given with sd_round_ms")
        if self.verify_ms_per_token or self.draft_ms_per_token:
            raise BadInput("times.sd_round_ms", "goes with verification and draft steps whose width costs nothing")
        is_ar_open = self.ar_ms is None and self.verify_over_ar is not None
        if is_ar_open != (self.draft_over_ar is not None) or (has_draft and not is_ar_open):
            rule = "must decide one step: the draft's, or with verify_over_ar and draft_over_ar the autoregressive one"
            raise BadInput("times.sd_round_ms", rule, self.sd_round_ms)


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of every step by the number of rows and of tokens of each."""

    given: TimesConfig
    ar_ms: float | None
    flat_verify_ms: float | tuple[float, ...]
    flat_draft_ms: float

    @property
    def prefill_ms(self) -> float | None:
        return self.given.prefill_ms

    def verify_ms(self, num_rows: int, width: int) -> float:
        if width == 1 and self.ar_ms is not None:
            return self.ar_ms
        num_tokens = num_rows * width
        if isinstance(self.flat_verify_ms, tuple):
            return self.flat_verify_ms[num_tokens - 1]
        beyond = max(0, num_tokens - self.given.verify_free_tokens)
        return self.flat_verify_ms + self.given.verify_ms_per_token * beyond

    def draft_step_ms(self, num_rows: int, width: int) -> float:
        return self._draft_ms(self.flat_draft_ms, num_rows * width)

    def glue_ms(self, num_rows: int, width: int) -> float:
        return self._draft_ms(self.given.service_ms + self.given.glue_ms, num_rows * width)

    def tree_step_ms(self, num_rows: int, width: int) -> float:
        given = self.given
        step_ms = self.flat_draft_ms * given.tree_step_over_draft if given.tree_step_ms is None else given.tree_step_ms
        return self._draft_ms(step_ms, num_rows * width)

    def _draft_ms(self, base_ms: float, num_tokens: int) -> float:
        return base_ms + self.given.draft_ms_per_token * max(0, num_tokens - self.given.draft_free_tokens)
