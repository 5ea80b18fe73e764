"""A system from a handful of numbers in a YAML file, for those who cannot profile; says what it had to assume."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from experiments.config import Count, SearchConfig
from experiments.strict_yaml import Section, read_yaml, validate
from sim.errors import BadInput
from sim.latency import Knots, LatencyModel, OperationLatency
from sim.memory import Memory
from sim.parametric import HitCurve, ParametricAgreement, conditional_from_cumulative
from sim.placement import Placement, Split
from sim.system import HostTerm, System
from sim.trace import Lane, Operation
from sim.workload import Workload

ANY_CONTEXT = (0, 2**31)
ANY_WIDTH = (1, 2**31)
Milliseconds = Annotated[float, Field(ge=0)]
PositiveMilliseconds = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class TextConfig(Section):
    """How long a text is, and how many are decoded together. Context does not change the times here; the prompt's
    length counts for memory only."""

    prompt_tokens: Count = 128
    new_tokens: Annotated[int, Field(ge=2)] = 512
    temperature: Annotated[float, Field(ge=0)] = 0.0
    batch_size: Count = 1


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
    """Milliseconds. `verify_ms` is a list over the number of tokens verified (1, 2, ..., all rows together), or one
    number for up to `verify_free_tokens` of them, to which each further token adds `verify_ms_per_token`. Likewise for
    every operation of the draft. `service_ms` is the draft's fixed time per build, `tree_step_ms` a step of all
    branches at once (a draft step, if not given), `host_ms` the time per round that nothing else explains, `prefill_ms`
    what the prompt takes on the target, which only serving asks for (the draft's is taken to be done by then)."""

    verify_ms: PositiveMilliseconds | tuple[PositiveMilliseconds, ...]
    verify_ms_per_token: Milliseconds = 0.0
    verify_free_tokens: Count = 1
    draft_step_ms: Milliseconds
    glue_ms: Milliseconds = 0.0
    tree_step_ms: Milliseconds | None = None
    draft_ms_per_token: Milliseconds = 0.0
    draft_free_tokens: Count = 1
    service_ms: Milliseconds = 0.0
    prefill_ms: Milliseconds | None = None
    host_ms: Milliseconds = 0.0


class DevicesConfig(Section):
    """Where the draft runs. `slowdown_of_*`: how much slower a role runs while the other works, 1 on devices of their
    own; `overlap: false` lets the draft build before the verification instead of beside it. A message between the roles
    takes `transfer_latency_ms` and its bytes (with the draft distributions where the temperature is above 0) over
    `transfer_gb_per_s`."""

    num_draft_devices: Count = 1
    split: Split = Split.BRANCHES
    num_targets: Count = 1
    overlap: bool = True
    slowdown_of_target: Annotated[float, Field(ge=1)] = 1.0
    slowdown_of_draft: Annotated[float, Field(ge=1)] = 1.0
    transfer_latency_ms: Milliseconds = 0.0
    transfer_gb_per_s: Annotated[float, Field(gt=0)] | None = None

    def placement(self, vocabulary: VocabularyConfig) -> Placement:
        return Placement(
            num_draft_devices=self.num_draft_devices,
            split=self.split,
            num_targets=self.num_targets,
            transfer_latency_s=self.transfer_latency_ms / 1e3,
            transfer_bytes_per_s=math.inf if self.transfer_gb_per_s is None else self.transfer_gb_per_s * 1e9,
            distribution_bytes=vocabulary.num_tokens * vocabulary.bytes_per_probability,
        )


class VocabularyConfig(Section):
    """What a draft distribution weighs; 0 tokens: nothing."""

    num_tokens: Annotated[int, Field(ge=0)] = 0
    bytes_per_probability: Count = 4


class MemoryConfig(Section):
    """Room beside the weights, and the KV of a token; what is not given limits nothing."""

    target_gb: Annotated[float, Field(gt=0)] | None = None
    draft_gb: Annotated[float, Field(gt=0)] | None = None
    target_kv_kb_per_token: Annotated[float, Field(ge=0)] = 0.0
    draft_kv_kb_per_token: Annotated[float, Field(ge=0)] = 0.0

    def memory(self) -> Memory:
        target_bytes, draft_bytes = (math.inf if gb is None else gb * 1e9 for gb in (self.target_gb, self.draft_gb))
        return Memory(target_bytes, draft_bytes, self.target_kv_kb_per_token * 1e3, self.draft_kv_kb_per_token * 1e3)


class NumbersConfig(Section):
    """What is known of a pair and its devices, and the policies to choose from."""

    schema_number: Literal[1] = Field(alias="schema")
    name: str
    text: TextConfig = TextConfig()
    acceptance: AcceptanceConfig
    hits: HitConfig | None = None
    times: TimesConfig
    devices: DevicesConfig = DevicesConfig()
    vocabulary: VocabularyConfig = VocabularyConfig()
    memory: MemoryConfig = MemoryConfig()
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
            num_texts=text.batch_size,
        )
    except BadInput as error:
        raise BadInput(document.place(("acceptance",)), str(error)) from None
    longest = max(config.search.speculation_lengths)
    if isinstance(config.times.verify_ms, tuple):
        most = text.batch_size * (longest + 1)
        if len(config.times.verify_ms) < most:
            rule = f"must have {most} entries, for 1 to {most} tokens"
            raise BadInput(document.place(("times", "verify_ms")), rule, len(config.times.verify_ms))
        if config.times.verify_ms_per_token:
            rule = "must be 0 where verify_ms lists every number of tokens"
            raise BadInput(document.place(("times", "verify_ms_per_token")), rule, config.times.verify_ms_per_token)
    devices = config.devices
    system = System(
        latency=_latency(config.times, longest, max(config.search.budgets), text.prompt_tokens, text.batch_size),
        contention={Lane.TARGET: devices.slowdown_of_target, Lane.DRAFT: devices.slowdown_of_draft},
        host_s=dict.fromkeys(HostTerm, config.times.host_ms / 1e3),
        agreement=agreement,
        identity={"source": path.name},
        overlaps=devices.overlap,
        placement=devices.placement(config.vocabulary),
        memory=config.memory.memory(),
    )
    prompts = ((0,) * text.prompt_tokens,) * text.batch_size
    workload = Workload("parametric", prompts, text.new_tokens, text.temperature, batch_size=text.batch_size)
    return Numbers(system, workload, config.search, _assumptions(config))


