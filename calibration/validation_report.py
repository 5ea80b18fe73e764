"""The report of a validation: how far the predictions were off, why, and what that means for the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibration.report import Picture, Section, Table, in_markdown, in_words, manifest_table

CAUSES = {
    "latency_and_overlap": "latency and overlap (the measured rounds, timed by the simulator), % of tokens/s",
    "acceptance": "acceptance, % of tokens per round",
    "hits": "hits, points of the hit rate",
    "hits_after_hit": "- of look-ups after a hit",
    "hits_after_miss": "- of look-ups after a miss",
    "all_together": "all together, % of tokens/s",
}

PREDICTED_MEASURED = Picture(
    "predicted_measured",
    "Predicted against measured tokens/s of every configuration; measured intervals hold what repeats differ by",
)
ERRORS = Picture(
    "errors", "Error of every configuration, and the parts of it: latency with overlap, and tokens per round"
)

DEFINITIONS = [
    "**held out**: no test prompt and no configuration but AR was seen by the profile or the fit.",
    "**error**: predicted over measured tokens/s (decode only), minus 1; of hit rates the difference in points.",
    "**predicted** knows how fast the machine was during the run, from reference policies of another K that decoded "
    "calibration prompts in between; **forecast** is made from the profile alone.",
    "**intervals**: 95 % bootstraps over blocks of test prompts and groups of calibration prompts, one draw for all "
    "configurations. Those of a configuration's tokens/s and latency are widened by what repeats differ by, drift "
    "left out.",
    "**noise**: by how much a repeat of a configuration differs from the mean of its other repeats, on average: "
    "what a prediction by another real run of the same prompts is off. **Drift** is the part that all "
    "configurations share, which the reference policies in between share too.",
    "**not distinguishable**: the error's interval holds 0.",
    "**latency and overlap**: the rounds that were measured - their accepted counts, sources, rows, contexts - "
    "timed by the fitted system, against the clock. What this leaves is acceptance and hits.",
    "**rank correlation**: Spearman's, of the speed-ups over AR of the same batch size, AR itself left out.",
    "**regret**: tokens/s that the policy recommended before the run loses against the best of its rivals (the "
    "fastest measured), all measured again with fresh prompts and seeds; of several batch sizes the largest counts. "
    "Its interval includes the luck of the choice.",
    "**ablations**: the same predictions with a part of the model left out.",
]


def answer(validation: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    hits = validation["hit_rate_mae"]
    with_hits = "" if hits is None else f", hit rates within {in_words(hits, '.1f', scale=100)} points"
    rank = validation["rank_correlation"]
    ranked = "" if rank is None else f"; the ranking correlates by {in_words(rank, '.2f')}"
    return (
        f"{len(validation['rows'])} held-out configurations: tokens/s predicted within "
        f"{in_words(validation['mape_tokens_per_s'], '.1f', scale=100)} % on average{with_hits}{ranked}; "
        f"the recommended policy lost {in_words(validation['regret'], '.1f', scale=100)} %. "
        f"Repeated real runs differ by {in_words(validation['noise'], '.1f', scale=100)} %, by "
        f"{in_words(validation['noise_without_drift'], '.1f', scale=100)} % once what all have in common is taken out."
    )


def in_a_sentence(pays: Mapping[str, Any]) -> str:
    """Whether SSD pays at a batch size, predicted and measured."""
    of = f"Batches of {pays['batch_size']}"
    if pays["ssd"] is None:
        return f"{of}: no SSD among the configurations."
    return f"{of}: does SSD pay? Forecast: {_beside(pays['forecast'])}. Predicted: {_beside(pays)}."


def _beside(pays: Mapping[str, Any]) -> str:
    """An answer beside that of the measurement of the same two policies."""
    agree = "as" if pays["predicted_answer"] == pays["measured_answer"] else "unlike"
    return (
        f"{pays['predicted_answer']} ({pays['ssd']} over {pays['other']}: "
        f"{in_words(pays['predicted_speedup'], '.2f')}), {agree} measured: {pays['measured_answer']} "
        f"({in_words(pays['measured_speedup'], '.2f')})"
    )


def table_of_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and cells, one row per configuration, each kind of decoding in the order of the file."""
    head = [
        "configuration",
        "batch",
        "predicted tokens/s",
        "measured tokens/s",
        "error %",
        "forecast error %",
        "noise ± %",
    ]
    head += ["latency error %", "tokens/round error %", "hit rate %, predicted / measured", ""]
    return head, [_cells(row) for row in rows]


