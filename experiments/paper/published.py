"""The published numbers, as `published.yaml` holds them with their source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from experiments.strict_yaml import Section, read_yaml, validate

FloatArray = NDArray[np.float64]
ModelT = TypeVar("ModelT", bound=Section)
FILE = Path(__file__).with_name("published.yaml")

Rate = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Rates = tuple[Rate, ...]
Speeds = tuple[Positive, ...]  # tokens/s
PAIRS = {"llama_70b_1b": "llama_1b", "qwen_32b_0.6b": "qwen_0.6b"}  # each pair, and its draft among the miss curves
NAMES = {"llama_70b_1b": "Llama 70B/1B", "qwen_32b_0.6b": "Qwen 32B/0.6B"}


class Errors(Section):
    """To what published numbers are known: rounding, and the reading of a figure."""

    table_tokens_per_s: Positive
    figure_tokens_per_s: Positive
    figure_rate: Positive


class Devices(Section):
    autoregressive: Count
    speculative: Count
    speculative_speculative: Count


class PublicEngine(Section):
    """What the README of the public engine runs."""

    sd_speculation_length: Count
    ssd_speculation_length: Count
    fan_out: Count


class Decoders(Section):
    """Tokens/s of the three decoders."""

    ar: Positive
    sd: Positive
    ssd: Positive


class OtherEngines(Section):
    sglang_sd: Positive
    sglang_eagle3: Positive


class MissRates(Section):
    """Miss rate by fan-out at one temperature, by the source of the round."""

    temperature: Annotated[float, Field(ge=0)]
    after_primary: Rates
    after_backup: Rates

    def of(self, source: str) -> FloatArray:
        """(fan-outs,) after a round of the `primary` or of the `backup`."""
        return np.array(self.after_primary if source == "primary" else self.after_backup)


class Misses(Section):
    """Miss rates of every draft model."""

    fan_outs: tuple[Count, ...]
    drafts: dict[str, tuple[MissRates, ...]]

    @model_validator(mode="after")
    def _lengths(self) -> Misses:
        rows = [
            row for rows in self.drafts.values() for rates in rows for row in (rates.after_primary, rates.after_backup)
        ]
        return _checked(self, self.fan_outs, *rows)

    def at(self, draft: str, temperature: float) -> MissRates | None:
        """None where none were published."""
        return next((rates for rates in self.drafts[draft] if rates.temperature == temperature), None)


class TemperatureSpeeds(Section):
    """Tokens/s by temperature: SD, and SSD with a uniform and a geometric fan-out."""

    sd: Speeds
    uniform: Speeds
    geometric: Speeds


class TemperatureHits(Section):
    """Hit rate by temperature."""

    uniform: Rates
    geometric: Rates


class TemperatureSweep(Section):
    tokens_per_s: TemperatureSpeeds
    hit_rate: TemperatureHits


class Temperatures(Section):
    temperatures: tuple[Annotated[float, Field(ge=0)], ...]
    pairs: dict[str, TemperatureSweep]

    @model_validator(mode="after")
    def _lengths(self) -> Temperatures:
        sweeps = [part for sweep in self.pairs.values() for part in (sweep.tokens_per_s, sweep.hit_rate)]
        return _checked(self, self.temperatures, *(row for part in sweeps for row in part.model_dump().values()))


class BatchSweep(Section):
    """Tokens/s of each sequence by batch size: SSD with either backup, SD, AR where it was published."""

    fast: Speeds
    draft: Speeds
    sd: Speeds
    ar: Speeds | None = None


class Batches(Section):
    """`fan_out` is the one that the figure states."""

    fan_out: Count
    batch_sizes: tuple[Count, ...]
    pairs: dict[str, BatchSweep]

    @model_validator(mode="after")
    def _lengths(self) -> Batches:
        rows = [row for sweep in self.pairs.values() for row in (sweep.fast, sweep.draft, sweep.sd, sweep.ar) if row]
        return _checked(self, self.batch_sizes, *rows)


class DraftDevices(Section):
    """The paper's forecast: tokens/s of each sequence by number of draft devices."""

    batch_size: Count
    num_draft_devices: tuple[Count, ...]
    tokens_per_s: Speeds

    @model_validator(mode="after")
    def _lengths(self) -> DraftDevices:
        return _checked(self, self.num_draft_devices, self.tokens_per_s)


class Sampling(Section):
    """Hit rate and acceptance rate by the factor C of Saguaro sampling."""

    downweights: tuple[Rate, ...]
    hit_rates: Rates
    acceptance_rates: Rates

    @model_validator(mode="after")
    def _lengths(self) -> Sampling:
        return _checked(self, self.downweights, self.hit_rates, self.acceptance_rates)


class Published(Section):
    """Every number; pairs are named as in `PAIRS`."""

    schema_number: Literal[1] = Field(alias="schema")
    source: str
    errors: Errors
    devices: Devices
    public_engine: PublicEngine
    decoders: dict[str, dict[str, Decoders]]
    averages: dict[str, Decoders]
    other_engines_tokens_per_s: dict[str, OtherEngines]
    misses: Misses
    temperatures: Temperatures
    batches: Batches
    draft_devices: DraftDevices
    sampling: Sampling


def _checked(model: ModelT, places: tuple[float, ...], *rows: tuple[float, ...]) -> ModelT:
    """ValueError unless every row has a value for each place."""
    for row in rows:
        if len(row) != len(places):
            raise ValueError(f"must have {len(places)} values in every row, one has {len(row)}")
    return model


@cache
def read_published(path: Path = FILE) -> Published:
    """The numbers of a file. Raises `BadInput` naming file, line and key."""
    return validate(Published, read_yaml(path))
