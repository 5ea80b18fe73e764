"""Lines of SGLang's serving benchmark."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from calibration.importers.imported import Source, Told
from calibration.importers.sglang import import_sglang
from sim.errors import BadInput
from tests.calibration.importers.samples import sample

LINES = sample("sglang.jsonl")
PLAIN, SPECULATING = (json.loads(line) for line in LINES.text.splitlines())


def lines(*data: dict) -> Source:
    return replace(LINES, text="\n".join(map(json.dumps, data)))


def test_accept_length_counts_the_bonus_token() -> None:
    imported = import_sglang([LINES], Told(speculation_length=4))
    assert imported.learned["acceptance.mean_acceptance_length"] == 3.3616
    assert "conditional acceptance 0.8 " in imported.how[0]
    assert any("random tokens" in said for said in imported.not_learned)
    assert imported.learned["times.ar_ms"] == 20.0
    assert imported.learned["times.sd_round_ms"] == pytest.approx(30.0, abs=1e-3)


def test_the_speculation_length_may_be_in_the_line() -> None:
    settings = {"speculative_num_steps": 4, "speculative_eagle_topk": 1}
    imported = import_sglang([lines(SPECULATING | {"server_info": settings})], Told())
    assert imported.learned["acceptance.speculation_length"] == 4


@pytest.mark.parametrize(
    ("source", "told", "message"),
    [
        (LINES, Told(), "does not say the speculation length; give --speculation-length"),
        (LINES, Told(speculation_length=2), "tokens per round"),
        (lines(PLAIN), Told(speculation_length=4), "must be one line with accept_length"),
        (lines(SPECULATING, SPECULATING), Told(speculation_length=4), "must be one line with accept_length"),
        (lines(PLAIN | {"accept_rate": 0.7}), Told(), "line 1: accept_rate: must come with its definition"),
        (replace(lines(SPECULATING), is_plain=True), Told(), "must be empty in a run without speculation"),
        (lines(SPECULATING | {"server_info": {"speculative_eagle_topk": 4}}), Told(), "a tree tells nothing of chains"),
    ],
)
def test_what_cannot_be_told_is_refused(source: Source, told: Told, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        import_sglang([source], told)
