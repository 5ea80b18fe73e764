"""The report: the answer first, then the tables behind it, then what it does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.profile import flattened
from sim.win_map import TIE


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A figure's file without its ending, and what it shows."""

    name: str
    caption: str


Block = (
    str | list[str] | Table | Picture
)  # a paragraph, a list, a table, a figure; text may hold *emphasis*, **strength**


class Section:
    """A heading and what stands under it."""

    def __init__(self, title: str, *blocks: Block) -> None:
        self.title, self.blocks = title, blocks


PREDICTED_AGAINST_MEASURED = Picture(
    "predicted_against_measured", "Predicted against measured tokens/s, 95 % intervals"
)
TIMELINE = Picture("timeline", "Timeline of some rounds, measured above simulated")
ACCEPTED_COUNTS = Picture("accepted_counts", "How many tokens a round accepts, measured and simulated")
HIT_RATE_BY_FAN_OUT = Picture("hit_rate_by_fan_out", "Hit rate by fan-out: of the calibration record, and measured")
WIN_MAP = Picture("win_map", "Where SSD wins, ties and loses against the better of AR and SD; the star is this system")
PICTURES = (PREDICTED_AGAINST_MEASURED, ACCEPTED_COUNTS, HIT_RATE_BY_FAN_OUT, TIMELINE, WIN_MAP)

Interval = Mapping[str, Any]  # value, low, high; a bound is None where there is no interval

FIGURES = (
    ("end_to_end_tokens_per_s", "end-to-end tokens/s", 1.0, ".1f"),
    ("mean_acceptance_length", "emitted / round (mean acceptance length)", 1.0, ".2f"),
    ("accepted_per_round", "accepted / round", 1.0, ".2f"),
    ("accepted_over_drafted", "accepted / drafted, %", 100.0, ".1f"),
    ("acceptance_rate", "acceptance rate (accepted / tested), %", 100.0, ".1f"),
    ("hit_rate", "hit rate, %", 100.0, ".1f"),
    ("hit_rate_after_hit", "hit rate after a hit, %", 100.0, ".1f"),
    ("hit_rate_after_miss", "hit rate after a miss, %", 100.0, ".1f"),
    ("overlap", "build hidden behind verification, %", 100.0, ".1f"),
)

ROUND_TIMES = (
    ("round_s", "round"),
    ("verify_s", "verification"),
    ("build_s", "awaiting the build"),
    ("lookup_s", "look-up"),
    ("draft_s", "drafting"),
    ("rest_s", "hand-over and host"),
)

SPEEDUPS = {"sd_over_ar": "SD over AR", "ssd_over_ar": "SSD over AR", "ssd_over_sd": "SSD over SD"}

MAP_DEFINITION = (
    "**map**: the idealised model: acceptance is alike everywhere, the draft's times are scaled together, builds are "
    "waited for; hit curves, widths and slow-downs are the system's. Every kind of policy takes its best setting at "
    f"every point; within {100 * TIE:.0f} % is a tie."
)
DEFINITIONS = [
    "**tokens/s**: decode only. Tokens that rounds emitted over decode time, totals over totals; the prefill and "
    "the token that it emits are left out. *End-to-end tokens/s* includes both.",
    "**speed-up**: ratio of two policies' tokens/s on the same prompts.",
    "**intervals**: 95 % bootstraps over prompts, or over batches of them, paired for ratios. A prediction's "
    "interval holds the spread of the calibration prompts, not the uncertainty of the latencies.",
    "**repeat spread**: half the range of the repeats' tokens/s over their mean: how far a measurement differs "
    "from itself.",
    "**forecast**: made from the profile alone, before the run; the policies are chosen by it.",
    "**predicted**: the same prediction at the speed that the machine had during the run. Between the measured "
    "runs, reference policies (AR, one SD, SSD with either fallback, of another K than the measured ones where "
    "the search has one) decode calibration prompts; from their spans the level of every operation and the host "
    "times are fitted again. No measured run enters; AR is AR in either case. Where a machine drifts, the "
    "forecast has the drift in it, the prediction has not.",
    "**error**: predicted over measured tokens/s, minus 1. Predictions come from calibration prompts, "
    "measurements from test prompts; its interval is what the spread of both sets of prompts allows. One that "
    "holds 0 is compatible with that spread alone. *Forecast error* is the same of the forecast.",
    "**mean acceptance length**: tokens emitted per round, the bonus token included; *accepted / round* leaves it out.",
    "**acceptance rate**: accepted over tested draft tokens (the accepted ones, and the one rejected). *Accepted "
    "/ drafted* depends on the speculation length and ranks nothing.",
    "**hit rate**: look-ups whose outcome had a prepared speculation; also by the source of the round that ended "
    "with it.",
    "**hit rate by fan-out**: of all look-ups in rounds of a source, the share that would find their outcome "
    "prepared if every accept count had that fan-out; the lines are exact for the texts of the calibration record. "
    "Measured points are the look-ups after the accept counts that had this fan-out, so an uneven fan-out mixes "
    "other accept counts at every point.",
    "**survival by position**: share of the rounds that drafted so far in which the draft token at this position was "
    "accepted, and all before it.",
    "**build hidden behind verification**: share of the time of builds during which a verification ran. *Awaiting the "
    "build* is the rest that the target had to wait for.",
    MAP_DEFINITION,
    "**regret**: share of tokens/s lost by running the recommended policy and not the best of those measured, "
    "which are AR, the best SD and the best SSD of the search: it shows a wrong kind of decoding, not a wrong "
    "fan-out.",
    "**lossless**: greedy token ids equal to AR's; transformers' own `generate` is compared as well. A *near-tie "
    "flip* departs from them only where the target's two best logits are tied within rounding.",
]

