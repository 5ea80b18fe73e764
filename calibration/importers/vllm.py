"""vLLM: results of `vllm bench serve` and `vllm bench latency`, and what it counts of speculative decoding.

Minimal input: one of the following of a server with a speculative configuration.

- The counters of `/metrics`, in Prometheus' text form: `vllm:spec_decode_num_drafts_total`,
  `..._num_draft_tokens_total`, `..._num_accepted_tokens_total` and `..._num_accepted_tokens_per_pos_total` with the
  label `position` from 0 on. They count since the start of the server; two snapshots, the earlier one first, count what
  lies between them.
- Log lines `SpecDecoding metrics: ... Drafted: ... tokens, Per-position acceptance rate: ...`; all lines are pooled.
- The JSON that `vllm bench serve --save-result` writes, in releases that add `spec_decode_*` keys to it. The
  per-position rates are shares of all drafts, the acceptance length includes the bonus token, and
  `spec_decode_acceptance_rate` is accepted over drafted in per cent.

Time per token comes from `mean_tpot_ms` of the same JSON, or from `avg_latency` of `vllm bench latency --output-json`
(seconds of a whole batch, prefill included, which needs the number of new tokens and the batch size). The same
benchmark without speculation, as a plain source, tells the autoregressive step; without it the split of a round into
draft steps and verification is assumed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from calibration.importers.imported import Imported, Source, Told, json_objects, refuse_bare_acceptance
from calibration.importers.serving_run import ServingRun, from_runs, serving_run
from calibration.importers.speculation import DraftCounts, Speculation
from sim.errors import BadInput, require_entries, require_number

PREFIX = "vllm:spec_decode_num_"
SERIES = re.compile(rf"^{PREFIX}(\w+?)(?:_total)?(?:\{{(.*)\}})?\s+(\S+)(?:\s+\d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
LOGGED = re.compile(r"SpecDecoding metrics:.*Drafted: (\d+) tokens.*Per-position acceptance rate: ([\d., ]+\d)")
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
PER_POSITION = "accepted_tokens_per_pos"


def import_vllm(sources: Sequence[Source], told: Told) -> Imported:
    """Raises `BadInput` naming the file and what is missing from it, or what cannot be told apart."""
    counted = [source for source in sources if PREFIX in source.text]
    logged = [source for source in sources if source not in counted and LOGGED.search(source.text)]
    results = [source for source in sources if source not in counted and source not in logged]
    runs = [(_only_object(source), source) for source in results]
    plain = [_run(data, source.name, told) for data, source in runs if source.is_plain]
    speculating = [(data, source.name) for data, source in runs if not source.is_plain]
    for kind, found in (("without speculation", plain), ("with speculation", speculating)):
        if len(found) > 1:
            raise BadInput("results", f"must be of one run {kind}; runs without it go with --ar", len(found))
    data, name = speculating[0] if speculating else ({}, "sources")
    counts = _counts(counted, logged)
    speculation = counts.speculation("counters") if counts else _speculation(data, name, told)
    return from_runs(
        "vllm",
        plain[0] if plain else None,
        None if not speculating else _run(data, name, told, speculation),
        speculation,
        told,
        counts.caveats() if counts else (),
    )


def _only_object(source: Source) -> dict[str, Any]:
    objects = json_objects(source)
    if len(objects) != 1:
        raise BadInput(source.name, "must hold the result of one run", len(objects))
    return objects[0]


def _run(data: Mapping[str, Any], name: str, told: Told, speculation: Speculation | None = None) -> ServingRun:
    if speculation is None and data.get("spec_decode_num_drafts"):
        raise BadInput(name, "must be of a run without speculation, and has spec_decode_num_drafts")
    if "avg_latency" not in data:
        return serving_run(data, name, told)
    latency_s = require_number(f"{name}: avg_latency", data["avg_latency"], 0, above=True)
    new_tokens = told.need("new_tokens", name)
    return ServingRun(name, latency_s / new_tokens, told.need("batch_size", name), told.prompt_tokens, new_tokens)


# ------------------------------------------------------------------------------------------------------------ drafts


def _counts(counted: Sequence[Source], logged: Sequence[Source]) -> DraftCounts | None:
    if counted and logged:
        raise BadInput("sources", "must hold counters or log lines, not both")
    if len(counted) > 2 or len(logged) > 1:
        raise BadInput("sources", "must hold one log, or at most two snapshots of the counters")
    if logged:
        return _logged(logged[0])
    snapshots = [_snapshot(source) for source in counted]
    if not snapshots:
        return None
    return snapshots[0] if len(snapshots) == 1 else snapshots[1] - snapshots[0]


def _snapshot(source: Source) -> DraftCounts:
    """Summed over the engines of one server. Raises `BadInput` if it serves several models, or a counter lacks."""
    totals: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    models = set()
    for line in source.text.splitlines():
        found = SERIES.match(line.strip())
        if not found or found[1].endswith("_created"):
            continue
        labels = dict(LABEL.findall(found[2] or ""))
        models.add(labels.get("model_name"))
        value = _value(found[3], source.name)
        if found[1] == PER_POSITION:
            positions[_position(labels, source.name)] += value
        else:
            totals[found[1]] += value
    missing = [name for name in COUNTERS if name not in totals]
    if missing or sorted(positions) != list(range(len(positions))) or not positions:
        needed = missing[0] if missing else PER_POSITION
        raise BadInput(f"{source.name}: {PREFIX}{needed}_total", "this counter is missing")
    if len(models) > 1:
        raise BadInput(source.name, "must hold the counters of one model", sorted(map(str, models)))
    per_position = tuple(positions[position] for position in range(len(positions)))
    num_drafts, num_draft_tokens, num_accepted_tokens = (totals[name] for name in COUNTERS)
    return DraftCounts(num_drafts, num_draft_tokens, num_accepted_tokens, per_position)


def _value(text: str, name: str) -> float:
    try:
        return require_number(f"{name}: counter", float(text), 0)
    except ValueError:
        raise BadInput(f"{name}: counter", "must be a finite number >= 0", text) from None


def _position(labels: Mapping[str, str], name: str) -> int:
    text = labels.get("position", "")
    if not text.isdigit():
        raise BadInput(f"{name}: {PREFIX}{PER_POSITION}", "must have the label position, a number", text)
    return int(text)


def _logged(source: Source) -> DraftCounts:
    """All lines together; a line drafts as many rounds as its draft tokens make of full length."""
    lines = [(int(found[1]), _rates(found[2])) for found in map(LOGGED.search, source.text.splitlines()) if found]
    lengths = {len(rates) for _, rates in lines}
    if len(lengths) != 1:
        raise BadInput(source.name, "must log one speculation length", sorted(lengths))
    (length,) = lengths
    drafts = [num_tokens / length for num_tokens, _ in lines]
    accepted = tuple(
        sum(num * rates[position] for num, (_, rates) in zip(drafts, lines, strict=True)) for position in range(length)
    )
    return DraftCounts(sum(drafts), sum(num for num, _ in lines), sum(accepted), accepted)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(rate) for rate in text.split(","))


def _speculation(data: Mapping[str, Any], name: str, told: Told) -> Speculation:
    """From the keys of a benchmark result. Raises `BadInput` if it has none of them."""
    tokens = data.get("spec_decode_acceptance_length")
    rates = data.get("spec_decode_per_position_acceptance_rates")
    if rates:
        key = f"{name}: spec_decode_per_position_acceptance_rates"
        cumulative = tuple(require_number(key, rate, 0, 1) for rate in require_entries(key, rates))
        return Speculation(len(cumulative), 1 + sum(cumulative), cumulative)
    if tokens is None:
        refuse_bare_acceptance(data, name)
        rule = "must tell what was accepted: give counters, log lines or a result with spec_decode_acceptance_length"
        raise BadInput(name, rule)
    length = told.speculation_length or _mean_draft(data, name)
    if length is None:
        length = told.need("speculation_length", name)
    return Speculation(length, require_number(f"{name}: spec_decode_acceptance_length", tokens, 1))


def _mean_draft(data: Mapping[str, Any], name: str) -> int | None:
    counts = [data.get(key) for key in ("spec_decode_draft_tokens", "spec_decode_num_drafts")]
    if None in counts:
        return None
    tokens, drafts = (require_number(f"{name}: spec_decode counts", count, 0, above=True) for count in counts)
    return round(tokens / drafts)
