"""What arrives: requests of a closed loop of clients, or of an open stream, and how many are decoded at a time.

A request is an arrival, a prompt of the agreement record, a luck of its own, and the number of tokens that its text is
cut at. All are drawn from the seed and from nothing else: every policy under one seed meets the same requests. A luck
is one of a bounded pool of variants of each prompt (`num_variants`): the outcome stream has numbers for each variant
and token, and requests draw variants, so that repeats of a prompt differ and no request needs tables of its own. What a
seed's pool leaves to chance is no more than a run over all prompts, repeated as often as there are variants, would.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from sim.errors import BadInput, require_count, require_entries, require_number
from sim.replay import Replay
from sim.streams import seed_sequence

LUCK_ENTRIES = 1 << 18  # (variant, prompt, position) entries in an outcome table: some MB for each drafting
MOST_VARIANTS = 512  # of a prompt
BLOCK = 1024  # draws made at a time
ARRIVALS, PROMPTS = 3, 4  # streams of a seed, after those of `sim.streams.Streams`


class Shape(NamedTuple):
    """Prompt and length of a request. Without a prompt one is drawn; without a number of output tokens the request
    ends where the text of the record does, which ends it earlier in any case."""

    prompt: int | None = None
    output_tokens: int | None = None


class Request(NamedTuple):
    """What is decoded: `luck` is its variant's number times the number of prompts, plus the prompt."""

    prompt: int
    luck: int
    output_tokens: int | None


class TracedArrival(NamedTuple):
    """One line of a trace of requests."""

    arrival_s: float
    prompt: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class Poisson:
    """Arrivals at independent exponential intervals."""

    rate_per_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate_per_s", require_number("rate_per_s", self.rate_per_s, 0, above=True))


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients, each with one request at a time: a request that has ended is replaced at once until there
    have been `num_requests`.

    `max_batch_size` rows at most are decoded together on a target; None leaves it to the number of clients. Requests
    take their `shapes` in turn; without, each is a text of the record.
    """

    concurrency: int
    num_requests: int
    max_batch_size: int | None = None
    shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        shapes = [_line("load.shapes", shape, 2) for shape in require_entries("load.shapes", self.shapes)]
        object.__setattr__(self, "shapes", tuple(_checked_shape("load.shapes", *shape) for shape in shapes))
        for name in ("concurrency", "num_requests", "max_batch_size"):
            if name != "max_batch_size" or self.max_batch_size is not None:
                object.__setattr__(self, name, require_count(f"load.{name}", getattr(self, name), 1))

    @property
    def name(self) -> str:
        return f"closed loop of {self.concurrency}"

    @property
    def most_rows(self) -> int:
        """Rows that a target may decode together."""
        return self.concurrency if self.max_batch_size is None else self.max_batch_size

    def requests(self, replay: Replay, seed: int) -> Iterator[Request]:
        """All requests in order."""
        return islice(_requests(replay, seed, self.shapes), self.num_requests)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "kind": "closed",
            "concurrency": self.concurrency,
            "num_requests": self.num_requests,
            "max_batch_size": self.most_rows,
            "shapes": [list(shape) for shape in self.shapes],
        }


@dataclass(frozen=True)
class OpenLoop:
    """Requests that arrive whether or not others have ended: `Poisson`, or as a trace says, in order of time.

    `num_requests` of them arrive; None, for a trace only, means all. `max_batch_size` rows at most are decoded together
    on a target.
    """

    arrivals: Poisson | tuple[TracedArrival, ...]
    max_batch_size: int
    num_requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "num_requests"):
            if name != "num_requests" or self.num_requests is not None:
                object.__setattr__(self, name, require_count(f"load.{name}", getattr(self, name), 1))
        if isinstance(self.arrivals, Poisson):
            if self.num_requests is None:
                raise BadInput("load.num_requests", "must be given for Poisson arrivals")
            return
        trace = tuple(_traced(line) for line in require_entries("load.arrivals", self.arrivals))
        if not trace or len(trace) < (self.num_requests or 0):
            raise BadInput("load.arrivals", f"must hold at least {self.num_requests or 1} arrivals", len(trace))
        object.__setattr__(self, "arrivals", trace[: self.num_requests])
        object.__setattr__(self, "num_requests", len(self._trace))
        times = [line.arrival_s for line in self._trace]
        if any(after < before for before, after in pairwise(times)):
            raise BadInput("load.arrivals", "must be in order of time")

    @property
    def name(self) -> str:
        return f"open loop at {self.rate_per_s:g} requests/s"

    @property
    def _trace(self) -> tuple[TracedArrival, ...]:
        return () if isinstance(self.arrivals, Poisson) else self.arrivals

    @property
    def most_rows(self) -> int:
        """Rows that a target may decode together."""
        return self.max_batch_size

    @property
    def rate_per_s(self) -> float:
        """Offered requests per second; of a trace, those after the first over the time in which they arrived."""
        if isinstance(self.arrivals, Poisson):
            return self.arrivals.rate_per_s
        span_s = self._trace[-1].arrival_s - self._trace[0].arrival_s
        return (len(self._trace) - 1) / span_s if span_s else math.inf

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of the requests, in turn; () where each is a text of the record."""
        return tuple(Shape(line.prompt, line.output_tokens) for line in self._trace)

    def requests(self, replay: Replay, seed: int) -> Iterator[Request]:
        """All requests in order."""
        return islice(_requests(replay, seed, self.shapes), self.num_requests)

    def arrival_times(self, seed: int) -> Iterator[float]:
        """Seconds at which they arrive."""
        if not isinstance(self.arrivals, Poisson):
            return iter([line.arrival_s for line in self._trace])
        return islice(accumulate(_intervals(self.arrivals.rate_per_s, seed)), self.num_requests)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        poisson = isinstance(self.arrivals, Poisson)
        return {
            "kind": "open",
            "rate_per_s": self.rate_per_s if math.isfinite(self.rate_per_s) else None,
            "num_requests": self.num_requests,
            "max_batch_size": self.max_batch_size,
            "arrivals": "poisson" if poisson else "trace",
            "trace_sha256": None if poisson else _sha256([tuple(line) for line in self._trace]),
        }