def _latency(times: TimesConfig, longest: int, widest: int, prompt_tokens: int, batch_size: int) -> LatencyModel:
    """Tables at every number of rows and of tokens per row that can occur; context changes nothing."""
    tree_step_ms = times.draft_step_ms if times.tree_step_ms is None else times.tree_step_ms

    def verify_ms(num_tokens: int) -> float:
        if isinstance(times.verify_ms, tuple):
            return times.verify_ms[num_tokens - 1]
        return times.verify_ms + times.verify_ms_per_token * max(0, num_tokens - times.verify_free_tokens)

    def draft_ms(base_ms: float) -> Callable[[int], float]:
        return lambda num_tokens: base_ms + times.draft_ms_per_token * max(0, num_tokens - times.draft_free_tokens)

    glue_ms = draft_ms(times.service_ms + times.glue_ms)
    rows = [
        (Lane.TARGET, Operation.VERIFY, verify_ms, longest + 1),
        (Lane.DRAFT, Operation.DRAFT_STEP, draft_ms(times.draft_step_ms), 2),
        (Lane.DRAFT, Operation.GLUE, glue_ms, longest + 1),
        (Lane.DRAFT, Operation.TREE_STEP, draft_ms(tree_step_ms), widest),
    ]
    tables = {
        (lane, operation): _table(operation, of_tokens, most, batch_size) for lane, operation, of_tokens, most in rows
    }
    if times.prefill_ms is not None:
        # A draft that joins late reads what has been decoded as well.
        for lane, ms, widths in ((Lane.TARGET, times.prefill_ms, (prompt_tokens,)), (Lane.DRAFT, 0.0, ANY_WIDTH)):
            knots = {width: tuple((context, ms / 1e3) for context in ANY_CONTEXT) for width in widths}
            tables[lane, Operation.PREFILL] = OperationLatency(Operation.PREFILL, knots, (1.0,))
    return LatencyModel(tables)


def _table(operation: Operation, ms: Callable[[int], float], most_tokens: int, batch_size: int) -> OperationLatency:
    """`ms` is a function of the tokens of all rows together."""

    def of_rows(num_rows: int) -> dict[int, Knots]:
        widths = range(1, most_tokens + 1)
        return {width: tuple((context, ms(num_rows * width) / 1e3) for context in ANY_CONTEXT) for width in widths}

    batched = {num_rows: of_rows(num_rows) for num_rows in range(2, batch_size + 1)}
    return OperationLatency(operation, of_rows(1), (1.0,), batched)


def _assumptions(config: NumbersConfig) -> tuple[str, ...]:
    assumptions = ["every round is like every other, times do not vary"]
    if config.devices.slowdown_of_target == config.devices.slowdown_of_draft == 1:
        assumptions[0] += ", and draft and target do not slow each other"
    if config.hits is None:
        after_hit, after_miss = ASSUMED_AFTER_HIT, ASSUMED_AFTER_MISS
        assumptions.append(
            f"no hit curve given: hit rate 1 - {after_hit.prefactor} F^-{after_hit.exponent} after a hit and"
            f" 1 - {after_miss.prefactor} F^-{after_miss.exponent} after a miss, typical of published ones"
        )
    if config.times.tree_step_ms is None:
        assumptions.append("a step of all branches at once takes as long as a draft step")
    if not isinstance(config.times.verify_ms, tuple) and not config.times.verify_ms_per_token:
        assumptions.append("verifying K + 1 tokens takes as long as one autoregressive step, whatever K")
    weighs = config.devices.transfer_gb_per_s is not None or config.memory != MemoryConfig()
    if weighs and config.text.temperature > 0 and not config.vocabulary.num_tokens:
        assumptions.append("draft distributions take no room and no time: vocabulary.num_tokens is not given")
    return tuple(assumptions)
