"""The outcomes that a build prepares for: which they are, and what was drafted for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from executor.device import put
from executor.row_sampler import Laws
from executor.sampling import by_rank
from executor.speculation_cache import SpeculationCache
from sim.trace import Outcome


class Likely(NamedTuple):
    """The outcomes to prepare for: how many tokens are accepted, and the bonus tokens, which are on the device."""

    num_accepted: list[int]
    bonus_tokens: Tensor  # (B,)

    def outcomes(self, bonus_tokens: Iterable[int]) -> list[Outcome]:
        return [Outcome(k, token) for k, token in zip(self.num_accepted, bonus_tokens, strict=True)]


def likely_outcomes(logits: Tensor, drafted: Sequence[int], fan_out: Sequence[int]) -> Likely:
    """The outcomes to prepare for: after k accepted tokens the `fan_out[k]` most likely of row k of (n+1, V) logits.

    A rejected draft token cannot be the bonus token, so `drafted[k]` is left out for k < len(drafted): what stands
    behind it moves up.
    """
    n, vocab_size = len(drafted), logits.shape[-1]
    num_bonus = [min(num, vocab_size - (k < n)) for k, num in enumerate(fan_out)]
    num_accepted = [k for k, num in enumerate(num_bonus) for _ in range(num)]
    if not num_accepted:
        return Likely([], logits.new_zeros(0, dtype=torch.long))
    ranked = by_rank(logits, max(num_bonus) + 1)
    left_out = put([[token] for token in (*drafted, -1)], logits.device)
    moves_up = (ranked == left_out).cumsum(-1)[:, : max(num_bonus)]
    at = [(k, i) for k, num in enumerate(num_bonus) for i in range(num)]
    rows, places = put(list(zip(*at, strict=True)), logits.device)
    return Likely(num_accepted, ranked[rows, places + moves_up[rows, places]])


def outcomes_only(likely: Mapping[int, Likely]) -> dict[int, SpeculationCache]:
    """Read the outcomes."""
    numbers = iter(torch.cat([own.bonus_tokens for own in likely.values()]).tolist())
    read = {row: own.outcomes(islice(numbers, len(own.num_accepted))) for row, own in likely.items()}
    return {row: SpeculationCache(outcomes) for row, outcomes in read.items()}


def read_build(likely: Mapping[int, Likely], steps: Sequence[tuple[Tensor, Laws]]) -> dict[int, SpeculationCache]:
    """Read the outcomes and what was drafted for them, all at once."""
    bonus_tokens = pad_sequence([own.bonus_tokens for own in likely.values()], batch_first=True)
    tokens = torch.stack([bonus_tokens, *(drawn for drawn, _ in steps)]).tolist()
    caches = {}
    for place, (row, own) in enumerate(likely.items()):
        outcomes = own.outcomes(tokens[0][place][: len(own.num_accepted)])
        drafted = [(of_step[place], laws[place]) for of_step, (_, laws) in zip(tokens[1:], steps, strict=True)]
        caches[row] = SpeculationCache(outcomes, drafted)
    return caches
