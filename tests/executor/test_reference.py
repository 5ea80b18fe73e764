"""Greedy texts of the decoders are those of transformers' own `generate`, stop tokens included."""

from __future__ import annotations

import pytest
import torch

from executor.concurrency import open_runner
from executor.execute import execute
from executor.language_model import LanguageModel
from executor.pairs import load_pair
from executor.reference import PlainPass, Transformers, generate
from sim.errors import BadInput
from sim.policy import Autoregressive, Fallback, Policy, Speculative, SpeculativeSpeculative
from sim.workload import Sampling, Workload
from tests.executor import tiny_models

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


def test_transformers_verifies_always_as_many_tokens_as_it_is_asked_to_draft() -> None:
    """The second layer of the target is what the draft lacks: some drafts are accepted, some are not."""
    target, draft = tiny_models.llama(2, seed=0), tiny_models.llama(1, seed=1)
    draft.load_state_dict({name: target.state_dict()[name] for name in draft.state_dict()})
    theirs = Transformers(LanguageModel(target), LanguageModel(draft))
    (prompt,) = tiny_models.prompts(1, 12)
    expected = theirs.generate(prompt, 40)
    widths: list[int] = []
    hook = target.register_forward_pre_hook(
        lambda model, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert theirs.assisted(prompt, 40, 3) == expected
    assert set(widths[1:-3]) == {4} and len(widths) < 40, "the last three rounds end with the text"
    widths.clear()
    assert theirs.prompt_lookup(prompt, 40, 3) == expected
    assert max(widths[1:]) <= 4
    hook.remove()
    assert theirs.can_assist
    assert not Transformers(
        LanguageModel(target), LanguageModel(tiny_models.llama(1, seed=1, vocab_size=136))
    ).can_assist


def test_a_plain_pass_gives_the_logits_of_our_own_and_forgets_its_tokens() -> None:
    model = LanguageModel(tiny_models.llama(2, seed=0))
    (text,) = tiny_models.prompts(1, 12)
    expected = model.append(text)
    plain = PlainPass(model, text[:8])
    for end in (9, 12, 10):
        assert torch.allclose(plain(text[8:end]), expected[8:end], rtol=0, atol=1e-9)
