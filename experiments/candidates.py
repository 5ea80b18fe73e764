"""All candidates of a search as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.searching import Answer
from sim.objective import tpot_s
from sim.policy import Policy
from sim.search import SearchResult
from sim.simulate import Prediction

COLUMNS = {
    "batch_size": "int64",
    "rank": "int64",
    "name": "string",
    "kind": "string",
    "speculation_length": "int64",
    "fan_out_after_hit": "string",
    "fan_out_after_miss": "string",
    "fallback": "string",
    "downweight": "double",
    "on_late_build": "string",
    "engine": "string",
    "tokens_per_s": "double",
    "tokens_per_s_low": "double",
    "tokens_per_s_high": "double",
    "ms_per_token": "double",
    "num_devices": "int64",
    "mean_acceptance_length": "double",
    "hit_rate": "double",
    "of_first": "double",
    "is_tie": "bool",
    "is_recommended": "bool",
    "is_confirmed": "bool",
    "infeasible": "string",
}


def candidate_rows(answer: Answer) -> list[dict[str, Any]]:
    """A row per candidate and batch size, best first; those that cannot run come last, with the reason."""
    rows = []
    for found in answer.batches.found.values():
        rows += [_predicted(rank, p, found, answer) for rank, p in enumerate(found.ranked, 1)]
        rows += [_identity(policy, found.batch_size) | {"infeasible": why} for policy, why in found.infeasible]
    return rows


def _identity(policy: Policy, batch_size: int) -> dict[str, Any]:
    settings = {
        key: "/".join(map(str, value)) if isinstance(value, list) else value for key, value in policy.to_dict().items()
    }
    length = {"speculation_length": policy.speculation_length}
    return {"batch_size": batch_size, "name": policy.name, "is_recommended": False} | length | settings


def _predicted(rank: int, prediction: Prediction[Policy], found: SearchResult, answer: Answer) -> dict[str, Any]:
    rate, policy = prediction.tokens_per_s.to_dict(), prediction.policy
    length, hits = prediction.mean_acceptance_length, prediction.hit_rate
    contrast = found.contrasts[policy]
    return _identity(policy, found.batch_size) | {
        "rank": rank,
        "engine": prediction.engine,
        "tokens_per_s": rate["value"],
        "tokens_per_s_low": rate["low"],
        "tokens_per_s_high": rate["high"],
        "ms_per_token": 1e3 * tpot_s(prediction, found.batch_size),
        "num_devices": answer.batches.point(prediction, found.batch_size).num_devices,
        "mean_acceptance_length": None if length is None else length.value,
        "hit_rate": None if hits is None else hits.value,
        "of_first": contrast.ratio,
        "is_tie": contrast.is_tie,
        "is_recommended": prediction is found.recommended,
        "is_confirmed": policy in found.confirmed or prediction.engine == "exact",
    }


def write_candidates(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """`candidates.parquet` and `candidates.csv`, columns as of `COLUMNS`; what does not apply is null."""
    import pyarrow as pa
    from pyarrow import csv
    from pyarrow import parquet as pq

    schema = pa.schema([(name, pa.type_for_alias(of)) for name, of in COLUMNS.items()])
    table = pa.Table.from_pylist(list(rows), schema=schema)
    pq.write_table(table, folder / "candidates.parquet")
    csv.write_csv(table, folder / "candidates.csv")
