"""Greedy texts of the decoders are those of transformers' own `generate`, stop tokens included."""

from __future__ import annotations

import pytest

from executor.concurrency import open_runner
from executor.execute import execute
from executor.pairs import load_pair
from executor.reference import generate
from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative
from sim.workload import Sampling, Workload

POLICIES: list[Policy] = [
    Autoregressive(),
    Speculative(5),
    SpeculativeSpeculative(5, (4, 3, 3, 2, 2, 2), (4, 3, 3, 2, 2, 2)),
    SpeculativeSpeculative(5, (4, 3, 3, 2, 2, 2), (16,), Fallback.NONE),
]


def test_the_packaged_pair_gives_the_texts_of_generate() -> None:
    """Two lengths of prompts, and stop tokens that occur in the texts. The pair's fp32 gaps are far above rounding."""
    pair = load_pair("stdlib")
    prompts = (*pair.prompts("test", 4, 48), *pair.prompts("calibration", 3, 32))
    free = Workload("stdlib", prompts, max_new_tokens=40)
    with open_runner(pair, "serial") as runner:
        texts = [s.tokens for s in generate(runner, free).sequences]
        stopping = Workload("stdlib", prompts, max_new_tokens=40, stop_ids=(texts[0][7], texts[4][20]))
        stopped = generate(runner, stopping)
        assert any(s.stopped for s in stopped.sequences) and not all(s.stopped for s in stopped.sequences)
        for workload, expected in ((free, texts), (stopping, [s.tokens for s in stopped.sequences])):
            for policy in POLICIES:
                got = execute(policy, workload, runner)
                assert [s.tokens for s in got.sequences] == expected, policy.name
        assert [s.stopped for s in got.sequences] == [s.stopped for s in stopped.sequences]
        check_penalties_and_strings(runner, prompts, texts)
        for rules in ({"temperature": 1.0}, {"sampling": (Sampling(),) * 6 + (Sampling(0.5),)}):
            with pytest.raises(BadInput, match="temperature"):
                generate(runner, Workload("stdlib", prompts, 4, **rules))


def check_penalties_and_strings(runner, prompts, texts) -> None:
    """Penalties that differ by prompt, and stop strings from the middle of texts."""
    penalties = tuple(Sampling(repetition_penalty=p) for p in (1.0, 1.2, 1.2, 0.9, 1.2, 1.5, 1.0))
    decoded = [runner.pair.tokenizer.decode(text) for text in texts]
    rules = Workload(
        "stdlib", prompts, 40, stop_ids=(texts[0][30],), sampling=penalties, stop_strings=(decoded[0][20:23], "):\n")
    )
    expected = generate(runner, rules).sequences
    assert {"stop_string", "length"} <= {s.stop_reason for s in expected}
    assert [s.tokens for s in expected] != [text[: len(s.tokens)] for text, s in zip(texts, expected, strict=True)]
    for policy in POLICIES[1:3]:
        got = execute(policy, rules, runner).sequences
        assert [(s.tokens, s.stop_reason) for s in got] == [(s.tokens, s.stop_reason) for s in expected], policy.name
