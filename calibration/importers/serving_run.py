"""One benchmark run of a serving engine: time per output token at a batch size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.importers.imported import Imported, Measured, Told
from calibration.importers.speculation import SPREAD_OF_PROMPTS, Speculation, whose_acceptance
from calibration.importers.step_times import step_times
from sim.errors import BadInput, require_number
from sim.policy import Autoregressive, Speculative

NO_HIT_CURVE = "how often prepared outcomes are hit: published hit curves stand for it, each over its range"
NO_BUILD = "how long a build takes beside the verification: its steps are taken to be draft steps"


@dataclass(frozen=True)
class ServingRun:
    """Seconds per output token of a request after its first, with `batch_size` requests decoded together."""

    name: str
    tpot_s: float
    batch_size: int
    prompt_tokens: int | None = None
    new_tokens: int | None = None


def serving_run(data: Mapping[str, Any], name: str, told: Told) -> ServingRun:
    """From the keys that vLLM and SGLang share. Raises `BadInput` naming a key that is missing or impossible."""
    tpot_s = require_number(f"{name}: mean_tpot_ms", data.get("mean_tpot_ms"), 0, above=True) / 1e3
    completed = data.get("completed")
    return ServingRun(
        name=name,
        tpot_s=tpot_s,
        batch_size=told.batch_size or _batch_size(data, name, tpot_s),
        prompt_tokens=_mean_length(data.get("total_input_tokens"), completed),
        new_tokens=_mean_length(data.get("total_output_tokens"), completed),
    )


def _batch_size(data: Mapping[str, Any], name: str, tpot_s: float) -> int:
    """The concurrency that was asked for; else the mean number of requests that decode."""
    asked = data.get("max_concurrency")
    if asked is not None:
        return int(require_number(f"{name}: max_concurrency", asked, 1))
    throughput = require_number(f"{name}: output_throughput", data.get("output_throughput"), 0, above=True)
    return max(1, round(throughput * tpot_s))


def _mean_length(total: object, completed: object) -> int | None:
    """None where the run does not tell."""
    if isinstance(total, int) and isinstance(completed, int) and completed > 0:
        return round(total / completed)
    return None


def from_runs(
    engine: str,
    plain: ServingRun | None,
    speculating: ServingRun | None,
    speculation: Speculation,
    told: Told,
    caveats: Sequence[str] = (),
) -> Imported:
    """What the runs with and without speculation tell together. Raises `BadInput` if their batch sizes differ."""
    runs = [run for run in (speculating, plain) if run is not None]
    sizes = {run.batch_size for run in runs}
    if len(sizes) > 1:
        raise BadInput("runs", "must be of one batch size; --batch-size says which, if they are", sorted(sizes))
    round_s = speculating.tpot_s * speculation.tokens_per_round if speculating else None
    times = step_times(plain.tpot_s if plain else None, round_s, speculation.speculation_length)
    temperature, unknown = whose_acceptance(told.temperature)
    return Imported(
        engine=engine,
        learned={**_text(runs, told), **temperature, **speculation.learned(), **times.learned},
        how=(speculation.in_words(), *times.how, *(f"{run.name}: {run.batch_size} rows together" for run in runs)),
        not_learned=(*times.not_learned, *unknown, NO_HIT_CURVE, NO_BUILD, *caveats),
        assumed=(SPREAD_OF_PROMPTS, *times.assumed),
        measured=tuple(_measured(plain, speculating, speculation)),
    )


def _measured(plain: ServingRun | None, speculating: ServingRun | None, speculation: Speculation) -> Iterator[Measured]:
    if plain is not None:
        yield Measured(Autoregressive(), plain.batch_size / plain.tpot_s)
    if speculating is not None:
        yield Measured(Speculative(speculation.speculation_length), speculating.batch_size / speculating.tpot_s)


def _text(runs: Sequence[ServingRun], told: Told) -> dict[str, Any]:
    """Lengths of a text and how many are decoded together, as far as they are known."""
    text = {
        "batch_size": told.batch_size or (runs[0].batch_size if runs else None),
        "prompt_tokens": told.prompt_tokens or next((run.prompt_tokens for run in runs if run.prompt_tokens), None),
        "new_tokens": told.new_tokens or next((run.new_tokens for run in runs if run.new_tokens), None),
    }
    return {f"text.{name}": value for name, value in text.items() if value is not None}
