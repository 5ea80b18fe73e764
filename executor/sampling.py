"""From logits to tokens: processing, sampling, verification. Losslessness lives here; everything is a pure function.

p is the target's processed distribution, q the draft's. Every function takes leading batch dimensions `...`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.device import CPU, put
from sim.policy import Proposer
from sim.workload import Sampling

FEW_CANDIDATES = 1024  # of a large vocabulary, whose order costs ten times as much as all else
MANY = 8  # times more tokens than are asked for: then a selection is faster than the order of all

# ------------------------------------------------------------------------------------------------------ processing
#
# The steps, their order and what they do with equals are those of transformers' logits processors: repetition penalty,
# temperature, top_k, top_p, min_p (but theirs leave open which of equals top_p keeps). Target and draft take them in
# these same functions.


def penalised(logits: Tensor, penalty: float, text: Sequence[int]) -> Tensor:
    """(n, V) logits after each of the last n tokens of `text` -> the same under a repetition penalty: each row is
    penalised for the tokens up to and including its own."""
    if penalty == 1:
        return logits
    return penalise(logits, penalty, seen_along(text, len(logits), logits.shape[-1], logits.device))


def penalise(logits: Tensor, penalty: float | Tensor, seen: Tensor) -> Tensor:
    """(..., V) logits, (..., V) whether a token was seen -> (..., V) float64: of those that were, positive logits
    divided by the penalty, negative ones multiplied (Keskar et al. 2019, section 4.1)."""
    logits = logits.double()
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def seen_along(text: Sequence[int], num_rows: int, vocab_size: int, device: torch.device = CPU) -> Tensor:
    """(num_rows, V) bool: which tokens are among the text up to each of its last `num_rows` tokens."""
    seen = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=CPU)
    num_shared = len(text) - num_rows + 1
    seen[:, put(text[:num_shared], CPU)] = True
    for row, token in enumerate(text[num_shared:], start=1):
        seen[row:, token] = True
    return put(seen, device)


def process(logits: Tensor, sampling: Sampling) -> Tensor:
    """(..., V) logits -> (..., V) float64 probabilities, all steps but the penalty; one-hot of the argmax at
    temperature 0.

    A row without a well-defined distribution (a NaN, a +inf, or nothing but -inf) becomes NaN throughout.
    """
    if sampling.temperature == 0:
        largest, token = logits.max(-1, keepdim=True)
        one_hot = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device).scatter_(-1, token, 1.0)
        return torch.where(largest.isfinite(), one_hot, torch.nan)
    return processed_logits(logits, sampling).softmax(-1)


def processed_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """(..., V) logits -> (..., V) float64 logits of the law that is drawn from at a temperature > 0; -inf for tokens
    that are cut."""
    logits = logits.to(torch.float64, copy=True)  # in place from here on: at large vocabularies a copy is what costs
    logits.sub_(logits.amax(-1, keepdim=True)).div_(sampling.temperature)
    if sampling.top_k:
        logits = _keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = _keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = _keep_min_p(logits, sampling.min_p)
    return logits


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k largest, and all that equal the smallest of them."""
    smallest = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def _keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The fewest largest with a probability of at least p together; of equals at the border those of lowest id.

    The order of a few candidates is enough if the last of them is cut: those behind it are cut as well.
    """
    probs, vocab_size = logits.softmax(-1), logits.shape[-1]
    few = vocab_size if logits.is_cuda else min(FEW_CANDIDATES, vocab_size)  # to ask whether they suffice is to wait
    for num_candidates in (few, vocab_size):
        ids = by_rank(logits, num_candidates)
        ordered = probs.gather(-1, ids).flip(-1)
        beyond = 1 - ordered.sum(-1, keepdim=True) if num_candidates < vocab_size else 0.0
        is_cut = (beyond + ordered.cumsum(-1) <= 1 - p).flip(-1)
        is_cut[..., 0] = False
        if num_candidates == vocab_size or is_cut[..., -1].all():
            break
    kept = logits.gather(-1, ids).masked_fill_(is_cut, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(-1, ids, kept)


def _keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Those with at least p times the largest probability; the largest logit is 0."""
    return logits.masked_fill(logits.exp() < p, -torch.inf)


# -------------------------------------------------------------------------------------------------------- draft laws


def down_weight(probs: Tensor, logits: Tensor, num_tokens: int, factor: float) -> Tensor:
    """(..., V) q -> (..., V) q': its `num_tokens` most likely tokens multiplied by `factor`, renormalised (Saguaro
    sampling, Definition 14). Which tokens those are the logits say, as for the prepared ones."""
    weights = torch.ones_like(probs).scatter_(-1, by_rank(logits, num_tokens), factor)
    weighted = probs * weights
    return weighted / weighted.sum(-1, keepdim=True)


def stated_probs(proposer: Proposer, tokens: Tensor, vocab_size: int) -> Tensor:
    """(..., n) tokens of a proposer that is no model -> (..., n, V) the law that they were drawn from: one-hot for an
    n-gram, which had no choice, 1/V for a filler."""
    shape = (*tokens.shape, vocab_size)
    if proposer is Proposer.FILLER:
        return torch.full(shape, 1.0 / vocab_size, dtype=torch.float64, device=tokens.device)
    zeros = torch.zeros(shape, dtype=torch.float64, device=tokens.device)
    return zeros.scatter_(-1, tokens.unsqueeze(-1), 1.0)