NOT_MODELLED = [
    "Load and other placements: the simulator knows them, but this run profiled and measured {at_a_time}, the "
    "roles placed as the identity below says.",
    "Speculation trees.",
    "The steps of a build are taken to vary independently of each other and of the verification; in fact they "
    "share the machine's moods.",
    "Latency outside the profiled widths and contexts is refused, not extrapolated.",
]


def answer(summary: Mapping[str, Any]) -> str:
    """The result in one sentence, with its uncertainty."""
    rows = {row["name"]: row for row in summary["policies"]}
    best = rows[summary["best_measured"]]
    rate = best["measured"]["tokens_per_s"]
    versus = _versus(best["policy"]["kind"], summary["speedups"])
    sentence = (
        f"{best['name']} was the fastest policy measured: {in_words(rate, '.1f')} tokens/s{versus}; "
        f"{best['predicted']['tokens_per_s']['value']:.1f} tokens/s were predicted "
        f"(error {100 * best['error']['tokens_per_s']:+.1f} %, "
        f"repeats differ by ±{100 * best['measured']['repeat_spread']:.1f} %), "
        f"{best['forecast']['tokens_per_s']['value']:.1f} forecast before the run "
        f"({100 * best['error']['forecast_tokens_per_s']:+.1f} %)"
    )
    if summary["recommended"] == summary["best_measured"]:
        return f"{sentence}. It is the policy that was recommended."
    lost = summary["regret"]
    return (
        f"{sentence}. Recommended was {summary['recommended']}, "
        f"which lost {in_words(lost, '.1f', scale=100)} % against it."
    )


def _versus(kind: str, speedups: Mapping[str, Interval]) -> str:
    names = {"ssd": ("ssd_over_ar", "ssd_over_sd"), "sd": ("sd_over_ar",), "ar": ()}[kind]
    parts = [
        f"{in_words(speedups[name], '.2f')} x {SPEEDUPS[name].split()[-1]}{_doubt(speedups[name])}" for name in names
    ]
    return f", {' and '.join(parts)}" if parts else ""


def _doubt(speedup: Interval) -> str:
    low, high = speedup["low"], speedup["high"]
    if low is None or high is None:
        return " (no interval)"
    return " (no significant difference)" if low <= 1 <= high else ""


