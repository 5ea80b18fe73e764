"""SD and SSD that accept or reject a speculation as a block in place of token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.agreement import Agreement, AgreementRecord
from sim.errors import BadInput, require_count
from sim.strategies.places import FloatArray, read_after
from sim.strategies.prepared_tree import PreparedTree
from sim.strategies.rank_law import rank_law
from sim.strategies.speculative_tree import SpeculativeTree
from sim.strategies.strategy import RowState
from sim.strategies.token_tree import TokenTree
from sim.trace import Source


@dataclass(frozen=True)
class BlockVerification:
    """ "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), with the time of SD.

    The replay law (ours): with r_j = q(x_j)/p(x_j) along the committed text, a round accepts at least i tokens with
    probability min over j <= i of r_1 ... r_j (1 for j = 0), where token verification has min(1, r_1) ... min(1, r_i).
    It follows from the paper's P(at least i accepted | x_1 ... x_i drafted) = b_i with b_i = min(1, b_{i-1} / r_i): the
    text begins with x_1 ... x_i in a share p(x_1 ... x_i) of all runs, in q(x_1 ... x_i) b_i of them as i accepted
    tokens, and what follows has the target's law either way. Exact on a record; summary numbers do not tell it, and at
    temperature 0 both rules are one.
    """

    speculation_length: int
    room: int | None = None  # draft tokens that the length cap leaves room for; all of them unless given

    def __post_init__(self) -> None:
        require_count("speculation_length", self.speculation_length, 1)

    @property
    def name(self) -> str:
        return f"SD K={self.speculation_length}, block verification"

    @property
    def num_drafted(self) -> int:
        return self.speculation_length

    @property
    def drafts_beside(self) -> bool:
        return False

    def shortened(self, num_drafted: int) -> BlockVerification:
        return replace(self, room=num_drafted)

    def states(self, agreement: Agreement) -> tuple[RowState, ...]:
        """Those of SD."""
        if not isinstance(agreement, AgreementRecord):
            rule = (
                "needs a token-level agreement record, which `saguaro profile` writes; summary numbers do not tell it"
            )
            raise BadInput("block verification", rule)
        survival = self.survival(agreement)
        moves = np.zeros((len(survival) + 1, 2, *survival.shape[1:]))
        moves[1:-1, 0], moves[-1, 1] = survival[:-1] - survival[1:], survival[-1]
        sd = SpeculativeTree(TokenTree.chain(self.speculation_length), room=self.room).states(agreement)
        return tuple(RowState(state.name, state.work, moves) for state in sd)

    def survival(self, record: AgreementRecord) -> FloatArray:
        """(K + 1, num_prompts, width) probability that at least i tokens are accepted; 0 beyond the end of a text. K is
        what the length cap leaves of it."""
        ratios = np.zeros((record.num_prompts, int(record.lengths.max(initial=0))))
        ratios[record.prompt, record.position] = likelihood_ratios(record)
        product, survival = np.ones_like(ratios), [np.ones_like(ratios)]
        for j in range(self.speculation_length if self.room is None else self.room):
            product = product * read_after(ratios, j)
            survival.append(np.minimum(survival[-1], product))
        return np.stack(survival)


@dataclass(frozen=True)
class PreparedBlocks:
    """SSD whose verifications accept a speculation as a block; after a miss the draft drafts.

    `fan_out[k]` bonus tokens are prepared for accept count k, after a hit and after a miss. They are the likeliest of
    q, the rejected one among them: as later tokens have a say in the accepted count, the draft's own next token may be
    the bonus token too. So a hit is decided by the text alone, and the law is exact on a record. The time is that of
    SSD.
    """

    fan_out: tuple[int, ...]
    room: int | None = None  # draft tokens that the length cap leaves room for; all of them unless given

    def __post_init__(self) -> None:
        if len(self.fan_out) < 2:
            raise BadInput("fan-out", "must have an entry for each accept count, 0..K with K >= 1", list(self.fan_out))

    @property
    def name(self) -> str:
        return f"SSD K={self.num_drafted} F={'/'.join(map(str, self.fan_out))}, block verification"

    @property
    def num_drafted(self) -> int:
        return len(self.fan_out) - 1

    @property
    def drafts_beside(self) -> bool:
        return True

    def shortened(self, num_drafted: int) -> PreparedBlocks:
        return replace(self, room=num_drafted)

    def states(self, agreement: Agreement) -> tuple[RowState, ...]:
        """After a miss and after a hit."""
        accepting = BlockVerification(self.num_drafted, self.room).states(agreement)[0]
        law, fan_out = rank_law(agreement, Source.HIT), self.fan_out
        moves = np.zeros_like(accepting.moves)
        for num_accepted in range(len(moves) - 1):
            ended = accepting.chance_of(num_accepted + 1)
            prepared = ended * law.within(0, fan_out[num_accepted], num_accepted)
            moves[num_accepted + 1] = ended - prepared, prepared
        ssd = PreparedTree(TokenTree.chain(self.num_drafted), fan_out, fan_out, room=self.room).states(agreement)
        return tuple(RowState(state.name, state.work, moves) for state in ssd)


def likelihood_ratios(record: AgreementRecord) -> FloatArray:
    """(n,) q(x)/p(x) of the committed tokens; at temperature 0, where both laws are one-hot, 1 or 0."""
    return np.exp(record.log_q - record.log_p) if record.temperature else record.acceptance


def block_verified(
    target_probs: Sequence[FloatArray], draft_probs: Sequence[FloatArray], drafted: Sequence[int]
) -> tuple[FloatArray, list[FloatArray]]:
    """The paper's Algorithm 2 on one speculation: (K + 1,) law of the accepted count, and for each count the (V,) law
    of the bonus token.

    `target_probs` has K + 1 rows along the drafted tokens, `draft_probs` K.
    """
    K = len(drafted)
    weight = np.ones(K + 1)  # b_i
    for i, token in enumerate(drafted):
        weight[i + 1] = min(1.0, weight[i] * target_probs[i][token] / draft_probs[i][token])
    stops = np.ones(K + 1)  # that i tokens are accepted if not more are
    bonus = []
    for i in range(K):
        excess = np.maximum(0.0, weight[i] * target_probs[i] - draft_probs[i])
        total = float(excess.sum())
        stops[i] = total / (total + 1 - weight[i]) if total + 1 - weight[i] > 0 else 1.0
        bonus.append(excess / total if total > 0 else target_probs[i])
    stops[0], stops[K] = 1.0, weight[K]
    law, left = np.zeros(K + 1), 1.0
    for i in range(K, -1, -1):
        law[i] = left * stops[i]
        left *= 1 - stops[i]
    return law, [*bonus, target_probs[K]]
