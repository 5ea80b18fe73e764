"""What readers and reviewers asked about SSD, answered by experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.paper import (
    adaptive_control,
    compute_and_memory,
    hit_rates,
    long_lived_cache,
    outcome_rules,
    pair_diversity,
)
from experiments.paper.section import Section

QUESTIONS: Mapping[str, Callable[[], Section]] = {
    "hit rates": hit_rates.section,
    "rules that predict outcomes": outcome_rules.section,
    "which pairs SSD is for": pair_diversity.section,
    "long-lived speculation caches": long_lived_cache.section,
    "adaptive control": adaptive_control.section,
    "compute and memory": compute_and_memory.section,
}  # by what is shown while each is answered