def report(summary: Mapping[str, Any], details: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """`report.md`.

    `summary` is the content of summary.json. `details` holds, by policy name, `measured` and `simulated` figures of
    merit (`calibration.breakdown.figures_of_merit`) under "policies"; the engines' cross-checks under "engines"; texts
    that differ from AR's under "differences"; what the roles cost each other (`calibration.side_by_side`), or None,
    under "side_by_side"; hit rates by fan-out (`calibration.hit_rates`) under "hit_curves"; a map (`sim.win_map`), or
    None, under "map", and what it says of the system, or why there is none, under "map_in_words"; the number
    of policies searched under "num_policies"; remarks that belong beside the answer under "notes".
    """
    front = [answer(summary), *(f"**{text}**" for text in lost_texts(summary))]
    front += [f"**Note:** {note}" for note in details["notes"]]
    return in_markdown(title(manifest), front, sections(summary, details, manifest))


def title(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['settings']['name']}: AR, SD and SSD, predicted and measured"


def sections(summary: Mapping[str, Any], details: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[Section]:
    """Everything below the answer, for any renderer; arguments as of `report`."""
    speed_ups = [[SPEEDUPS[n], in_words(s, ".3f"), _doubt(s).strip(" ()")] for n, s in summary["speedups"].items()]
    return [
        Section(
            "Predicted against measured",
            Table(*policy_rows(summary)),
            f"From the profile to the run the machine's speed changed by {_drift(summary)}. "
            f"The search compared {details['num_policies']} policies on the calibration prompts. "
            f"Regret of the recommendation: {in_words(summary['regret'], '.1f', scale=100)} %.",
            PREDICTED_AGAINST_MEASURED,
        ),
        Section("Speed-ups, measured", Table(["", "speed-up", ""], speed_ups)),
        Section("Lossless", *_lossless(summary["lossless"], details["differences"])),
        Section(
            "Acceptance and hits", _figures_table(summary, details), ACCEPTED_COUNTS, *hit_blocks(details["hit_curves"])
        ),
        Section(
            "Where a round's time goes",
            "Mean milliseconds of a round, measured / simulated. In all parts but the verification the target waits.",
            _round_time_table(summary, details),
            TIMELINE,
        ),
        Section("Where SSD wins", *_map(details)),
        Section("Alone and side by side", *_side_by_side(details["side_by_side"])),
        Section(
            "Two engines",
            "They predict the same expectation; the event simulation samples it.",
            _engines_table(details["engines"]),
        ),
        Section("Definitions", DEFINITIONS),
        Section("Not modelled yet", [text.format(at_a_time=_at_a_time(manifest)) for text in NOT_MODELLED]),
        Section("How it was made", manifest_table(manifest)),
    ]


def _at_a_time(manifest: Mapping[str, Any]) -> str:
    num_rows = manifest["workload"]["batch_size"]
    return "one sequence at a time" if num_rows == 1 else f"batches of {num_rows} sequences that begin together"


def policy_rows(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of `summary`: one row per policy, predicted beside measured."""
    rows = []
    for row in summary["policies"]:
        predicted, measured = row["predicted"], row["measured"]
        rows.append(
            [
                row["name"],
                f"{row['forecast']['tokens_per_s']['value']:.1f}",
                in_words(predicted["tokens_per_s"], ".1f"),
                in_words(measured["tokens_per_s"], ".1f"),
                _error(row["error"]),
                f"{100 * row['error']['forecast_tokens_per_s']:+.1f} %",
                f"±{100 * measured['repeat_spread']:.1f} %",
                _pair(predicted["mean_acceptance_length"], measured["mean_acceptance_length"], ".2f"),
                _pair(predicted["hit_rate"], measured["hit_rate"], ".1f", scale=100),
            ]
        )
    head = [
        "policy",
        "forecast tokens/s",
        "predicted tokens/s",
        "measured tokens/s",
        "error",
        "forecast error",
        "repeat spread",
    ]
    return [*head, "emitted / round, predicted / measured", "hit rate %, predicted / measured"], rows


def _error(error: Mapping[str, Any]) -> str:
    bounds = error["tokens_per_s_interval"]
    interval = f" [{100 * bounds[0]:+.1f}, {100 * bounds[1]:+.1f}]" if bounds else ""
    return f"{100 * error['tokens_per_s']:+.1f}{interval} %"


def _drift(summary: Mapping[str, Any]) -> str:
    """By how much the prediction at the run's speed differs from the forecast, per policy."""
    changes = [
        (row["name"], row["predicted"]["tokens_per_s"]["value"] / row["forecast"]["tokens_per_s"]["value"] - 1)
        for row in summary["policies"]
    ]
    return ", ".join(f"{100 * change:+.1f} % for {name}" for name, change in changes)


def lost_texts(summary: Mapping[str, Any]) -> list[str]:
    """The warning that stands before everything else, if there is cause."""
    lossless = summary["lossless"]
    if lossless and lossless["identical"] + lossless["near_tie_flips"] < lossless["prompts"]:
        return ["Not lossless: some texts differ from AR's beyond rounding; see below."]
    return []


def _lossless(lossless: Mapping[str, int] | None, differences: Sequence[Mapping[str, Any]]) -> list[Block]:
    if lossless is None:
        return ["At temperature > 0 the texts have the same law, not the same tokens; the test suite checks the law."]
    text = (
        f"{lossless['identical']} of {lossless['prompts']} prompts gave the same tokens under every policy and repeat "
        "and by transformers' own generate; "
        f"{lossless['near_tie_flips']} differ at a tie within rounding."
    )
    departures = [f"{d['policy']}, prompt {d['prompt']}: {_departure(d)}" for d in differences]
    return [text, departures] if departures else [text]


def hit_blocks(curves: Mapping[str, Any]) -> list[Block]:
    """The figure of hit rates by fan-out, and its measured points in a table."""
    rows = [
        [
            f"after a {point['source']}",
            str(point["fan_out"]),
            str(point["lookups"]),
            in_words(point["hit_rate"], ".1f", scale=100),
        ]
        for point in curves["measured"]
    ]
    head = ["measured look-ups of the best SSD", "fan-out", "look-ups", "hit rate, %"]
    return [HIT_RATE_BY_FAN_OUT, Table(head, rows)]


def _departure(difference: Mapping[str, Any]) -> str:
    if difference["gap"] is None:
        return "ends at another token"
    return f"departs at token {difference['position']}, top-2 logit gap {difference['gap']:.2g}"


def _figures_table(summary: Mapping[str, Any], details: Mapping[str, Any]) -> Table:
    names = [row["name"] for row in summary["policies"]]
    rows = [
        [title, *(in_words(details["policies"][name]["measured"][key], spec, scale=scale) for name in names)]
        for key, title, scale, spec in FIGURES
    ]
    rows.append(["survival by position, %", *(_percents(details["policies"][n]["measured"]) for n in names)])
    return Table(["measured", *names], rows)


def _percents(figures: Mapping[str, Any]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in figures["survival_by_position"]) or "-"


def _round_time_table(summary: Mapping[str, Any], details: Mapping[str, Any]) -> Table:
    rows = []
    for row in summary["policies"]:
        both = [details["policies"][row["name"]][kind]["round_time"] for kind in ("measured", "simulated")]
        rows.append([row["name"], *(" / ".join(_milliseconds(times, key) for times in both) for key, _ in ROUND_TIMES)])
    return Table(["policy", *(title for _, title in ROUND_TIMES)], rows)


def _side_by_side(found: Mapping[str, Any] | None) -> list[Block]:
    if found is None:
        return ["The roles took turns: nothing was timed beside the other."]
    rows = [
        [
            f"{step['operation']} ({step['lane']})",
            str(step["batch_size"]),
            str(step["num_tokens"]),
            str(step["context"]),
            f"{1e3 * step['alone_s']:.2f}",
            f"{1e3 * step['beside_s']:.2f}",
            f"{step['beside_s'] / step['alone_s']:.2f}",
        ]
        for step in found["steps"]
    ]
    head = ["operation", "rows", "tokens of each", "context", "alone, ms", "beside the other role, ms", "ratio"]
    gain = f"Side by side the roles do {found['gain']:.2f} times the work that they do one after the other in that time"
    return [Table(head, rows), f"{gain} (2: neither slows the other; 1: they take turns)."]


def _map(details: Mapping[str, Any]) -> list[Block]:
    sentence = f"{details['map_in_words']}."
    return [sentence] if details["map"] is None else [sentence, WIN_MAP]


def _milliseconds(times: Mapping[str, float] | None, key: str) -> str:
    return "-" if times is None else f"{1e3 * times[key]:.2f}"


def _engines_table(engines: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            engine["name"],
            engine["engine"],
            f"{engine['tokens_per_s']:.2f}",
            f"{engine['des_tokens_per_s']:.2f} ± {engine['standard_error']:.2f}",
            f"{100 * engine['relative_difference']:+.2f} %",
            f"{engine['z']:+.1f}",
        ]
        for engine in engines
    ]
    head = ["policy", "engine", "tokens/s", "event simulation, tokens/s", "difference", "in standard errors"]
    return Table(head, rows)


def manifest_table(manifest: Mapping[str, Any]) -> Table:
    """On what and how a run was made."""
    rows = [["date", str(manifest["date"])], ["version", manifest["version"]], ["digest", manifest["digest"]]]
    for part in ("identity", "settings"):
        rows += [[f"{part}: {key}", str(value)] for key, value in flattened(manifest[part]).items()]
    rows += [[f"time of stage: {name}", f"{seconds:.1f} s"] for name, seconds in manifest["durations_s"].items()]
    return Table(["what", "value"], rows)


# ----------------------------------------------------------------------------------------------------------- Markdown


def in_words(estimate: Interval | None, spec: str, *, scale: float = 1.0) -> str:
    """A value with its interval; one prompt, or one batch of them, has none."""
    if estimate is None or estimate["value"] is None:
        return "-"
    value, low, high = (None if estimate[key] is None else scale * estimate[key] for key in ("value", "low", "high"))
    if low is None or high is None:
        return f"{value:{spec}} (no interval)"
    return f"{value:{spec}} [{low:{spec}}, {high:{spec}}]"


def _pair(predicted: Interval | None, measured: Interval | None, spec: str, *, scale: float = 1.0) -> str:
    values = (None if e is None else e["value"] for e in (predicted, measured))
    return " / ".join("-" if value is None else f"{scale * value:{spec}}" for value in values)


def in_markdown(heading: str, front: Sequence[str], parts: Sequence[Section]) -> str:
    """A document of a heading, what stands first, and sections; figures are files in `figures/`."""
    blocks = [block for part in parts for block in (f"## {part.title}", *part.blocks)]
    return "\n\n".join([f"# {heading}", *front, *map(_block_in_markdown, blocks)]) + "\n"


def _block_in_markdown(block: Block) -> str:
    match block:
        case Table(head, rows):
            return markdown_table(head, rows)
        case Picture(name, caption):
            return f"![{caption}](figures/{name}.svg)"
        case str():
            return block
    return "\n".join(f"- {entry}" for entry in block)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)
