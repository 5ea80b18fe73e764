"""SD with a tree of draft tokens, drafted level by level (or in one pass) before each verification."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sim.agreement import Agreement
from sim.strategies.drafter import DRAFT_MODEL, Drafter
from sim.strategies.rank_law import rank_law
from sim.strategies.strategy import DraftWork, RoundWork, RowState
from sim.strategies.token_tree import TokenTree
from sim.strategies.walk import PathEnd, path_ends
from sim.system import HostTerm
from sim.trace import Operation, Source


@dataclass(frozen=True)
class SpeculativeTree:
    """The target verifies all nodes in one pass under a tree mask (SpecInfer, arXiv 2305.09781; Sequoia, 2402.12374).

    Assumes that a verification costs the same for nodes of a tree as for tokens of a chain. With a chain it is SD, with
    an empty tree AR. On an agreement record the tree holds the likeliest tokens of the draft model, and the target's
    token is followed where it is a child: exact at every temperature for that rule, at temperature 0 that of SD too.
    """

    tree: TokenTree
    drafter: Drafter = DRAFT_MODEL
    room: int | None = None  # levels that the length cap leaves room for; all of them unless given

    @property
    def name(self) -> str:
        shape = f"K={self.tree.depth}" if self.is_chain else f"{self.tree.num_nodes} nodes, depth {self.tree.depth}"
        return f"SD {shape}, {self.drafter.name}" if self.tree.num_nodes else "AR"

    @property
    def is_chain(self) -> bool:
        return self.tree.num_nodes == self.tree.depth

    @property
    def num_drafted(self) -> int:
        return self.tree.depth

    @property
    def drafts_beside(self) -> bool:
        return False

    def shortened(self, num_drafted: int) -> SpeculativeTree:
        return replace(self, room=num_drafted)

    @property
    def drafted(self) -> TokenTree:
        return self.tree if self.room is None else self.tree.cut(self.room)

    def states(self, agreement: Agreement) -> tuple[RowState, ...]:
        """The drafter has seen all tokens but the last, or lacks one more: the leaf at which a path ended."""
        ends = list(path_ends(self.drafted, rank_law(agreement, Source.SYNCHRONOUS, self.drafter)))
        moves = np.zeros((self.tree.depth + 2, 2, *np.shape(ends[0].chance)))
        for end in ends:
            moves[end.num_tokens, int(self._leaves_one_unfed(end))] += end.chance
        return tuple(RowState(name, self._work(unfed), moves) for unfed, name in ((1, "fed"), (2, "a leaf unfed")))

    def _leaves_one_unfed(self, end: PathEnd) -> bool:
        return end.num_children == 0 and self.tree.depth > 0 and not self.drafter.one_pass

    def _work(self, num_unfed: int) -> RoundWork:
        host = HostTerm.SPECULATIVE if self.tree.depth else HostTerm.AUTOREGRESSIVE
        return RoundWork(self.drafted.num_nodes, host, before=drafting_of(self.drafted, self.drafter, num_unfed))


def drafting_of(tree: TokenTree, drafter: Drafter, num_unfed: int = 1) -> tuple[DraftWork, ...]:
    """Drafting a tree while nothing else runs; the first step takes the tokens that the drafter has not seen."""
    if tree.depth == 0:
        return ()
    first = DraftWork(Operation.DRAFT_STEP, num_unfed, 1, drafter.pass_ratio)
    if drafter.one_pass:
        return (first,)
    if set(tree.num_expanded) == {1}:
        others = DraftWork(Operation.DRAFT_STEP, 1, tree.depth - 1, drafter.pass_ratio)
        return (first, others) if tree.depth > 1 else (first,)
    levels = [(num, Operation.DRAFT_STEP if num == 1 else Operation.TREE_STEP) for num in tree.num_expanded[1:]]
    return (first, *(DraftWork(operation, num, 1, drafter.pass_ratio) for num, operation in levels))
