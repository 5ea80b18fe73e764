"""SGLang: the lines that `python -m sglang.bench_serving` appends to its output file.

Minimal input: a line of a server with speculation, with `mean_tpot_ms`, `output_throughput` (or `max_concurrency`) and
`accept_length`. The last is the server's average number of tokens that a verification step emits, its bonus token
included, since the server was started: it lies between 1 and K + 1. K is the line's own
`server_info.speculative_num_steps` or must be told. A line without `accept_length`, in the same file or as a plain
source, is a run without speculation and tells the autoregressive step.

Rounds that verify a tree (`speculative_eagle_topk` above 1) are refused: their acceptance length says nothing about a
chain of draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calibration.importers.imported import Imported, Source, Told, json_objects, refuse_bare_acceptance
from calibration.importers.serving_run import from_runs, serving_run
from calibration.importers.speculation import Speculation
from sim.errors import BadInput, require_number

Line = tuple[str, dict[str, Any]]


def import_sglang(sources: Sequence[Source], told: Told) -> Imported:
    """Raises `BadInput` naming the file and the key, or if there is not one run with speculation."""
    plain: list[Line] = []
    speculating: list[Line] = []
    for source in sources:
        for number, data in enumerate(json_objects(source), 1):
            line = (f"{source.name}, line {number}", data)
            (speculating if _speculates(*line, is_plain=source.is_plain) else plain).append(line)
    if len(speculating) != 1 or len(plain) > 1:
        rule = "must be one line with accept_length and at most one without; take others out of the file"
        raise BadInput("runs", rule, f"{len(speculating)} and {len(plain)}")
    name, data = speculating[0]
    length = require_number(f"{name}: accept_length", data["accept_length"], 1)
    return from_runs(
        "sglang",
        serving_run(plain[0][1], plain[0][0], told) if plain else None,
        serving_run(data, name, told),
        Speculation(_speculation_length(data, name, told), length),
        told,
        tuple(_caveats(data)),
    )


def _caveats(data: Mapping[str, Any]) -> Iterator[str]:
    yield "acceptance by position: one rate for all of them stands for it"
    if str(data.get("dataset_name", "")).startswith("random"):
        yield "acceptance on real texts: these prompts were random tokens, whose acceptance says little about others"


def _speculates(name: str, data: Mapping[str, Any], *, is_plain: bool) -> bool:
    if data.get("accept_length") is None:
        refuse_bare_acceptance(data, name)
        return False
    if is_plain:
        raise BadInput(f"{name}: accept_length", "must be empty in a run without speculation", data["accept_length"])
    return True


def _speculation_length(data: Mapping[str, Any], name: str, told: Told) -> int:
    server = data.get("server_info")
    settings = server if isinstance(server, Mapping) else {}
    width = settings.get("speculative_eagle_topk")
    if width not in (None, 1):
        raise BadInput(
            f"{name}: server_info.speculative_eagle_topk", "must be 1: a tree tells nothing of chains", width
        )
    if told.speculation_length is None and isinstance(settings.get("speculative_num_steps"), int):
        return int(settings["speculative_num_steps"])
    return told.need("speculation_length", name)
