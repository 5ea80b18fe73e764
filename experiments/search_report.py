"""The report of a search: the answer first, then what it was chosen from, what it hangs on, and how it was made."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from calibration.digest import digest
from calibration.profile import flattened
from calibration.report import MAP_DEFINITION, WIN_MAP, Block, Picture, Section, Table, in_markdown
from experiments.candidates import candidate_rows, write_candidates
from experiments.planning import Plan
from experiments.searching import (
    FRONT_HEAD,
    RANGES_HEAD,
    SENSITIVITY_HEAD,
    Answer,
    Question,
    found_table,
    front_rows,
    ranges_rows,
    sensitivity_rows,
    what_if_in_words,
)
from experiments.served import SERVED_HEAD, served_row
from experiments.stages import Stages
from experiments.uncertainty import SHARE_INSIDE
from sim.front import Point
from sim.search import KINDS
from sim.ties import ERROR_RATE

SCHEMA = 1
LIBRARIES = ("numpy", "scipy", "simpy")

RATES_BY_LENGTH = "rates_by_length"
LATENCY_THROUGHPUT = Picture(
    "latency_throughput", "Time per token of a row against tokens/s of all rows, the best of every kind and batch size"
)
WHAT_IF = Picture("what_if", "Tokens/s of the recommended policy if one quantity is 10 % smaller or larger")

DEFINITIONS = [
    "**AR, SD, SSD**: plain decoding; a draft model proposes K tokens that the target verifies together; the same, "
    "while the draft prepares the next speculation for several outcomes of the verification in progress.",
    "**K**: speculation length, draft tokens of a verification. **F=a/b/c**: fan-outs, the bonus tokens prepared for "
    "0, 1, 2 ... accepted tokens; after a bar those of rounds that follow a miss. The last word is the fallback of a "
    "miss: `draft` drafts anew, `none` decodes a token plainly.",
    "**tokens/s**: decode only, of all rows of one target together; the prefill and its token are left out.",
    "**of the first, %**: what is maximised, over that of the first policy.",
    "**tie**: not significantly worse than the first over the same texts; all ties hold the best policy with "
    f"probability {100 * (1 - ERROR_RATE):.0f} % (Bonferroni over all comparisons). The simplest of the ties is "
    "recommended.",
    "**brackets**: 95 % intervals over texts, or over batches of them. They hold the spread of the texts, not the "
    "uncertainty of the times. Without brackets every text is alike, and the rate is exact for what was stated.",
    f"**in {100 * SHARE_INSIDE:.0f} % of draws**: every number that is only known to lie in a range is drawn from it, "
    "all at once and independently; the policy's tokens/s lie there in so many draws.",
    "**emitted / round**: tokens that a round commits, the target's own token included. **hit rate**: look-ups whose "
    "outcome had a prepared speculation.",
    "**ms per token**: what a row waits for a token, counted until the last row of its batch ends. **per device**: "
    "tokens/s over all devices that the policy uses, those of the draft included. **front**: no other point is better "
    "in one and no worse in the other (Pareto).",
    "**lost, %**: share of the rate that the recommended policy leaves to the best one in that case.",
    MAP_DEFINITION,
]


def title(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['identity']['source']}: which policy to decode with"


def sections(answer: Answer, plan: Plan, manifest: Mapping[str, Any]) -> list[Section]:
    """Everything below the answer, for any renderer."""
    parts = [
        Section("Policies", *_policies(answer)),
        Section("Latency against throughput", *_front(answer)),
        Section("Where SSD wins", *_map(answer)),
        Section("If a quantity is wrong", *_what_if(answer)),
    ]
    if answer.moved is not None:
        blocks = [f"{answer.moved.in_words()}.", f"{answer.moved.ranges_in_words()}."]
        parts.append(Section("What is not known exactly", *blocks, Table(RANGES_HEAD, ranges_rows(answer.moved))))
    if answer.goodput is not None:
        served = [served_row(report) for report in answer.goodput.ranked]
        parts.insert(0, Section("Under the load", Table(SERVED_HEAD, served)))
    assumed = list(plan.assumptions) or ["Nothing: the system was measured."]
    return [
        *parts,
        Section("What was assumed", assumed),
        Section("Definitions", DEFINITIONS),
        Section("How it was made", _manifest_table(manifest)),
    ]


def _policies(answer: Answer) -> list[Block]:
    found = answer.found
    setting = json.dumps(answer.recommended.to_dict())
    picture = "Tokens/s of the best policy of every kind and speculation length" + _error_bars(answer)
    blocks: list[Block] = [
        f"To run what is recommended: `--policy '{setting}'`; `saguaro export` writes it for other engines.",
        Table(*found_table(answer)),
        f"{found.num_policies} policies at batches of {found.batch_size}: {found.stopped}. The table shows AR, and the "
        "best SD and SSD of every length; all are in `candidates.csv`.",
        Picture(RATES_BY_LENGTH, picture),
    ]
    if found.infeasible:
        blocks.append("Cannot run or be predicted:")
        blocks.append([f"{reason} ({number} policies)" for reason, number in _reasons(answer)])
    return blocks


def _error_bars(answer: Answer) -> str:
    if answer.moved is not None:
        return f"; error bars: {100 * SHARE_INSIDE:.0f} % of the draws of what is not known exactly"
    return "; error bars: 95 % intervals over texts" if answer.found.recommended.tokens_per_s.n > 1 else ""


def _reasons(answer: Answer) -> list[tuple[str, int]]:
    return Counter(reason for _, reason in answer.found.infeasible).most_common()


def _front(answer: Answer) -> list[Block]:
    batches = answer.batches
    refused: list[Block] = [[f"Batches of {size}: {reason}" for size, reason in batches.refused.items()]]
    table = Table(FRONT_HEAD, front_rows(batches))
    if len(batches.points) == 1:
        only = "One batch size could be searched" if batches.refused else "One batch size was searched"
        return [f"{only}; `--batch-sizes 1,2,4` makes a front of several.", table, *(refused if refused[0] else [])]
    return [LATENCY_THROUGHPUT, table, *(refused if refused[0] else [])]


def _map(answer: Answer) -> list[Block]:
    if answer.win_map is None:
        return [f"There is no map: {answer.no_map}."]
    return [f"{answer.win_map.in_words()}.", WIN_MAP]


def _what_if(answer: Answer) -> list[Block]:
    assert answer.sensitivity is not None
    rows = sensitivity_rows(answer.sensitivity)
    return [f"{what_if_in_words(answer.sensitivity)}.", WHAT_IF, Table(SENSITIVITY_HEAD, rows)]


def _manifest_table(manifest: Mapping[str, Any]) -> Table:
    rows = [[key, str(manifest[key])] for key in ("date", "version", "digest", "digest_of_result")]
    for part in ("identity", "settings", "libraries"):
        rows += [[f"{part}: {key}", str(value)] for key, value in manifest[part].items()]
    rows += [[f"time of stage: {name}", f"{seconds:.1f} s"] for name, seconds in manifest["durations_s"].items()]
    return Table(["what", "value"], rows)


# --------------------------------------------------------------------------------------------------------------- write


def search_manifest(question: Question, plan: Plan, source: Path, answer: Answer, stages: Stages) -> dict[str, Any]:
    """On what and how an answer was made. `digest` is of what was asked, `digest_of_result` of what was found: equal if
    these are, whatever the machine and the number of workers."""
    content = plan.numbers.document.data if plan.numbers else hashlib.sha256(source.read_bytes()).hexdigest()
    settings = question.to_dict()
    found = answer.to_dict(plan) | {"seconds": None}
    own_version = version("saguaro-planner")
    return {
        "schema": SCHEMA,
        "record": "search",
        "version": own_version,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "digest": digest({"version": own_version, "settings": settings, "source": content}),
        "digest_of_result": digest(found),
        "identity": {"source": source.name} | flattened(plan.system.identity),
        "settings": settings | ({"numbers": plan.numbers.document.data} if plan.numbers else {}),
        "libraries": {name: version(name) for name in LIBRARIES},
        "durations_s": stages.durations_s,
    }


def write_search(folder: Path, answer: Answer, plan: Plan, manifest: Mapping[str, Any]) -> None:
    """`search.json`, `candidates.csv` and `.parquet`, `manifest.json`, the figures and the two reports. The answer must
    hold the sensitivity, and the map or why there is none."""
    from experiments.html_report import note, page, warning

    draw(answer, folder / "figures")
    parts = sections(answer, plan, manifest)
    write_candidates(candidate_rows(answer), folder)
    answered, notes = f"{answer.in_words()}.", [f"{remark}." for remark in answer.remarks()[:1]]
    front = [answered, *(f"**{doubt}**" for doubt in plan.doubts), *(f"**Note:** {text}" for text in notes)]
    (folder / "report.md").write_text(in_markdown(title(manifest), front, parts))
    beside = [*map(warning, plan.doubts), *map(note, notes)]
    (folder / "report.html").write_text(page(title(manifest), answered, beside, parts, folder / "figures"))
    for name, content in (("search", answer.to_dict(plan)), ("manifest", manifest)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, allow_nan=False))


def draw(answer: Answer, folder: Path) -> None:
    """The figures of the report."""
    from experiments.figures import latency_throughput, rates_by_length, what_if, win_map

    rates_by_length(curves(answer), folder / f"{RATES_BY_LENGTH}.svg")
    if len(answer.batches.points) > 1:
        latency_throughput(places(answer), folder / f"{LATENCY_THROUGHPUT.name}.svg")
    if answer.win_map is not None:
        win_map(answer.win_map.to_dict(), folder / f"{WIN_MAP.name}.svg")
    if answer.sensitivity is not None:
        what_if(answer.sensitivity.to_dict(), folder / f"{WHAT_IF.name}.svg")


def curves(answer: Answer) -> dict[str, list[dict[str, Any]]]:
    """What `figures.rates_by_length` draws; error bars are those of the draws where there are any, else over texts."""
    found, moved = answer.found, answer.moved
    ends = {} if moved is None else dict(zip(moved.policies, moved.intervals.tolist(), strict=True))
    drawn: dict[str, list[dict[str, Any]]] = {}
    for prediction in sorted(found.best_of_each_length(), key=lambda p: p.policy.speculation_length):
        estimate, policy = prediction.tokens_per_s, prediction.policy
        low, high = ends.get(policy, (estimate.low, estimate.high) if estimate.n > 1 else (None, None))
        point = {"length": policy.speculation_length, "value": estimate.value, "low": low, "high": high}
        drawn.setdefault(_kind(policy), []).append(point | {"recommended": policy == answer.recommended})
    return drawn


def places(answer: Answer) -> list[dict[str, Any]]:
    """What `figures.latency_throughput` draws."""
    points = [point for found in answer.batches.found.values() for point in best_points(answer, found.batch_size)]
    front = {(point.batch_size, point.prediction.policy) for point in answer.batches.front}
    chosen = answer.batches.chosen
    return [
        {
            "kind": _kind(point.prediction.policy),
            "batch_size": point.batch_size,
            "ms_per_token": 1e3 * point.tpot_s,
            "throughput": point.throughput,
            "on_front": (point.batch_size, point.prediction.policy) in front,
            "recommended": point.batch_size == chosen.batch_size and point.prediction is chosen.prediction,
        }
        for point in points
    ]


def best_points(answer: Answer, batch_size: int) -> Sequence[Point]:
    """The best of every kind at a batch size."""
    found = answer.batches.found[batch_size]
    best = [prediction for kind in KINDS if (prediction := found.best_if_any(kind))]
    return [answer.batches.point(prediction, batch_size) for prediction in best]


def _kind(policy: Any) -> str:
    return next(kind for kind, of in KINDS.items() if isinstance(policy, of))