Load = ClosedLoop | OpenLoop


def num_variants(replay: Replay) -> int:
    """Lucks of each prompt, whatever the load: as many as `MOST_VARIANTS` and `LUCK_ENTRIES` allow."""
    return max(1, min(MOST_VARIANTS, LUCK_ENTRIES // max(1, replay.num_prompts * replay.width)))


def _requests(replay: Replay, seed: int, shapes: tuple[Shape, ...]) -> Iterator[Request]:
    """Endless. A prompt is drawn for each request, given ones included: the next requests are the same with or without
    them."""
    for shape in shapes:
        _check_shape(shape, replay)
    stream = _stream(seed, PROMPTS)
    sizes = (replay.num_prompts, num_variants(replay))
    draws = chain.from_iterable(stream.integers(sizes, size=(BLOCK, 2)).tolist() for _ in iter(int, 1))
    for (prompt, variant), shape in zip(draws, cycle(shapes or (Shape(),)), strict=False):
        of = prompt if shape.prompt is None else shape.prompt
        yield Request(of, variant * replay.num_prompts + of, shape.output_tokens)


def _check_shape(shape: Shape, replay: Replay) -> None:
    if shape.prompt is not None and not 0 <= shape.prompt < replay.num_prompts:
        raise BadInput("load: prompt", f"must be in 0..{replay.num_prompts - 1}, those of the record", shape.prompt)
    if shape.output_tokens is not None and not 1 <= shape.output_tokens <= replay.cap:
        raise BadInput("load: output_tokens", f"must be in 1..{replay.cap}, max_new_tokens", shape.output_tokens)


def _intervals(rate_per_s: float, seed: int) -> Iterator[float]:
    stream = _stream(seed, ARRIVALS)
    return chain.from_iterable((stream.standard_exponential(BLOCK) / rate_per_s).tolist() for _ in iter(int, 1))


def _sha256(lines: list[tuple[float | int | None, ...]]) -> str:
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _stream(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng(seed_sequence(seed, (number,)))


def _traced(line: object) -> TracedArrival:
    arrival_s, *shape = _line("load.arrivals", line, 3) or (None,)
    arrival_s = require_number("load.arrivals: arrival_s", arrival_s, 0)
    return TracedArrival(arrival_s, *_checked_shape("load.arrivals", *shape))


def _checked_shape(name: str, prompt: object = None, output_tokens: object = None) -> Shape:
    return Shape(
        None if prompt is None else require_count(f"{name}: prompt", prompt, 0),
        None if output_tokens is None else require_count(f"{name}: output_tokens", output_tokens, 1),
    )


def _line(name: str, line: object, most: int) -> tuple[Any, ...]:
    entries = require_entries(name, line)
    if len(entries) > most:
        raise BadInput(name, f"must have lines of at most {most} entries", list(entries))
    return entries
