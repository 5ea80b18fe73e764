"""The texts of transformers' own `generate`: what AR, SD and SSD must equal at temperature 0."""

from __future__ import annotations

from collections import defaultdict

import torch
from transformers import GenerationConfig

from executor.concurrency import Runner
from sim.errors import BadInput
from sim.trace import Sequence, Trace
from sim.workload import Workload

MAX_ROWS = 32  # prompts of equal length generated at once


def generate(runner: Runner, workload: Workload) -> Trace:
    """Greedy texts of the target by `generate`, as a trace without rounds and times.

    Raises `BadInput` at temperature > 0, where only the law of the texts is the same.
    """
    if workload.temperature > 0:
        raise BadInput("workload.temperature", "must be 0 to compare with generate", workload.temperature)
    trace = Trace(policy={"kind": "generate"}, workload=workload.identity())
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(workload.prompts):
        by_length[len(prompt)].append(index)
    for indices in by_length.values():
        for start in range(0, len(indices), MAX_ROWS):
            trace.sequences += _batch(runner, workload, indices[start : start + MAX_ROWS])
    trace.sequences.sort(key=lambda sequence: sequence.index)
    return trace


@torch.inference_mode()
def _batch(runner: Runner, workload: Workload, indices: list[int]) -> list[Sequence]:
    prompts = torch.tensor([workload.prompts[index] for index in indices])
    model = runner.target.model.model
    # A checkpoint's own generation settings (a repetition penalty, say) are none of ours.
    usual, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=workload.max_new_tokens,
            do_sample=False,
            eos_token_id=list(workload.stop_ids) or None,
            pad_token_id=0,
        )
    finally:
        model.generation_config = usual
    texts = output[:, prompts.shape[1] :].tolist()
    return [
        _sequence(index, prompts.shape[1], text, workload.stop_ids) for index, text in zip(indices, texts, strict=True)
    ]


def _sequence(index: int, prompt_length: int, text: list[int], stop_ids: tuple[int, ...]) -> Sequence:
    """Rows that stopped are padded behind their stop token."""
    end = next((place + 1 for place, token in enumerate(text) if token in stop_ids), len(text))
    tokens = tuple(text[:end])
    return Sequence(index, prompt_length, tokens, 0.0, 0.0, 0.0, stopped=tokens[-1:] != () and tokens[-1] in stop_ids)
