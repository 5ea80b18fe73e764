"""Heads of other widths than the tokenizer's: texts and laws are those of the target over the pair's ids."""

import pytest
import torch

from executor.concurrency import Runner, open_runner
from executor.execute import execute
from executor.language_model import LanguageModel
from executor.pairs import load_pair
from executor.recorder import Recorder
from executor.reference import generate
from executor.serial_draft import SerialDraft
from executor.target import Target
from executor.toy_model import FakePair
from sim.policy import Autoregressive, Fallback, Speculative
from sim.trace import Lane
from sim.workload import Workload
from tests.executor.test_loops import ssd, texts
from tests.executor.tiny_models import llama, prompts, save_pair

NUM_REAL = 120
REAL_PROMPTS = tuple(tuple(token % NUM_REAL for token in prompt) for prompt in prompts(3, 7))
POLICIES = [Autoregressive(), Speculative(4), ssd(3), ssd(3, fallback=Fallback.FILLER)]


def padded(num_layers: int, seed: int, width: int):
    """A head whose padding is tempting: larger logits than those of most real ids."""
    model = llama(num_layers, seed, vocab_size=width)
    with torch.no_grad():
        model.lm_head.weight[NUM_REAL:] *= 3
    return model


@pytest.mark.parametrize(("target_width", "draft_width"), [(136, 128), (120, 136)])
def test_padded_ids_are_never_drafted_or_emitted(target_width: int, draft_width: int, tmp_path) -> None:
    target, draft = padded(2, 0, target_width), padded(1, 0, draft_width)
    pair = load_pair(save_pair(tmp_path / "pair", target, draft, num_tokens=NUM_REAL))
    greedy, sampled = (Workload("test", REAL_PROMPTS, 16, temperature=t, batch_size=3) for t in (0.0, 1.0))
    with open_runner(pair, "serial", dtype="float64") as runner:
        own = [execute(policy, greedy, runner) for policy in POLICIES]
        drawn = [execute(policy, sampled, runner) for policy in POLICIES[2:]]
        own.append(generate(runner, greedy))
    for trace in own:
        assert texts(trace) == texts(own[0])
    assert max(token for trace in own + drawn for text in texts(trace) for token in text) < NUM_REAL
    with torch.inference_mode():
        for prompt, text in zip(REAL_PROMPTS, texts(own[0]), strict=True):
            logits = target(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
            assert logits[:, :NUM_REAL].argmax(-1).tolist() == list(text)
            if target_width > NUM_REAL:  # the control: without the cut there would be others
                assert (logits.argmax(-1) >= NUM_REAL).any()


def reduced(kept: list[int]) -> LanguageModel:
    """The two-layer model with a head of some rows only, in this order."""
    model = llama(2, seed=0)
    weight = model.lm_head.weight.data[kept].clone()
    model.lm_head = torch.nn.Linear(32, len(kept), bias=False).double()
    model.lm_head.weight.data = weight
    return LanguageModel(model, vocab_size=128, token_ids=kept)


def test_a_draft_with_a_reduced_head_proposes_only_its_own_ids() -> None:
    kept = list(range(127, 0, -2))  # the odd ids, last first
    draft, target = reduced(kept), LanguageModel(llama(2, seed=0))
    runner = Runner(
        FakePair(vocab_size=128, max_positions=256),
        "serial",
        Target(target, Recorder(Lane.TARGET)),
        SerialDraft(draft),
        {},
    )
    for temperature in (0.0, 1.0):
        rules = Workload("test", prompts(3, 7), 30, temperature=temperature, batch_size=3)
        traces = [execute(policy, rules, runner, seed=5) for policy in POLICIES[:3]]
        if temperature == 0:
            assert texts(traces[1]) == texts(traces[2]) == texts(traces[0])
        for trace in traces[1:]:
            places = {s.index: s.tokens for s in trace.sequences}
            for r in trace.rounds:
                start = r.context + 1 - trace.sequences[r.sequence].prompt_length
                assert all(token % 2 for token in places[r.sequence][start : start + r.num_accepted])
            assert any(token % 2 == 0 for text in texts(trace) for token in text)
            assert sum(r.num_accepted for r in trace.rounds) > 20