def uniform_tokens(uniforms: Tensor, vocab_size: int) -> Tensor:
    """(...) uniform numbers in [0, 1) -> (...) tokens of the law 1/V."""
    return (uniforms * vocab_size).long()


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """(..., V) float64 weights of positive total, (...) uniform numbers in [0, 1) -> (...) tokens by inverse CDF.

    The first token whose cumulative weight exceeds u times the total has a positive weight itself, so a token of zero
    weight is never drawn. A row of NaN gives some token id; whoever verifies it rejects it.
    """
    cumulative = weights.cumsum(-1)
    goal = uniforms.unsqueeze(-1) * cumulative[..., -1:]
    token = torch.searchsorted(cumulative, goal, right=True).squeeze(-1)
    return token.clamp_(max=weights.shape[-1] - 1)


def verify(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor,
    accept_uniforms: Tensor,
    residual_uniform: Tensor,
    bonus_uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): `(num_accepted (...), bonus_token (...))`.

    Shapes: target_probs (..., n+1, V), draft_tokens (..., n), draft_probs (..., n, V), accept_uniforms (..., n), the
    others (...); n may be 0. `draft_probs` must be what the tokens were drawn from. Token y is accepted iff
    u q(y) < p(y), with probability min(1, p(y) / q(y)); the first rejection draws from max(0, p - q) normalised, full
    acceptance from p. A draft row that is NaN rejects its token and its bonus token comes from p.
    """
    num_drafted = draft_tokens.shape[-1]
    chosen = draft_tokens.unsqueeze(-1)
    p_chosen = target_probs[..., :num_drafted, :].gather(-1, chosen).squeeze(-1)
    q_chosen = draft_probs.gather(-1, chosen).squeeze(-1)
    accepted = accept_uniforms * q_chosen < p_chosen
    num_accepted = accepted.long().cumprod(-1).sum(-1)

    bonus_row = num_accepted[..., None, None].expand(*num_accepted.shape, 1, target_probs.shape[-1])
    p = target_probs.gather(-2, bonus_row).squeeze(-2)
    # Beyond the last draft token nothing was proposed: q = 0 there, and the residual is p itself.
    q = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1)).gather(-2, bonus_row).squeeze(-2)
    residual = (p - q).clamp_(min=0.0)
    # Without positive mass p and q differ by rounding only, and the rejection was the rounding's doing.
    has_mass = residual.sum(-1, keepdim=True) > 0
    uniform = torch.where(num_accepted < num_drafted, residual_uniform, bonus_uniform)
    return num_accepted, draw(torch.where(has_mass, residual, p), uniform)


def verify_greedy(target_tokens: list[int], draft_tokens: tuple[int, ...]) -> tuple[int, int]:
    """`verify` at temperature 0, where p is one-hot: a draft token is accepted iff it is the target's argmax.

    `target_tokens` holds the n + 1 argmaxes.
    """
    num_accepted = 0
    while num_accepted < len(draft_tokens) and draft_tokens[num_accepted] == target_tokens[num_accepted]:
        num_accepted += 1
    return num_accepted, target_tokens[num_accepted]


def rank(logits: Tensor, tokens: Tensor) -> Tensor:
    """(..., V) logits, (...) tokens -> (...) how many tokens stand before: larger logit, or equal and lower id."""
    chosen = tokens.unsqueeze(-1)
    value = logits.gather(-1, chosen)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ((logits > value) | ((logits == value) & (ids < chosen))).sum(-1)


def by_rank(logits: Tensor, num_tokens: int) -> Tensor:
    """(..., V) logits -> (..., num_tokens) the most likely tokens, best first, ties by lower id; V at most.

    Without equals at its border the set of the largest is known without the order of all, which takes long for a large
    vocabulary; without any equals so is their order. On a GPU nobody asks whether there are any: there numbers whose
    order is that of the ranks are selected.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and num_tokens:
        return by_rank_unasked(logits, min(num_tokens, logits.shape[-1]))
    if 0 < MANY * num_tokens < logits.shape[-1]:
        largest, ids = logits.topk(num_tokens + 1)
        falls = largest[..., :-1] > largest[..., 1:]
        if falls.all():
            return ids[..., :-1]
        if falls[..., -1].all():
            ids = ids[..., :-1].sort().values
            order = logits.gather(-1, ids).sort(descending=True, stable=True).indices
            return ids.gather(-1, order)
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :num_tokens]


def by_rank_unasked(logits: Tensor, num_tokens: int) -> Tensor:
    """`by_rank` of logits of at most 32 bits, without a question that would have to wait for the device.

    The bits of a float, those of a negative one but its sign inverted, are an integer that is ordered as the floats
    are; with the tokens' ids, counted from above, below it no two are equal. A NaN of either sign may stand anywhere.
    """
    vocab_size = logits.shape[-1]
    bits = (logits.float() + 0.0).view(torch.int32)  # -0 becomes 0, its equal
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    from_above = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    chosen = ((order << 32) + from_above).topk(num_tokens).values
    return vocab_size - 1 - (chosen & 0xFFFFFFFF)
