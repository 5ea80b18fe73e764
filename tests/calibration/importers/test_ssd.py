"""Outputs of the public SSD engine's benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibration.importers.imported import Source, Told
from calibration.importers.ssd import import_ssd
from sim.errors import BadInput
from sim.policy import Fallback, SpeculativeSpeculative
from tests.calibration.importers.samples import sample

SSD, SD, AR = sample("ssd_async.txt"), sample("ssd_sync.txt"), sample("ssd_plain.txt")
TOLD = Told(fan_out=3)


def test_one_output_tells_acceptance_hits_and_the_verification() -> None:
    imported = import_ssd([SSD], TOLD)
    learned = imported.learned
    assert learned["acceptance.cumulative"][:3] == pytest.approx([0.75, 0.562, 0.421], abs=1e-6)
    assert learned["hits.overall.hit_rate"] == 0.9 and learned["hits.overall.fan_out"] == 3
    assert learned["times.verify_ms"] == 11.5
    keys = {entry.key for entry in imported.assumed}
    assert keys >= {"times.draft_step_ms", "times.tree_step_ms", "hits.overall.exponent", "hits.overall.miss_ratio"}
    assert [run.policy for run in imported.measured] == [SpeculativeSpeculative(7, (3,) * 8, (3,) * 8, Fallback.DRAFT)]


def test_outputs_of_the_other_decoders_tell_the_other_steps() -> None:
    imported = import_ssd([SSD, SD, AR], TOLD)
    assert imported.learned["times.ar_ms"] == pytest.approx(1e3 / 91, abs=1e-6)
    assert imported.learned["times.sd_round_ms"] == pytest.approx(1e3 * 3.29 / 117, abs=1e-6)
    assert "times.draft_step_ms" not in {entry.key for entry in imported.assumed}


def test_rows_of_a_batch_share_the_throughput() -> None:
    one, four = (import_ssd([SD, AR], Told(batch_size=size)).learned for size in (1, 4))
    assert four["times.ar_ms"] == pytest.approx(4 * one["times.ar_ms"])
    assert four["times.sd_round_ms"] == pytest.approx(4 * one["times.sd_round_ms"])


def without(source: Source, line: str) -> Source:
    return replace(source, text="\n".join(text for text in source.text.splitlines() if line not in text))


@pytest.mark.parametrize(
    ("sources", "told", "message"),
    [
        ([SSD], Told(), "does not say the fan out; give --fan-out"),
        ([AR], TOLD, "must hold a run with speculation"),
        ([SSD, SSD], TOLD, "must be of different decoders"),
        ([without(SSD, "Model:")], TOLD, "must have the line `Model"),
        ([without(SSD, "Final Decode")], TOLD, "must have the line `Final Decode Throughput"),
        ([without(SSD, "incl recovery")], TOLD, "Avg Tokens per step"),
        ([without(SSD, "verify time")], TOLD, "must tell a time"),
        ([without(SSD, "  3: 0.105")], TOLD, "must be of 0 to 7 and add up to 1"),
        ([replace(SSD, text=SSD.text.replace("Hits: 0.90", "Hits: 1.90"))], TOLD, "Avg Cache Hits: must be a number"),
    ],
)
def test_what_cannot_be_told_is_refused(sources: list[Source], told: Told, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        import_ssd(sources, told)
