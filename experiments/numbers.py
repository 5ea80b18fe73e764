"""A system from a handful of numbers in a YAML file, for those who cannot profile; says what it had to assume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from experiments.acceptance import DEFINITIONS, AcceptanceConfig
from experiments.config import Count, SearchConfig
from experiments.recorded_workload import recorded_workload
from experiments.step_times import StepTimes, TimesConfig
from experiments.strict_yaml import Document, Section, read_yaml, validate
from experiments.sweep import refuse_sweep
from sim.agreement import Agreement, AgreementRecord
from sim.errors import BadInput
from sim.latency import Knots, LatencyModel, OperationLatency
from sim.memory import Memory
from sim.parametric import HitCurve, ParametricAgreement
from sim.placement import Placement, Split
from sim.system import HostTerm, System
from sim.trace import Lane, Operation
from sim.workload import Workload

ANY_CONTEXT = (0, 2**31)
ANY_WIDTH = (1, 2**31)
Milliseconds = Annotated[float, Field(ge=0)]


class TextConfig(Section):
    """How long a text is, and how many are decoded together. Context does not change the times here; the prompt's
    length counts for memory only."""

    prompt_tokens: Count = 128
    new_tokens: Annotated[int, Field(ge=2)] = 512
    temperature: Annotated[float, Field(ge=0)] = 0.0
    batch_size: Count = 1


class CurveConfig(Section):
    """Hit rate 1 - prefactor * F^-exponent for a fan-out F."""

    prefactor: Annotated[float, Field(ge=0)]
    exponent: Annotated[float, Field(ge=0)]

    def curve(self) -> HitCurve:
        return HitCurve(self.prefactor, self.exponent)


# In the middle of the curves measured for four draft models at temperatures 0 to 1 in arXiv 2603.03251, figures 3, 10.
ASSUMED_AFTER_HIT = CurveConfig(prefactor=0.4, exponent=0.5)
ASSUMED_AFTER_MISS = CurveConfig(prefactor=0.7, exponent=0.5)
PLAUSIBLE_CURVES = {
    "after_hit": {"prefactor": (0.28, 0.56), "exponent": (0.4, 0.56)},
    "after_miss": {"prefactor": (0.5, 0.85), "exponent": (0.4, 0.56)},
}


class OverallHitConfig(Section):
    """Hit rate of all rounds at one fan-out, the same for every accept count. Beside it stand the exponent of both
    curves and by how much misses after a miss are more frequent than after a hit."""

    hit_rate: Annotated[float, Field(ge=0, le=1)]
    fan_out: Count
    exponent: Annotated[float, Field(ge=0)] = ASSUMED_AFTER_HIT.exponent
    miss_ratio: Annotated[float, Field(ge=1)] = ASSUMED_AFTER_MISS.prefactor / ASSUMED_AFTER_HIT.prefactor

    def curves(self) -> tuple[HitCurve, HitCurve]:
        """After a hit and after a miss. With m and m * `miss_ratio` missed after either, the stationary hit rate p of
        eq. 1 obeys m (p + (1 - p) * miss_ratio) = 1 - p."""
        missed = 1 - self.hit_rate
        after_hit = missed / (self.hit_rate + missed * self.miss_ratio)
        scale = self.fan_out**self.exponent
        after_miss = after_hit * self.miss_ratio
        return HitCurve(after_hit * scale, self.exponent), HitCurve(after_miss * scale, self.exponent)


class HitConfig(Section):
    """Hit curves by the source of the round, or the hit rate of all; the defaults are assumptions, not measurements."""

    after_hit: CurveConfig = ASSUMED_AFTER_HIT
    after_miss: CurveConfig = ASSUMED_AFTER_MISS
    overall: OverallHitConfig | None = None

    def curves(self) -> tuple[HitCurve, HitCurve]:
        """After a hit and after a miss. Raises `BadInput` if they are given twice."""
        if self.overall is None:
            return self.after_hit.curve(), self.after_miss.curve()
        if len(self.model_fields_set) > 1:
            raise BadInput("hits.overall", "must be left out where a curve by source is given")
        return self.overall.curves()


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


class RangeConfig(Section):
    """Between which ends a number may lie. `because` says why it is not known: then it counts as assumed."""

    low: float
    high: float
    because: str | None = None


class NumbersConfig(Section):
    """What is known of a pair and its devices, between which ends what is not known may lie, and the policies to choose
    from. A key of `ranges` is the full key of a number, such as `times.verify_ms`."""

    schema_number: Literal[1] = Field(alias="schema")
    name: str
    text: TextConfig = TextConfig()
    acceptance: AcceptanceConfig
    hits: HitConfig | None = None
    times: TimesConfig
    devices: DevicesConfig = DevicesConfig()
    vocabulary: VocabularyConfig = VocabularyConfig()
    memory: MemoryConfig = MemoryConfig()
    ranges: dict[str, RangeConfig] = Field(default_factory=dict)
    search: SearchConfig


@dataclass(frozen=True)
class Range:
    """A number of the file that may lie anywhere between two ends; it counts as assumed if `because` says why."""

    key: str
    value: float
    low: float
    high: float
    because: str = ""
    is_whole: bool = False  # one of the integers between the ends, both of them included

    def in_words(self) -> str:
        return f"{self.key} = {self.value:g}, between {self.low:g} and {self.high:g}"


@dataclass(frozen=True)
class Numbers:
    """The system and workload that a file describes, the policies to choose from, what had to be assumed, and what is
    only known to lie in a range."""

    system: System
    workload: Workload
    search: SearchConfig
    assumptions: tuple[str, ...]
    ranges: tuple[Range, ...]
    document: Document

    def at(self, values: Mapping[str, float]) -> System:
        """The system with other values of some keys. Raises `BadInput` naming the key that they make impossible."""
        stated = {entry.key: entry.value for entry in self.ranges}
        return _system(_config(_changed(self.document, stated | dict(values))), self.document)


def read_numbers(path: Path, settings: Sequence[str] = (), batch_size: int | None = None) -> Numbers:
    """Read a file of summary numbers; `settings`, each like `times.verify_ms=12`, and `batch_size` take the place of
    its own. Raises `BadInput` naming file, line and key, or the option of the command line."""
    document = read_yaml(path)
    if batch_size is not None:
        document = document.with_value(("text", "batch_size"), batch_size, "--batch-size")
    return numbers_of(document.with_settings(settings))


def numbers_of(document: Document) -> Numbers:
    """What a file of summary numbers says. Raises `BadInput` naming file, line and key."""
    config = _config(document)
    system = _system(config, document)
    ranges = (*_given_ranges(config, document), *_assumed_ranges(config))
    numbers = Numbers(system, _workload(config, system), config.search, _assumptions(config), ranges, document)
    for entry in ranges:
        for value in (entry.low, entry.high):
            _check_end(numbers, entry, value)
    return replace(numbers, ranges=()) if config.devices.num_targets > 1 else numbers


def _config(document: Document) -> NumbersConfig:
    refuse_sweep(document)
    given = document.data.get("acceptance", {})
    if not isinstance(given, Mapping):
        raise BadInput(document.place(("acceptance",)), f"must say by which definition: {DEFINITIONS}", given)
    return validate(NumbersConfig, document)


def _system(config: NumbersConfig, document: Document) -> System:
    text, devices = config.text, config.devices
    longest = max(config.search.speculation_lengths)
    try:
        times = config.times.resolved(longest, text.batch_size)
        agreement = _agreement(config, Path(document.name).parent)
    except BadInput as error:
        raise _placed(error, document) from None
    return System(
        latency=step_latency(times, longest, max(config.search.budgets), text.prompt_tokens, text.batch_size),
        contention={Lane.TARGET: devices.slowdown_of_target, Lane.DRAFT: devices.slowdown_of_draft},
        host_s=dict.fromkeys(HostTerm, config.times.host_ms / 1e3),
        agreement=agreement,
        identity={"source": Path(document.name).name},
        overlaps=devices.overlap,
        placement=devices.placement(config.vocabulary),
        memory=config.memory.memory(),
    )


def _placed(error: BadInput, document: Document) -> BadInput:
    """What is wrong with a key of the file, or with what its acceptance leads to."""
    name, _, rule = str(error).partition(": ")
    keys = tuple(name.split("."))
    if keys[0] in NumbersConfig.model_fields:
        return BadInput(document.place(keys), rule)
    return BadInput(document.place(("acceptance",)), str(error))


def _agreement(config: NumbersConfig, folder: Path) -> Agreement:
    """The record that counts, or what the numbers say of every round."""
    text, given = config.text, config.acceptance
    given.check()
    if given.records is not None:
        told = sorted(text.model_fields_set - {"batch_size"})
        if told or config.hits is not None:
            rule = "must be left out where acceptance.records hold it"
            raise BadInput(f"text.{told[0]}" if told else "hits", rule)
        return AgreementRecord.read(folder / given.records[given.record_number])
    after_hit, after_miss = (config.hits or HitConfig()).curves()
    return ParametricAgreement(
        prompt_tokens=text.prompt_tokens,
        new_tokens=text.new_tokens,
        acceptance=given.conditional_rates(),
        after_hit=(after_hit,),
        after_miss=(after_miss,),
        sampling_temperature=text.temperature,
        num_texts=text.batch_size * config.devices.num_targets,
    )


def _workload(config: NumbersConfig, system: System) -> Workload:
    text = config.text
    if config.acceptance.records is not None:
        return replace(recorded_workload(system.agreement), batch_size=text.batch_size)
    prompts = ((0,) * text.prompt_tokens,) * (text.batch_size * config.devices.num_targets)
    return Workload("parametric", prompts, text.new_tokens, text.temperature, batch_size=text.batch_size)


def step_latency(times: StepTimes, longest: int, widest: int, prompt_tokens: int, batch_size: int) -> LatencyModel:
    """Tables at every number of rows and of tokens per row that can occur; context changes nothing."""
    rows = [
        (Lane.TARGET, Operation.VERIFY, times.verify_ms, longest + 1),
        (Lane.DRAFT, Operation.DRAFT_STEP, times.draft_step_ms, 2),
        (Lane.DRAFT, Operation.GLUE, times.glue_ms, longest + 1),
        (Lane.DRAFT, Operation.TREE_STEP, times.tree_step_ms, widest),
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


def _table(
    operation: Operation, ms: Callable[[int, int], float], most_tokens: int, batch_size: int
) -> OperationLatency:
    """`ms` is a function of the number of rows and of the tokens of each."""

    def of_rows(num_rows: int) -> dict[int, Knots]:
        widths = range(1, most_tokens + 1)
        return {width: tuple((context, ms(num_rows, width) / 1e3) for context in ANY_CONTEXT) for width in widths}

    batched = {num_rows: of_rows(num_rows) for num_rows in range(2, batch_size + 1)}
    return OperationLatency(operation, of_rows(1), (1.0,), batched)


# ---------------------------------------------------------------------------------------------- what is not known


def _given_ranges(config: NumbersConfig, document: Document) -> list[Range]:
    """Raises `BadInput` on a range that does not hold the number it is of."""
    values = config.model_dump(by_alias=True)
    ranges = []
    for key, entry in config.ranges.items():
        value = _value_at(values, key)
        rule = "must be the full key of a number that is given or has a default"
        if value is None:
            raise BadInput(document.place(("ranges", key)), rule)
        if not entry.low <= value <= entry.high:
            rule = f"must hold the number itself, {key} = {value:g}"
            raise BadInput(document.place(("ranges", key)), rule, [entry.low, entry.high])
        ranges.append(Range(key, value, entry.low, entry.high, entry.because or ""))
    if config.acceptance.plus_minus:
        amount = config.acceptance.plus_minus
        ranges.append(Range("acceptance.shift", 0.0, -amount, amount))
    if len(config.acceptance.records or ()) > 1:
        because = "the dump leaves open what lies outside its top tokens; record 0 is the lower end, 1 the upper"
        ranges.append(Range("acceptance.record_number", 0, 0, 1, because, is_whole=True))
    return ranges


def _value_at(values: Any, key: str) -> float | None:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, int | float) and not isinstance(values, bool) else None


def _assumed_ranges(config: NumbersConfig) -> list[Range]:
    """What stands for numbers that the file does not give, each over its plausible range."""
    assumed = []
    if config.acceptance.records is None and (config.hits is None or config.hits.overall is None):
        told = config.hits.model_fields_set if config.hits else set()
        for source in sorted(PLAUSIBLE_CURVES.keys() - told):
            assumed += _curve_ranges(source)
    assumed += [Range(*entry) for entry in config.times.assumed_ranges()]
    return [entry for entry in assumed if entry.key not in config.ranges]


def _curve_ranges(source: str) -> list[Range]:
    stated = getattr(HitConfig(), source)
    because = f"no hit curve {source.replace('_', ' a ')} given; those of published pairs"
    return [
        Range(f"hits.{source}.{name}", getattr(stated, name), low, high, because)
        for name, (low, high) in PLAUSIBLE_CURVES[source].items()
    ]


def _changed(document: Document, values: Mapping[str, float]) -> Document:
    data = deepcopy(dict(document.data))
    for key, value in values.items():
        *sections, name = key.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return replace(document, data=data)


def _check_end(numbers: Numbers, entry: Range, value: float) -> None:
    try:
        numbers.at({entry.key: int(value) if entry.is_whole else value})
    except BadInput as error:
        place = numbers.document.place(("ranges", entry.key))
        raise BadInput(place, f"must be possible at both ends, and is not at {value:g}: {error}") from None


def _assumptions(config: NumbersConfig) -> tuple[str, ...]:
    assumptions = ["every round is like every other, times do not vary"]
    if config.devices.slowdown_of_target == config.devices.slowdown_of_draft == 1:
        assumptions[0] += ", and draft and target do not slow each other"
    if config.hits is None and config.acceptance.records is None:
        after_hit, after_miss = ASSUMED_AFTER_HIT, ASSUMED_AFTER_MISS
        assumptions.append(
            f"no hit curve given: hit rate 1 - {after_hit.prefactor} F^-{after_hit.exponent} after a hit and"
            f" 1 - {after_miss.prefactor} F^-{after_miss.exponent} after a miss, typical of published ones"
        )
    if config.times.tree_step_ms is None and "tree_step_over_draft" not in config.times.model_fields_set:
        assumptions.append("a step of all branches at once takes as long as a draft step")
    if config.times.is_flat:
        assumptions.append("verifying K + 1 tokens takes as long as one autoregressive step, whatever K")
    if config.devices.num_targets > 1:
        assumptions.append("every number is as stated: ranges are not drawn for targets that share a draft")
    weighs = config.devices.transfer_gb_per_s is not None or config.memory != MemoryConfig()
    if weighs and config.text.temperature > 0 and not config.vocabulary.num_tokens:
        assumptions.append("draft distributions take no room and no time: vocabulary.num_tokens is not given")
    return tuple(assumptions)
