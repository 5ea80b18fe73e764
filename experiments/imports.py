"""From files of other engines to a file of numbers that a plan can start from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from calibration.importers.imported import Imported, Source, Told
from calibration.importers.logprobs import import_logprobs
from calibration.importers.sglang import import_sglang
from calibration.importers.ssd import import_ssd
from calibration.importers.vllm import import_vllm
from experiments.numbers import Numbers
from experiments.planning import best_engine
from sim.errors import BadInput
from sim.policy import SpeculativeSpeculative
from sim.simulate import predict

SCHEMA = 1
NUMBERS = "numbers.yaml"
LONGEST = 8  # speculation length that is searched, unless a run of the files has a longer one
BUDGETS = (8, 16, 24, 32)


class Format(StrEnum):
    """Whose files they are."""

    VLLM = "vllm"
    SGLANG = "sglang"
    SSD = "ssd"
    LOGPROBS = "logprobs"


IMPORTERS: Mapping[Format, Callable[[Sequence[Source], Told], Imported]] = {
    Format.VLLM: import_vllm,
    Format.SGLANG: import_sglang,
    Format.SSD: import_ssd,
    Format.LOGPROBS: import_logprobs,
}


def import_files(format_: Format, files: Sequence[Path], plain: Path | None, told: Told) -> Imported:
    """What the files tell, and `plain` of the same engine without speculation. Raises `BadInput` naming a file that
    cannot be read, or what is wrong with it."""
    if plain is not None and format_ is Format.LOGPROBS:
        raise BadInput("--ar", "goes with runs of an engine; log-probabilities tell no time", str(plain))
    sources = [_source(file, is_plain=False) for file in files]
    if plain is not None:
        sources.append(_source(plain, is_plain=True))
    return IMPORTERS[format_](sources, told)


def _source(file: Path, *, is_plain: bool) -> Source:
    try:
        return Source(file.name, file.read_text(encoding="utf-8"), is_plain)
    except FileNotFoundError:
        raise BadInput(str(file), "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(str(file), f"cannot be read ({error})") from None


def write_import(imported: Imported, files: Sequence[Path], folder: Path) -> None:
    """Write `numbers.yaml`, the agreement records it names, and a manifest with hashes of the files."""
    for name, record in imported.records.items():
        record.write(folder / name)
    (folder / NUMBERS).write_text(numbers_file(imported))
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    identity = {"engine": imported.engine, "files": hashes}
    manifest = {"schema": SCHEMA, "record": "import", "identity": identity, "imported": imported.to_dict()}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def predicted_runs(imported: Imported, numbers: Numbers) -> list[tuple[str, float, float]]:
    """Name, measured and predicted tokens/s of the runs that the files tell of: how well the numbers fit together."""
    engine = best_engine(numbers.workload, numbers.system)
    return [
        (
            run.policy.name,
            run.tokens_per_s,
            predict(run.policy, numbers.workload, numbers.system, engine=engine).tokens_per_s.value,
        )
        for run in imported.measured
    ]


def numbers_file(imported: Imported) -> str:
    """A file of numbers; comments say what was learned and what was not."""
    head = [f"Imported from files of {imported.engine}. What is known better can be put in its place."]
    head += [f"learned: {line}" for line in imported.how]
    head += [f"not learned: {line}" for line in imported.not_learned]
    sections: dict[str, Any] = {"schema": 1, "name": f"from-{imported.engine}"}
    sections |= imported.numbers() | {"search": _search(imported)}
    body = yaml.safe_dump(sections, sort_keys=False, default_flow_style=None, width=120)
    return "".join(f"# {line}\n" for line in head) + body


def _search(imported: Imported) -> dict[str, Any]:
    """A grid that holds the policies of the files' runs."""
    policies = [run.policy for run in imported.measured]
    longest = max([LONGEST, *(policy.speculation_length for policy in policies)])
    budgets = {sum(policy.fan_out_after_hit) for policy in policies if isinstance(policy, SpeculativeSpeculative)}
    return {
        "speculation_lengths": list(range(1, longest + 1)),
        "budgets": sorted({*BUDGETS, *budgets}),
        "fan_out_rules": ["uniform", "geometric", "exact"],
        "fallbacks": ["draft", "none"],
    }
