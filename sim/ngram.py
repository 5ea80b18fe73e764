"""Prompt look-up: what followed the last tokens where they occurred before is proposed again (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

LONGEST_SUFFIX = 3  # tokens that must have occurred before; shorter suffixes are tried when they have not


def ngram_proposal(tokens: Sequence[int], num_tokens: int, longest: int = LONGEST_SUFFIX) -> tuple[int, ...]:
    """What followed the most recent earlier occurrence of the longest suffix of `tokens` that has one.

    Suffixes of `longest`, ..., 2, 1 tokens are tried. An earlier occurrence may share tokens with the suffix, and the
    proposal may run on into the suffix; it ends with the last known token at the latest, so it can be shorter than
    `num_tokens`. () if not even the last token occurred before.
    """
    known = tuple(tokens)
    for size in range(min(longest, len(known) - 1), 0, -1):
        suffix = known[-size:]
        for end in range(len(known) - 1, size - 1, -1):
            if known[end - size : end] == suffix:
                return known[end : end + num_tokens]
    return ()


def continuations(tokens: tuple[int, ...], first: int, longest: int = LONGEST_SUFFIX) -> list[int]:
    """For every number n of known tokens from `first` on: where in `tokens` the proposal begins; n if there is none.

    One pass over the tokens: the proposal to n known tokens is tokens[begin:n], cut to the number asked for.
    """
    latest: dict[tuple[int, ...], int] = {}  # n-gram -> end of its most recent occurrence
    begins = []
    for known in range(1, len(tokens) + 1):
        suffixes = [tokens[known - size : known] for size in range(min(longest, known), 0, -1)]
        if known >= first:
            begins.append(next((latest[suffix] for suffix in suffixes if suffix in latest), known))
        latest.update((suffix, known) for suffix in suffixes)
    return begins


@dataclass(frozen=True)
class NgramProposals:
    """The proposals of every round that may start on given texts."""

    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[tuple[int, ...], ...]  # the tokens generated after each prompt

    @cached_property
    def _tokens(self) -> IntArray:
        """(num_prompts, longest prompt and text) tokens of prompt and text, 0 beyond their end."""
        whole = [(*prompt, *text) for prompt, text in zip(self.prompts, self.texts, strict=True)]
        table = np.zeros((len(whole), max(map(len, whole), default=0)), dtype=np.int64)
        for row, tokens in zip(table, whole, strict=True):
            row[: len(tokens)] = tokens
        return table

    @cached_property
    def _known(self) -> IntArray:
        """(num_prompts, longest text) tokens known before a round that starts with i generated ones."""
        starts = np.arange(max(map(len, self.texts), default=0))
        return np.array([len(prompt) for prompt in self.prompts], dtype=np.int64)[:, None] + starts

    @cached_property
    def _begins(self) -> IntArray:
        """(num_prompts, longest text) where each proposal begins in prompt and text."""
        begins = self._known.copy()
        for row, prompt, text in zip(begins, self.prompts, self.texts, strict=True):
            row[: len(text)] = continuations((*prompt, *text[:-1]), len(prompt))[: len(text)]
        return begins

    @cached_property
    def lengths(self) -> IntArray:
        """(num_prompts, longest text) tokens proposed at most, by the number of tokens generated before the round."""
        return self._known - self._begins

    def token(self, prompt: IntArray, start: IntArray, index: int) -> IntArray:
        """Token number `index` of the proposals at the starts given; any token where the proposal is shorter."""
        last = self._tokens.shape[1] - 1
        return self._tokens[prompt, np.minimum(self._begins[prompt, start] + index, last)]