def _cells(row: Mapping[str, Any]) -> list[str]:
    error, hits = row["error"], [row[side]["hit_rate"] for side in ("predicted", "measured")]
    return [
        row["name"],
        str(row["batch_size"]),
        f"{row['predicted']['tokens_per_s']['value']:.1f}",
        in_words(row["measured"]["tokens_per_s"], ".1f"),
        in_words(error["tokens_per_s"], "+.1f", scale=100),
        f"{100 * row['forecast_error']['tokens_per_s']['value']:+.1f}",
        f"{100 * row['noise']:.1f}",
        in_words(error["latency_and_overlap"], "+.1f", scale=100),
        in_words(error["tokens_per_round"], "+.1f", scale=100),
        "-" if None in hits else " / ".join(f"{100 * hit['value']:.1f}" for hit in hits),
        row["verdict"],
    ]


def validation_report(validation: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """`validation.md` from the contents of validation.json and manifest.json."""
    notes = [f"**Note:** {note}" for note in notes_of(validation)]
    return in_markdown(title(validation), [answer(validation), *notes], sections(validation, manifest))


def title(validation: Mapping[str, Any]) -> str:
    return f"{validation['name']}: predictions against measurements"


def notes_of(validation: Mapping[str, Any]) -> list[str]:
    """What belongs beside the answer: tolerances, and that a run was interrupted."""
    return [*filter(None, [_tolerances(validation)]), *validation["notes"]]


def sections(validation: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[Section]:
    """Everything below the answer, for any renderer."""
    causes = Table(
        ["cause", "mean absolute error", "mean signed error", "forecast: absolute", "signed"],
        list(_causes(validation["causes"], validation["forecast"]["causes"])),
    )
    ablations = Table(
        ["left out", "mean absolute error of tokens/s, %", "of hit rates, points", "rank correlation", "unchanged"],
        [_ablation(name, own) for name, own in validation["ablations"].items()],
    )
    regrets = Table(
        ["batch", "recommended", "best on fresh prompts", "lost, %"],
        [
            [str(r["batch_size"]), r["recommended"], r["best_measured"], in_words(r["regret"], ".1f", scale=100)]
            for r in validation["regret_by_batch_size"]
        ],
    )
    unchanged = "*Unchanged* are configurations for which leaving it out has no meaning; they keep their prediction."
    return [
        Section("Does SSD pay?", [in_a_sentence(pays) for pays in validation["does_ssd_pay"]]),
        Section("Every configuration", PREDICTED_MEASURED, Table(*table_of_rows(validation["rows"])), ERRORS),
        Section("Why predictions were off", causes),
        Section("With a part of the model left out", ablations, unchanged),
        Section("Regret", regrets),
        Section("Cost", _cost(validation)),
        Section("Definitions", DEFINITIONS),
        Section("How it was made", manifest_table(manifest)),
    ]


def _tolerances(validation: Mapping[str, Any]) -> str:
    if not validation["tolerance"]:
        return ""
    if not validation["missed"]:
        return "Every stated tolerance was met."
    return f"Missed: {'; '.join(validation['missed'])}."


def _causes(causes: Mapping[str, Any], of_forecast: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for name, words in CAUSES.items():
        if name in causes:
            both = (causes[name], of_forecast[name])
            signs = (("mean_absolute", ".1f"), ("mean_signed", "+.1f"))
            yield words, *(in_words(own[key], spec, scale=100) for own in both for key, spec in signs)


def _ablation(name: str, own: Mapping[str, Any]) -> list[str]:
    hits = own["hit_rate_mae"]
    return [
        name,
        in_words(own["mape_tokens_per_s"], ".1f", scale=100),
        "-" if hits is None else in_words(hits, ".1f", scale=100),
        in_words(own["rank_correlation"], ".2f"),
        str(own.get("num_unchanged", "-")),
    ]


def _cost(validation: Mapping[str, Any]) -> str:
    cost, num = validation["profile"], len(validation["rows"])
    return (
        f"The profile took {cost['profile_s']:.0f} s. Decoding the calibration prompts once under each of the {num} "
        f"configurations would take {cost['sweep_s']:.0f} s, and each further configuration adds to it; the profile "
        "serves any number of them."
    )
