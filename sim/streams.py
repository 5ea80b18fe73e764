"""One seeded random stream per component, so that policies under one seed meet the same text and the same luck."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.errors import require_count
from sim.replay import Replay
from sim.trace import Lane


@dataclass(frozen=True)
class Streams:
    """`outcomes` decides acceptance and hits by (prompt, position); `noise` the durations of a lane's operations."""

    outcomes: np.random.Generator
    noise: dict[Lane, np.random.Generator]

    @classmethod
    def of(cls, seed: int) -> Streams:
        outcomes, target, draft = (np.random.default_rng(child) for child in seed_sequence(seed).spawn(3))
        return cls(outcomes, {Lane.TARGET: target, Lane.DRAFT: draft})


def seed_sequence(seed: object, spawn_key: tuple[int, ...] = ()) -> np.random.SeedSequence:
    """Everything random comes of a seed by one of these. Raises `BadInput` unless it is an integer >= 0."""
    return np.random.SeedSequence(require_count("seed", seed, 0), spawn_key=spawn_key)


def outcome_uniforms(replay: Replay, stream: np.random.Generator) -> NDArray[np.float64]:
    """(2, num_prompts, width): one number per token decides its acceptance, another whether it was prepared.

    They do not depend on the length cap.
    """
    return stream.random((2, replay.num_prompts, replay.width))


def replication_seeds(seed: int, num: int, first: int = 0) -> list[int]:
    """Number `first` to `first` + `num` - 1 of the endless row of distinct seeds that belongs to `seed`.

    However many are drawn, and in however many portions, seed number i of the row is the same.
    """
    wanted = first + num
    seeds: dict[int, None] = {}
    num_words = wanted
    while len(seeds) < wanted:  # a word that came up before is skipped
        seeds = dict.fromkeys(seed_sequence(seed).generate_state(num_words, dtype=np.uint64).tolist())
        num_words += wanted - len(seeds)
    return list(seeds)[first:wanted]
