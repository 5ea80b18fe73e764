"""Adaptive choices of the policy, by the words of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from sim.beliefs import ExpectedTimes
from sim.errors import BadInput, require_mapping
from sim.hill_climbing import HillClimbing
from sim.parametric import HitCurve
from sim.running_statistics import RunningStatistics


def adaptive_from_dict(data: Mapping[str, Any]) -> RunningStatistics | HillClimbing:
    """Inverse of `to_dict` of a configuration. Raises `BadInput` on an unknown kind or key."""
    given = dict(require_mapping("adaptive", data))
    kind = given.pop("kind", None)
    classes: dict[str, type[RunningStatistics | HillClimbing]] = {
        "running_statistics": RunningStatistics,
        "hill_climbing": HillClimbing,
    }
    if not isinstance(kind, str) or kind not in classes:
        raise BadInput("adaptive.kind", f"must be one of {', '.join(classes)}", kind)
    known = fields(classes[kind])
    required = [entry.name for entry in known if entry.default is MISSING and entry.default_factory is MISSING]
    require_mapping(kind, given, [entry.name for entry in known], required)
    if "times" in given:
        given["times"] = ExpectedTimes.from_dict(given["times"])
    for name in ("after_hit", "after_miss"):
        if name in given:
            given[name] = HitCurve.from_dict(given[name], name)
    return classes[kind](**given)
