"""What a policy's YAML file may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from experiments.adaptive import expected_times
from experiments.config import Count, Downweight
from experiments.planning import Plan
from experiments.strict_yaml import Section, parse_yaml, read_yaml, validate
from sim.adaptive import adaptive_from_dict
from sim.decider import Adaptive
from sim.errors import BadInput
from sim.policy import Fallback, LateBuild, Policy, PolicyTable, policy_from_dict, policy_table_from_dict


class AutoregressiveConfig(Section):
    """AR."""

    kind: Literal["ar"]


class SpeculativeConfig(Section):
    """SD."""

    kind: Literal["sd"]
    speculation_length: Annotated[int, Field(ge=0)]


class SpeculativeSpeculativeConfig(Section):
    """SSD."""

    kind: Literal["ssd"]
    speculation_length: Count
    fan_out_after_hit: tuple[Annotated[int, Field(ge=0)], ...]
    fan_out_after_miss: tuple[Annotated[int, Field(ge=0)], ...]
    fallback: Fallback = Fallback.DRAFT
    downweight: Downweight = 1.0
    on_late_build: LateBuild = LateBuild.WAIT


SinglePolicyConfig = Annotated[
    AutoregressiveConfig | SpeculativeConfig | SpeculativeSpeculativeConfig, Field(discriminator="kind")
]


class TableConfig(Section):
    """A policy for each range of batch sizes: `[1, {...}], [4, {...}]` changes at 4 rows."""

    kind: Literal["table"]
    entries: Annotated[tuple[tuple[Count, SinglePolicyConfig], ...], Field(min_length=1)]


POLICIES: Mapping[str, type[Section]] = {
    "ar": AutoregressiveConfig,
    "sd": SpeculativeConfig,
    "ssd": SpeculativeSpeculativeConfig,
    "table": TableConfig,
}
ADAPTIVE = ("running_statistics", "hill_climbing")


def load_policy(text: str, plan: Plan) -> Policy | PolicyTable | Adaptive:
    """A policy from the name of a YAML file, or given inline such as '{"kind": "sd", "speculation_length": 4}'.

    A single one, a table by batch size, or an adaptive choice, which is told the times of `plan` if the text has none.

    Raises `BadInput` naming the file (or `--policy`) and the key.
    """
    document = parse_yaml(text, "--policy") if text.lstrip().startswith("{") else read_yaml(Path(text))
    kind = document.data.get("kind")
    try:
        if kind in ADAPTIVE:
            return _adaptive(dict(document.data), plan)
        if not isinstance(kind, str) or kind not in POLICIES:
            raise BadInput("kind", f"must be one of {', '.join((*POLICIES, *ADAPTIVE))}", kind)
        data = validate(POLICIES[kind], document).model_dump(mode="json")
        return policy_table_from_dict(data) if kind == "table" else policy_from_dict(data)
    except BadInput as error:
        raise error if document.name in str(error) else BadInput(document.name, str(error)) from None


def _adaptive(data: dict[str, Any], plan: Plan) -> Adaptive:
    data.setdefault("most_candidates", plan.system.agreement.num_candidates)
    if data["kind"] == "running_statistics" and "times" not in data:
        grid = [data.get(name) or (1,) for name in ("speculation_lengths", "budgets")]
        longest, widest = (max((n for n in row if isinstance(n, int)), default=1) for row in grid)
        data["times"] = asdict(expected_times(plan.system, plan.workload, longest, max(1, widest)))
    return adaptive_from_dict(data)
