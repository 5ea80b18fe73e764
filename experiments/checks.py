"""Checks of the executor on this machine, for the command line: the emitted law, and what follows faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from experiments.bench import model_libraries

if TYPE_CHECKING:
    from executor.fault_check import Aftermath
    from executor.law_check import Verdict

LAW_HEAD = ("case", "settings", "trials", "total variation", "threshold", "verdict")
FAULTS_HEAD = ("fault", "on failure", "what happened", "after, s", "tokens lost", "verdict")

Progress = Callable[[str], None]


def run_law_check(progress: Progress) -> list[Verdict]:
    """Every lossless case, then every known-wrong variant."""
    with model_libraries():
        from executor.law_check import CASES, CONTROLS, check_law
    return list(check_law((*CASES, *CONTROLS), progress=progress))


def law_rows(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Cells under `LAW_HEAD`, a row for each comparison."""
    return [
        (
            verdict.case.name,
            c.setting_in_words,
            f"{c.num_trials}",
            f"{c.total_variation:.4f}",
            f"{c.threshold:.4f}",
            _law_verdict(verdict),
        )
        for verdict in verdicts
        for c in verdict.comparisons
    ]


def law_in_words() -> str:
    """What the thresholds mean."""
    from executor.law_check import FALSE_ALARM

    return f"a lossless decoder exceeds a threshold with probability {FALSE_ALARM:g}; known faults must exceed theirs"


def _law_verdict(verdict: Verdict) -> str:
    if verdict.case.is_control:
        return "wrong, and caught" if verdict.is_right else "WRONG, NOT CAUGHT"
    return "lossless" if verdict.is_right else "NOT LOSSLESS"


def law_to_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The same, JSON-safe."""
    from executor.law_check import FALSE_ALARM

    return {
        "false_alarm_probability": FALSE_ALARM,
        "is_right": all(verdict.is_right for verdict in verdicts),
        "cases": [
            {
                "case": verdict.case.name,
                "is_control": verdict.case.is_control,
                "is_right": verdict.is_right,
                "comparisons": [asdict(c) for c in verdict.comparisons],
            }
            for verdict in verdicts
        ],
    }


def run_fault_check(pair: str, progress: Progress) -> list[Aftermath]:
    """Every fault, in runs that end with their draft and in runs that go on without it."""
    with model_libraries():
        from executor.fault_check import check_faults
    return list(check_faults(pair, progress))


def fault_rows(aftermaths: Sequence[Aftermath]) -> list[tuple[str, ...]]:
    """Cells under `FAULTS_HEAD`."""
    return [
        (
            a.fault,
            a.on_draft_failure,
            a.what_happened,
            f"{a.seconds:.2f}",
            "-" if a.tokens_lost is None else f"{a.tokens_lost}",
            "right" if a.is_right else "WRONG",
        )
        for a in aftermaths
    ]


def faults_to_json(aftermaths: Sequence[Aftermath]) -> dict[str, Any]:
    """The same, JSON-safe."""
    return {"is_right": all(a.is_right for a in aftermaths), "faults": [asdict(a) for a in aftermaths]}
