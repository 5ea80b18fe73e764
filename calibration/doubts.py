"""What to doubt of an agreement record before anything that is planned from it."""

from __future__ import annotations

from sim.agreement import AgreementRecord

FEWEST_PROMPTS = 5  # for an interval over prompts to mean anything


def doubts_about(record: AgreementRecord) -> list[str]:
    """What a reader of anything planned from a record must know first."""
    found = []
    dataset = str(record.identity.get("dataset", ""))
    if record.num_prompts < FEWEST_PROMPTS:
        found.append(f"acceptance is known from {record.num_prompts} prompts: their spread cannot be told")
    if "random" in dataset.lower():
        found.append(f"acceptance was measured on {dataset}: random prompts say nothing about real ones")
    if not record.identity.get("stop_ids") and not record.stop_strings:
        found.append("texts were decoded past their end: acceptance behind it means nothing")
    return found
