"""Transformers' own decoding: what AR, SD and SSD must equal at temperature 0, and what their speed is held against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.utils import logging

from executor.concurrency import Runner
from executor.device import put
from executor.execute import tokenizer_for
from executor.language_model import LanguageModel
from sim.errors import BadInput
from sim.ngram import LONGEST_SUFFIX
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


def _generate(runner: Runner, workload: Workload, indices: list[int]) -> list[list[int]]:
    """The tokens for prompts of one length and one repetition penalty; rows that stopped are padded."""
    return _greedy(
        runner.target.model,
        [workload.prompts[index] for index in indices],
        workload.max_new_tokens,
        repetition_penalty=float(workload.sampling_of(indices[0]).repetition_penalty),
        eos_token_id=list(workload.stop_ids) or None,
    )


@torch.inference_mode()
def _greedy(model: LanguageModel, prompts: Seq[Seq[int]], max_new_tokens: int, **settings: Any) -> list[list[int]]:
    """What `generate` makes of prompts of one length. A checkpoint's own generation settings (a repetition penalty,
    say) are none of ours."""
    fed = put([list(prompt) for prompt in prompts], model.device)
    generate: Any = model.model.generate
    with _own_settings(model, GenerationConfig()):
        output = generate(
            fed,
            attention_mask=torch.ones_like(fed),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            suppress_tokens=model.head.cut_rows or None,
            pad_token_id=0,
            **settings,
        )
    return output[:, fed.shape[1] :].tolist()


@contextmanager
def _own_settings(model: LanguageModel, settings: GenerationConfig) -> Iterator[None]:
    usual, model.model.generation_config = model.model.generation_config, settings
    try:
        yield
    finally:
        model.model.generation_config = usual


@contextmanager
def _silent() -> Iterator[None]:
    """Without warnings: assisted generation warns of the arguments that it passes itself."""
    usual = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(usual)


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


class Transformers:
    """Transformers' own ways to decode one prompt greedily, on the models of a pair and the calling thread's core."""

    def __init__(self, target: LanguageModel, draft: LanguageModel) -> None:
        self._target, self._draft = target, draft

    @property
    def can_assist(self) -> bool:
        """Whether the rows of both heads are the same ids, which assisted generation takes for granted."""
        models: list[Any] = [self._target.model, self._draft.model]
        num_rows = {len(model.get_output_embeddings().weight) for model in models}
        return len(num_rows) == 1

    def generate(self, prompt: Seq[int], num_tokens: int) -> list[int]:
        """One token for each pass."""
        return _greedy(self._target, [prompt], num_tokens)[0]

    def assisted(self, prompt: Seq[int], num_tokens: int, speculation_length: int) -> list[int]:
        """Assisted generation: the draft model proposes always as many tokens, however likely it finds them."""
        settings = GenerationConfig(
            num_assistant_tokens=speculation_length,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        with _own_settings(self._draft, settings), _silent():
            return _greedy(self._target, [prompt], num_tokens, assistant_model=self._draft.model)[0]

    def prompt_lookup(self, prompt: Seq[int], num_tokens: int, speculation_length: int) -> list[int]:
        """Prompt look-up with the suffixes that ours looks for (`sim.ngram`)."""
        settings = {"prompt_lookup_num_tokens": speculation_length, "max_matching_ngram_size": LONGEST_SUFFIX}
        return _greedy(self._target, [prompt], num_tokens, **settings)[0]


class PlainPass:
    """The target's own forward method with transformers' growing cache, over some tokens after a context."""

    def __init__(self, target: LanguageModel, context: Seq[int]) -> None:
        self._model, self._cache = target.model, DynamicCache()
        self._feed(context)

    def __call__(self, tokens: Seq[int]) -> Tensor:
        """Feed n tokens, and forget them again; the (n, V) logits after each."""
        logits = self._feed(tokens)
        self._cache.crop(-len(tokens))
        return logits

    @torch.inference_mode()
    def _feed(self, tokens: Seq[int]) -> Tensor:
        fed = put([list(tokens)], self._model.device)
        return self._model(input_ids=fed, cache=self._cache, use_cache=True).logits[0]
