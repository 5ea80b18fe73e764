"""What an experiment's YAML file may say."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from experiments.strict_yaml import Document, Keys, Section, parse_setting, read_yaml, validate
from experiments.sweep import Point, points, refuse_sweep
from sim.errors import BadInput
from sim.policy import Fallback, LateBuild
from sim.workload import Sampling

QUICKSTART = Path(__file__).parent / "configs" / "quickstart.yaml"

Count = Annotated[int, Field(ge=1)]
Downweight = Annotated[float, Field(gt=0, le=1)]


def _written(pattern: str, rule: str) -> AfterValidator:
    """Text that matches all of `pattern`, which `rule` says in words."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise PydanticCustomError("written", rule)
        return text

    return AfterValidator(check)


Device = Annotated[str, _written(r"cpu|cuda(:[0-9]+)?", "must be cpu, cuda or cuda:i")]
FileName = Annotated[
    str,
    _written(r"[A-Za-z0-9][A-Za-z0-9_.-]*", "must be letters, digits, dots, - and _, one of the first two in front"),
]
Counts = Annotated[tuple[Count, ...], Field(min_length=1)]


class WorkloadConfig(Section):
    """What is decoded, `batch_size` prompts at a time. Calibration and test prompts are different excerpts of the same
    files."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=2)]
    prompt_tokens: Count
    calibration_prompts: Annotated[int, Field(ge=5)]
    test_prompts: Annotated[int, Field(ge=2)]
    stop_at_end_of_text: bool = True
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    batch_size: Count = 1

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn, of every prompt."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)


class ProfileConfig(Section):
    """What is measured before choosing. Latency is measured at every width and context. Short runs decode
    `trace_prompts` prompts, in whole batches, two at least, spread over the time in which latencies are measured."""

    latency_budget_s: Annotated[float, Field(gt=0)]
    max_speculation_length: Count
    branch_counts: Counts
    contexts: Counts
    num_candidates: Annotated[int, Field(ge=16)] = 32
    trace_prompts: Annotated[int, Field(ge=2)]


class SearchConfig(Section):
    """The policies to choose from. AR, and SD at every speculation length, always take part."""

    speculation_lengths: Counts
    budgets: Counts
    fan_out_rules: Annotated[tuple[Literal["uniform", "geometric", "exact"], ...], Field(min_length=1)]
    fallbacks: Annotated[tuple[Fallback, ...], Field(min_length=1)]
    downweights: Annotated[tuple[Downweight, ...], Field(min_length=1)] = (1.0,)
    on_late_builds: Annotated[tuple[LateBuild, ...], Field(min_length=1)] = (LateBuild.WAIT,)


class ConfigurationsConfig(SearchConfig):
    """Configurations to validate: AR, SD at every speculation length and SSD of every combination, decoded `batch_size`
    prompts at a time."""

    batch_size: Count = 1


class ToleranceConfig(Section):
    """What validation must reach; it ends with exit code 1 where it does not."""

    mape_tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    hit_rate_mae: Annotated[float, Field(gt=0)] | None = None
    rank_correlation: Annotated[float, Field(ge=-1, le=1)] | None = None
    regret: Annotated[float, Field(ge=0)] | None = None

    def stated(self) -> dict[str, float]:
        """Those that were given."""
        return {name: bound for name, bound in self.model_dump().items() if bound is not None}


class ValidationConfig(Section):
    """What `saguaro validate` measures. Test prompts are decoded under every configuration, `repeats` times with seeds
    of their own; then `fresh_prompts` others under the best ones, to see what the recommended policy loses."""

    configurations: Annotated[tuple[ConfigurationsConfig, ...], Field(min_length=1)]
    repeats: Annotated[int, Field(ge=2)] = 2
    fresh_prompts: Annotated[int, Field(ge=2)]
    tolerance: ToleranceConfig = ToleranceConfig()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({group.batch_size for group in self.configurations}))


class RunConfig(Section):
    """How the chosen policies are measured. Fewer than three repeats would show no spread.

    `on_draft_failure: continue` lets the target go on alone; the repeat is then left out of the comparison.
    """

    repeats: Annotated[int, Field(ge=3)] = 3
    on_draft_failure: Literal["raise", "continue"] = "raise"


class ExperimentConfig(Section):
    """One experiment, resolved."""

    schema_number: Literal[1] = Field(alias="schema")
    name: FileName
    pair: Annotated[str, Field(min_length=1)]
    concurrency: Literal["auto", "processes", "streams", "serial"] = "auto"
    device: Device = "cpu"  # of both roles
    draft_device: Device | None = None  # of the draft, if it has one of its own
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    graphs: bool = False  # on GPUs: passes of fixed shapes are recorded once and replayed
    seed: Annotated[int, Field(ge=0)] = 0
    workload: WorkloadConfig
    profile: ProfileConfig
    search: SearchConfig
    run: RunConfig = RunConfig()
    validation: ValidationConfig | None = None  # of `saguaro validate`, which alone reads it

    def with_batch_size(self, batch_size: int) -> ExperimentConfig:
        """Raises `BadInput` if the numbers of prompts do not go with it."""
        workload = self.workload.model_copy(update={"batch_size": batch_size})
        config = self.model_copy(update={"workload": workload})
        _check_together(config, lambda path: f"{path[-1]} for batches of {batch_size}")
        return config

    def to_dict(self) -> dict[str, Any]:
        """As the YAML file would say it."""
        return self.model_dump(mode="json", by_alias=True)


REDUCED = "reduced"  # the section whose values replace those of the same name in a reduced run


def load_config(
    path: Path,
    *,
    reduced: bool = False,
    seed: int | None = None,
    batch_size: int | None = None,
    settings: Sequence[str] = (),
) -> ExperimentConfig:
    """Read and check an experiment file. With `reduced` its section of that name overrides the rest; `seed`,
    `batch_size` and `settings`, each like `workload.temperature=1e-1`, override both.

    The reduced settings are checked in either case. Raises `BadInput` naming the file, the line and the key, or the
    option of the command line.
    """
    document = read_yaml(path)
    full, small = document.without(REDUCED), document.merged(REDUCED)
    _checked(full), _checked(small)
    return _checked(_with_options(small if reduced else full, seed, batch_size, settings))


def load_sweep(
    path: Path, *, reduced: bool = False, seed: int | None = None, settings: Sequence[str] = ()
) -> list[tuple[Point, ExperimentConfig]]:
    """Every point of an experiment file with a sweep, and its experiment; else as `load_config`."""
    document = read_yaml(path)
    full, small = document.without(REDUCED), document.merged(REDUCED)
    for form in (full, small):
        for point in points(form):
            _checked(point.document)
    chosen = _with_options(small if reduced else full, seed, None, settings)
    return [(point, _checked(point.document)) for point in points(chosen)]


def _with_options(document: Document, seed: int | None, batch_size: int | None, settings: Sequence[str]) -> Document:
    """The document with what the command line gave in place."""
    if seed is not None:
        document = document.with_value(("seed",), seed, "--seed")
    if batch_size is not None:
        document = document.with_value(("workload", "batch_size"), batch_size, "--batch-size")
    for text in settings:
        if parse_setting(text, "--set")[0][0] == REDUCED:
            raise BadInput("--set", f"must name a setting itself; --{REDUCED} uses those of that section", text)
    return document.with_settings(settings)


def _checked(document: Document) -> ExperimentConfig:
    """Each value by itself, then those that must fit together."""
    refuse_sweep(document)
    config = validate(ExperimentConfig, document)
    _check_together(config, document.place)
    return config


def _check_together(config: ExperimentConfig, place: Callable[[Keys], str]) -> None:
    """What the search may ask for must have been profiled. `place` says what to blame for a value."""
    profile, search, workload = config.profile, config.search, config.workload

    def require(holds: bool, path: Keys, rule: str, value: object) -> None:
        if not holds:
            raise BadInput(place(path), rule, value)

    longest, limit = max(search.speculation_lengths), profile.max_speculation_length
    rule = f"must not exceed profile.max_speculation_length = {limit}"
    require(longest <= limit, ("search", "speculation_lengths"), rule, longest)

    largest, limit = max(search.budgets), max(profile.branch_counts)
    rule = f"must not exceed the largest of profile.branch_counts = {limit}"
    require(largest <= limit, ("search", "budgets"), rule, largest)

    smallest = min(profile.branch_counts)
    require(smallest == 1, ("profile", "branch_counts"), "must begin with 1, which the length cap can bring", smallest)

    first, last = workload.prompt_tokens, workload.prompt_tokens + workload.max_new_tokens
    rule = f"must span {first}..{last}, workload.prompt_tokens to prompt_tokens + max_new_tokens"
    spans = min(profile.contexts) <= first and max(profile.contexts) >= last
    require(spans, ("profile", "contexts"), rule, list(profile.contexts))

    rule = f"must not exceed workload.calibration_prompts = {workload.calibration_prompts}"
    fits = profile.trace_prompts <= workload.calibration_prompts
    require(fits, ("profile", "trace_prompts"), rule, profile.trace_prompts)

    rows, num_prompts = workload.batch_size, (workload.calibration_prompts, workload.test_prompts)
    rule = "must divide workload.calibration_prompts, {} of them, twice at least, and workload.test_prompts, {}"
    fits = 2 * rows <= num_prompts[0] and not any(num % rows for num in num_prompts)
    require(fits, ("workload", "batch_size"), rule.format(*num_prompts), rows)

    if config.validation is not None:
        _check_validation(config, config.validation, require)

    rule = "must be >= 2 for batches, whose rows differ in length"
    ragged = workload.batch_size == 1 or min(profile.contexts) >= 2
    require(ragged, ("profile", "contexts"), rule, list(profile.contexts))


def _check_validation(
    config: ExperimentConfig, validation: ValidationConfig, require: Callable[[bool, Keys, str, object], None]
) -> None:
    """Every configuration lies inside what is profiled, and every batch is whole."""
    block, profile = max(validation.batch_sizes), config.profile
    for number, group in enumerate(validation.configurations):
        path = ("validation", "configurations", number)
        longest, limit = max(group.speculation_lengths), profile.max_speculation_length
        rule = f"must not exceed profile.max_speculation_length = {limit}"
        require(longest <= limit, (*path, "speculation_lengths"), rule, longest)
        largest, limit = max(group.budgets), max(profile.branch_counts)
        rule = f"must not exceed the largest of profile.branch_counts = {limit}"
        require(largest <= limit, (*path, "budgets"), rule, largest)
        require(
            block % group.batch_size == 0, (*path, "batch_size"), f"must divide the largest, {block}", group.batch_size
        )
    for keys, given in (
        (("workload", "test_prompts"), config.workload.test_prompts),
        (("validation", "fresh_prompts"), validation.fresh_prompts),
        (("workload", "calibration_prompts"), config.workload.calibration_prompts),
    ):
        require(given % block == 0, keys, f"must be a multiple of the largest batch size, {block}", given)
