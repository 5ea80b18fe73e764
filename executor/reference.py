"""The texts of transformers' own `generate`: what AR, SD and SSD must equal at temperature 0."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from executor.concurrency import Runner
from executor.device import put
from executor.execute import tokenizer_for
from sim.errors import BadInput
from sim.trace import Sequence, Trace
from sim.workload import Workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_ROWS = 32  # prompts of equal length generated at once


def generate(runner: Runner, workload: Workload) -> Trace:
    """Greedy texts of the target by `generate`, as a trace without rounds and times.

    Texts are cut behind the first token that completes a stop string in the generated text; `generate`'s own criterion
    would find strings that begin in the prompt, too. Ids that are not the pair's, which it could emit, are suppressed.
    Raises `BadInput` at temperature > 0, where only the law of the
    texts is the same.
    """
    if workload.temperature > 0:
        raise BadInput("workload.temperature", "must be 0 to compare with generate", workload.temperature)
    trace = Trace(policy={"kind": "generate"}, workload=workload.identity())
    tokenizer = tokenizer_for(workload, runner)
    alike: dict[tuple[int, float], list[int]] = defaultdict(list)
    for index, prompt in enumerate(workload.prompts):
        alike[len(prompt), workload.sampling_of(index).repetition_penalty].append(index)
    for indices in alike.values():
        for start in range(0, len(indices), MAX_ROWS):
            group = indices[start : start + MAX_ROWS]
            for index, text in zip(group, _generate(runner, workload, group), strict=True):
                trace.sequences.append(_sequence(workload, index, text, tokenizer))
    trace.sequences.sort(key=lambda sequence: sequence.index)
    return trace


@torch.inference_mode()
def _generate(runner: Runner, workload: Workload, indices: list[int]) -> list[list[int]]:
    """The tokens for prompts of one length and one repetition penalty; rows that stopped are padded."""
    prompts = put([workload.prompts[index] for index in indices], runner.target.model.device)
    model = runner.target.model.model
    # A checkpoint's own generation settings (a repetition penalty, say) are none of ours.
    usual, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=workload.max_new_tokens,
            do_sample=False,
            suppress_tokens=runner.target.model.head.cut_rows or None,
            repetition_penalty=float(workload.sampling_of(indices[0]).repetition_penalty),
            eos_token_id=list(workload.stop_ids) or None,
            pad_token_id=0,
        )
    finally:
        model.generation_config = usual
    return output[:, prompts.shape[1] :].tolist()


def _sequence(workload: Workload, index: int, text: list[int], tokenizer: Tokenizer | None) -> Sequence:
    """The text up to the first stop token or stop string."""
    by_id = next((num for num, token in enumerate(text, start=1) if token in workload.stop_ids), None)
    by_string = None
    if tokenizer is not None:
        by_string = _end_by_string(text[:by_id], workload.stop_strings, tokenizer)
    ends = [end for end in (by_id, by_string) if end is not None]
    tokens = tuple(text[: min(ends, default=len(text))])
    times = (0.0, 0.0, 0.0)
    stopped_by_string = by_string is not None and by_string != by_id
    return Sequence(
        index,
        len(workload.prompts[index]),
        tokens,
        *times,
        stopped=bool(ends),
        stopped_by_string=stopped_by_string,
    )


def _end_by_string(text: list[int], stop_strings: tuple[str, ...], tokenizer: Tokenizer) -> int | None:
    """The smallest number of tokens whose text holds a stop string; all of them are decoded for every number."""
    for num in range(1, len(text) + 1):
        decoded = tokenizer.decode(text[:num], skip_special_tokens=False)
        if any(string in decoded for string in stop_strings):
            return num
    return None
