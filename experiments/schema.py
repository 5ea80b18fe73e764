"""The JSON schema of the files that people write."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter

from experiments.config import REDUCED, ExperimentConfig
from experiments.numbers import NumbersConfig
from experiments.policies import SinglePolicyConfig, TableConfig
from experiments.sweep import SWEEP


class FileKind(StrEnum):
    """What a YAML file is for."""

    EXPERIMENT = "experiment"
    NUMBERS = "numbers"
    POLICY = "policy"


def schema(kind: FileKind) -> dict[str, Any]:
    """For editors and checkers; what must fit together beyond it, only reading the file tells."""
    described: dict[FileKind, Any] = {
        FileKind.EXPERIMENT: ExperimentConfig,
        FileKind.NUMBERS: NumbersConfig,
        FileKind.POLICY: SinglePolicyConfig | TableConfig,
    }
    found = TypeAdapter(described[kind]).json_schema(by_alias=True)
    if kind is FileKind.EXPERIMENT:
        values = "Values in place of those of the same name outside, used with --reduced."
        found["properties"][REDUCED] = {"type": "object", "description": values}
    if kind is not FileKind.POLICY:
        lists = "Lists of values for `saguaro sweep`, by the full key of a setting, such as times.draft_step_ms."
        values_of = {"type": "array", "minItems": 1}
        found["properties"][SWEEP] = {"type": "object", "description": lists, "additionalProperties": values_of}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
