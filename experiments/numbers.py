"""A system from a handful of numbers in a YAML file, for those who cannot profile; says what it had to assume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from experiments.config import Count, SearchConfig
from experiments.strict_yaml import Section, read_yaml, validate
from sim.errors import BadInput
from sim.latency import LatencyModel, OperationLatency
from sim.parametric import HitCurve, ParametricAgreement, conditional_from_cumulative
from sim.system import HostTerm, System
from sim.trace import Lane, Operation
from sim.workload import Workload

Milliseconds = Annotated[float, Field(ge=0)]
PositiveMilliseconds = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class TextConfig(Section):
    """How long a text is. Context does not change the times here; the prompt's length is for the record only."""

    prompt_tokens: Count = 128
    new_tokens: Annotated[int, Field(ge=2)] = 512
    temperature: Annotated[float, Field(ge=0)] = 0.0


class AcceptanceConfig(Section):
    """Acceptance by draft position; the last entry stands for all that follow.

    `conditional`: of the tokens tested at a position, the share accepted. `cumulative`: of all rounds, the share that
    accepts this position and everything before it.
    """

    conditional: tuple[Probability, ...] | None = None
    cumulative: tuple[Probability, ...] | None = None


class CurveConfig(Section):
    """Hit rate 1 - prefactor * F^-exponent for a fan-out F."""

    prefactor: Annotated[float, Field(ge=0)]
    exponent: Annotated[float, Field(ge=0)]

    def curve(self) -> HitCurve:
        return HitCurve(self.prefactor, self.exponent)


# In the middle of the curves measured for four draft models at temperatures 0 to 1 in arXiv 2603.03251, figures 3, 10.
ASSUMED_AFTER_HIT = CurveConfig(prefactor=0.4, exponent=0.5)
ASSUMED_AFTER_MISS = CurveConfig(prefactor=0.7, exponent=0.5)


class HitConfig(Section):
    """Hit curves by the source of the round; the defaults are assumptions, not measurements."""

    after_hit: CurveConfig = ASSUMED_AFTER_HIT
    after_miss: CurveConfig = ASSUMED_AFTER_MISS


class TimesConfig(Section):
    """Milliseconds. A list over the number of tokens verified (1, 2, ..., K + 1), or one number for any of them."""

    verify_ms: PositiveMilliseconds | tuple[PositiveMilliseconds, ...]
    draft_step_ms: Milliseconds
    glue_ms: Milliseconds = 0.0
    tree_step_ms: Milliseconds | None = None
    service_ms: Milliseconds = 0.0
    host_ms: Milliseconds = 0.0


class NumbersConfig(Section):
    """`service_ms` is the draft's fixed time per build, `host_ms` the time per round that nothing else explains,
    `tree_step_ms` a step of all branches at once (a draft step, if not given)."""

    schema_number: Literal[1] = Field(alias="schema")
    name: str
    text: TextConfig = TextConfig()
    acceptance: AcceptanceConfig
    hits: HitConfig | None = None
    times: TimesConfig
    search: SearchConfig


@dataclass(frozen=True)
class Numbers:
    """The system and workload that a file describes, the policies to choose from, and what had to be assumed."""

    system: System
    workload: Workload
    search: SearchConfig
    assumptions: tuple[str, ...]


def read_numbers(path: Path) -> Numbers:
    """Read a file of summary numbers. Raises `BadInput` naming file, line and key."""
    document = read_yaml(path)
    config = validate(NumbersConfig, document)
    given, text = config.acceptance, config.text
    if (given.conditional is None) == (given.cumulative is None):
        raise BadInput(document.place(("acceptance",)), "must hold either conditional or cumulative")
    try:
        acceptance = given.conditional or conditional_from_cumulative(given.cumulative or ())
        hits = config.hits or HitConfig()
        agreement = ParametricAgreement(
            prompt_tokens=text.prompt_tokens,
            new_tokens=text.new_tokens,
            acceptance=acceptance,
            after_hit=(hits.after_hit.curve(),),
            after_miss=(hits.after_miss.curve(),),
            sampling_temperature=text.temperature,
        )
    except BadInput as error:
        raise BadInput(document.place(("acceptance",)), str(error)) from None
    longest = max(config.search.speculation_lengths)
    if isinstance(config.times.verify_ms, tuple) and len(config.times.verify_ms) <= longest:
        rule = f"must have {longest + 1} entries, for 1 to {longest + 1} tokens"
        raise BadInput(document.place(("times", "verify_ms")), rule, len(config.times.verify_ms))
    system = System(
        latency=_latency(config.times, longest, max(config.search.budgets)),
        contention=dict.fromkeys(Lane, 1.0),
        host_s=dict.fromkeys(HostTerm, config.times.host_ms / 1e3),
        agreement=agreement,
        identity={"source": path.name},
    )
    workload = Workload("parametric", ((0,) * text.prompt_tokens,), text.new_tokens, text.temperature)
    return Numbers(system, workload, config.search, _assumptions(config))


def _latency(times: TimesConfig, longest: int, widest: int) -> LatencyModel:
    verify_ms = times.verify_ms if isinstance(times.verify_ms, tuple) else (times.verify_ms,) * (longest + 1)
    tree_step_ms = times.draft_step_ms if times.tree_step_ms is None else times.tree_step_ms
    by_width = {
        (Lane.TARGET, Operation.VERIFY): dict(enumerate(verify_ms, start=1)),
        (Lane.DRAFT, Operation.DRAFT_STEP): {1: times.draft_step_ms, 2: times.draft_step_ms},
        (Lane.DRAFT, Operation.GLUE): dict.fromkeys((1, longest + 1), times.service_ms + times.glue_ms),
        (Lane.DRAFT, Operation.TREE_STEP): dict.fromkeys((1, widest), tree_step_ms),
    }
    any_context = (0, 2**31)
    return LatencyModel(
        {
            key: OperationLatency(
                key[1], {width: tuple((c, ms / 1e3) for c in any_context) for width, ms in row.items()}, (1.0,)
            )
            for key, row in by_width.items()
        }
    )


def _assumptions(config: NumbersConfig) -> tuple[str, ...]:
    assumptions = ["every round is like every other, times do not vary, and draft and target do not slow each other"]
    if config.hits is None:
        after_hit, after_miss = ASSUMED_AFTER_HIT, ASSUMED_AFTER_MISS
        assumptions.append(
            f"no hit curve given: hit rate 1 - {after_hit.prefactor} F^-{after_hit.exponent} after a hit and"
            f" 1 - {after_miss.prefactor} F^-{after_miss.exponent} after a miss, typical of published ones"
        )
    if config.times.tree_step_ms is None:
        assumptions.append("a step of all branches at once takes as long as a draft step")
    if not isinstance(config.times.verify_ms, tuple):
        assumptions.append("verifying K + 1 tokens takes as long as one autoregressive step, whatever K")
    return tuple(assumptions)
