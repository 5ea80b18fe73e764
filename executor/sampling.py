"""From logits to tokens: processing, sampling, verification. Losslessness lives here; everything is a pure function.

p is the target's processed distribution, q the draft's. Every function takes leading batch dimensions `...`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sim.policy import Proposer


def process(logits: Tensor, temperature: float) -> Tensor:
    """(..., V) logits -> (..., V) float64 probabilities: softmax at `temperature`, one-hot of the argmax at 0.

    A row without a well-defined distribution (a NaN, a +inf, or nothing but -inf) becomes NaN throughout.
    """
    logits = logits.double()
    largest, token = logits.max(-1, keepdim=True)
    if temperature == 0:
        one_hot = torch.zeros_like(logits).scatter_(-1, token, 1.0)
        return torch.where(largest.isfinite(), one_hot, torch.nan)
    return ((logits - largest) / temperature).softmax(-1)


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
        return torch.full(shape, 1.0 / vocab_size, dtype=torch.float64)
    return torch.zeros(shape, dtype=torch.float64).scatter_(-1, tokens.unsqueeze(-1), 1.0)


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
    """(..., V) logits -> (..., num_tokens) the most likely tokens, best first, ties by lower id."""
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :num_tokens]
