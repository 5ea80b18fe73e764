"""A record of agreement in a handful of numbers: what is left of it where every round is like every other."""

from __future__ import annotations

import numpy as np

from sim.agreement import AgreementRecord
from sim.parametric import HitCurve, ParametricAgreement
from sim.policy import Drafting, Proposer
from sim.search import FIRST_DRAFT, testable_positions
from sim.trace import Source

FAN_OUTS = (1, 2, 4, 8, 16)  # at which a hit curve is fitted, as far as the record has candidates


def independent_rounds(record: AgreementRecord, speculation_length: int) -> ParametricAgreement:
    """The record as one acceptance rate and two hit curves 1 - c F^-r, after a rejection and after K acceptances.

    Both are means over all positions that a round can test; of the first each position counts by how likely a
    rejection is there. What easy and hard passages do to rounds that follow one another is lost.
    """
    inside = testable_positions(record)
    acceptance = record.acceptance_table(0, FIRST_DRAFT)[inside]
    curves = [
        _curve(record, inside, weights, rejected=rejected)
        for rejected, weights in ((True, 1 - acceptance), (False, np.ones_like(acceptance)))
    ]
    by_accept_count = (*[curves[0]] * speculation_length, curves[1])
    return ParametricAgreement(
        prompt_tokens=int(record.prompt_length.max()),
        new_tokens=record.max_new_tokens,
        acceptance=(float(acceptance.mean()),),
        after_hit=by_accept_count,
        after_miss=by_accept_count,
        sampling_temperature=record.temperature,
        num_texts=record.num_prompts,
    )


def _curve(record: AgreementRecord, inside: np.ndarray, weights: np.ndarray, *, rejected: bool) -> HitCurve:
    """The best line through log miss(F) over log F; a record without misses has none."""
    fan_outs = [fan_out for fan_out in FAN_OUTS if fan_out <= record.num_candidates]
    drafting = Drafting(Proposer.DRAFT_MODEL, 1, (), Source.HIT)
    hits = [record.hit_table(fan_out, 0, drafting, rejected=rejected)[inside] for fan_out in fan_outs]
    total = weights.sum()
    misses = np.array([1.0 if total == 0 else float((weights * (1 - hit)).sum() / total) for hit in hits])
    seen = misses > 1e-9
    if seen.sum() < 2:
        return HitCurve(float(misses[0]), 1.0)
    slope, intercept = np.polyfit(np.log(np.array(fan_outs)[seen]), np.log(misses[seen]), 1)
    return HitCurve(float(min(1.0, np.exp(intercept))), float(max(0.0, -slope)))
