"""Random policies and systems for the tests of the engines."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from sim.latency import LatencyModel
from sim.placement import Placement, Split
from sim.policy import Autoregressive, Fallback, LateBuild, Policy, Speculative, SpeculativeSpeculative
from sim.system import System
from tests.sim.toy import cut_at, markov, record_of, system_of

MOST_ROWS = 8


def batched(system: System, per_row_s: float) -> System:
    """The system with batches of up to `MOST_ROWS` rows: operations take `per_row_s` more for each further row."""
    tables = {}
    for key, table in system.latency.operations.items():
        more_s = per_row_s * (MOST_ROWS - 1)
        knots = {
            width: tuple((context, location_s + more_s) for context, location_s in row)
            for width, row in table.knots.items()
        }
        tables[key] = replace(table, batched={MOST_ROWS: knots})
    return replace(system, latency=LatencyModel(tables))


@st.composite
def policies(draw) -> Policy:
    K = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(("ar", "sd", "ssd", "ssd", "ssd", "ssd")))
    if kind != "ssd":
        return Autoregressive() if kind == "ar" else Speculative(K)
    fallback = draw(st.sampled_from(list(Fallback)))
    fan_out = st.integers(0, 4)
    return SpeculativeSpeculative(
        K,
        tuple(draw(fan_out) for _ in range(K + 1)),
        tuple(draw(fan_out) for _ in range(K + 1 if fallback is not Fallback.NONE else 1)),
        fallback,
        downweight=draw(st.sampled_from((1.0, 1.0, 0.5))),
        on_late_build=draw(st.sampled_from(list(LateBuild))),
    )


@st.composite
def placements(draw, most_targets: int = 1) -> Placement:
    return Placement(
        num_draft_devices=draw(st.sampled_from((1, 1, 1, 2, 3))),
        split=draw(st.sampled_from(list(Split))),
        num_targets=draw(st.integers(1, most_targets)),
        transfer_latency_s=draw(st.sampled_from((0.0, 0.0, 0.001, 0.004))),
        transfer_bytes_per_s=draw(st.sampled_from((float("inf"), 1e4))),
        distribution_bytes=draw(st.sampled_from((0, 24))),
    )


@st.composite
def systems(draw, *, spread: float | None = None, most_targets: int = 1) -> System:
    """12 texts of at most 20 tokens; with `spread` 0 no duration varies."""
    seed = draw(st.integers(0, 50))
    record = record_of(*markov(seed), num_prompts=12, length=draw(st.integers(2, 20)), seed=seed + 1)
    if draw(st.booleans()):
        record = cut_at(record, stop=5)
    milliseconds = st.floats(0.1, 20).map(lambda value: value / 1000)
    spread = draw(st.floats(0, 0.5)) if spread is None else spread
    system = system_of(
        record,
        verify_s=draw(milliseconds),
        verify_per_token_s=draw(milliseconds) / 10,
        draft_step_s=draw(milliseconds),
        glue_s=draw(milliseconds),
        tree_step_s=draw(milliseconds),
        host_s=draw(milliseconds) / 10,
        residuals=(1 - spread, 1.0, 1 + spread),
        contention=draw(st.floats(1, 1.5)),
    )
    placement = draw(placements(most_targets))
    overlaps = placement.num_targets > 1 or draw(st.booleans())
    return replace(batched(system, draw(milliseconds) / 5), overlaps=overlaps, placement=placement)


@st.composite
def seen_in_runs(draw, system: System) -> System:
    """The system with residuals that AR and SSD were seen to have."""
    seen = st.tuples(st.floats(0.5, 2), st.floats(0.5, 2))
    in_situ = {
        kind: {key: draw(seen) for key in system.latency.operations if draw(st.booleans())} for kind in ("ar", "ssd")
    }
    return replace(system, in_situ=in_situ)


def bent(system: System) -> System:
    """The system with operations that take longer on more KV entries, not in proportion."""
    factors = {0: 1.0, 9: 1.3, 17: 1.4, 4096: 9.0}

    def bend(knots):
        return {
            width: tuple((at, factor * row[0][1]) for at, factor in factors.items()) for width, row in knots.items()
        }

    tables = {
        key: replace(table, knots=bend(table.knots), batched={b: bend(knots) for b, knots in table.batched.items()})
        for key, table in system.latency.operations.items()
    }
    return replace(system, latency=LatencyModel(tables))
