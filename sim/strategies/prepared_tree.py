"""SSD with a tree (or chain) of draft tokens prepared for each likely outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.agreement import Agreement
from sim.errors import BadInput
from sim.policy import Fallback, exact_fan_out
from sim.strategies.drafter import DRAFT_MODEL, Drafter
from sim.strategies.rank_law import RankLaw, rank_law
from sim.strategies.speculative_tree import drafting_of
from sim.strategies.strategy import DraftWork, RoundWork, RowState
from sim.strategies.token_tree import TokenTree
from sim.strategies.walk import PathEnd, path_ends
from sim.system import HostTerm
from sim.trace import Operation, Source

FloatArray = NDArray[np.float64]
EMPTY = TokenTree(())


@dataclass(frozen=True)
class PreparedTree:
    """SSD (arXiv 2603.03251) whose speculations are trees: an outcome is the node where the accepted path ends and the
    bonus token, and each prepared outcome has a tree of its own.

    `fan_out_after_hit[i]` bonus tokens are prepared for node number i of the tree (`TokenTree.nodes`), `..._after_miss`
    likewise after a miss, of the one node () with fallback `none`. Prepared are the likeliest tokens that are not
    children of the node. The build is a glue pass over the tree verified and one step for each level of the trees
    drafted, or one pass in all. After a miss a row drafts for itself and the others wait (`Fallback.DRAFT_MISSING`), or
    verifies nothing (`none`). Late builds are waited for. With a chain it is `SpeculativeSpeculative`. On a record it
    is exact at temperature 0, and for the rule of `path_ends` above. Raises `BadInput` on lists of another length.
    """

    tree: TokenTree
    fan_out_after_hit: tuple[int, ...]
    fan_out_after_miss: tuple[int, ...]
    fallback: Fallback = Fallback.DRAFT_MISSING
    drafter: Drafter = DRAFT_MODEL
    room: int | None = None  # levels that the length cap leaves room for; all of them unless given

    def __post_init__(self) -> None:
        if self.fallback not in (Fallback.DRAFT_MISSING, Fallback.NONE):
            raise BadInput("fallback", "must be draft_missing or none where trees are prepared", self.fallback)
        for source, fan_out in ((Source.HIT, self.fan_out_after_hit), (Source.MISS, self.fan_out_after_miss)):
            num_nodes = len(self._planned(source).nodes)
            if len(fan_out) != num_nodes:
                raise BadInput(f"fan-out after a {source.value}", f"must have {num_nodes} entries", list(fan_out))

    @property
    def name(self) -> str:
        is_chain = self.tree.num_nodes == self.tree.depth
        shape = f"K={self.tree.depth}" if is_chain else f"{self.tree.num_nodes} nodes, depth {self.tree.depth}"
        budget = f"B={sum(self.fan_out_after_hit)}|{sum(self.fan_out_after_miss)}"
        return f"SSD {shape} {budget} {self.fallback.value}, {self.drafter.name}"

    @property
    def num_drafted(self) -> int:
        return self.tree.depth

    @property
    def drafts_beside(self) -> bool:
        return True

    def shortened(self, num_drafted: int) -> PreparedTree:
        """Less is verified; what is prepared for the next round keeps its size."""
        return replace(self, room=num_drafted)

    def states(self, agreement: Agreement) -> tuple[RowState, ...]:
        """After a miss, and after a hit; a drafter on the target's features by how stale they are as well."""
        after_hit = (self._state(agreement, Source.HIT, stale) for stale in self._staleness)
        return (self._state(agreement, Source.MISS, 0), *after_hit)

    @property
    def _staleness(self) -> range:
        return range(1, self.tree.depth + 2) if self.drafter.needs_features else range(1)

    def _state(self, agreement: Agreement, source: Source, stale: int) -> RowState:
        law = rank_law(agreement, source, self.drafter, stale)
        ends = list(path_ends(self._verified(source), law))
        moves = np.zeros((self.tree.depth + 2, 1 + len(self._staleness), *np.shape(ends[0].chance)))
        for end, fan_out in zip(ends, self._kept_fan_out(source), strict=True):
            prepared = end.prepared(fan_out, law)
            moves[end.num_tokens, 0] += end.chance - prepared
            moves[end.num_tokens, self._state_after(end)] += prepared
        name = source.value + (f", {stale} steps stale" if stale else "")
        return RowState(name, self._work(source), moves)

    def _state_after(self, end: PathEnd) -> int:
        """Of a hit. The speculation began with the accepted tokens and the bonus token, all of them guesses."""
        return 1 + (len(end.path) if self.drafter.needs_features else 0)

    def _planned(self, source: Source) -> TokenTree:
        return EMPTY if source is Source.MISS and self.fallback is Fallback.NONE else self.tree

    def _verified(self, source: Source) -> TokenTree:
        planned = self._planned(source)
        return planned if self.room is None else planned.cut(self.room)

    def _kept_fan_out(self, source: Source) -> list[int]:
        """Of the nodes that are verified."""
        fan_out = self.fan_out_after_hit if source is Source.HIT else self.fan_out_after_miss
        verified = self._verified(source)
        planned = zip(self._planned(source).nodes, fan_out, strict=True)
        return [num for path, num in planned if len(path) <= verified.depth]

    def _work(self, source: Source) -> RoundWork:
        verified = self._verified(source)
        missed = HostTerm.UNDRAFTED_MISS if self.fallback is Fallback.NONE else HostTerm.MISS
        host = HostTerm.HIT if source is Source.HIT else missed
        before = drafting_of(verified, self.drafter) if source is Source.MISS else ()
        num_branches = sum(self._kept_fan_out(source))
        return RoundWork(verified.num_nodes, host, before, self._build(verified, num_branches))

    def _build(self, verified: TokenTree, num_branches: int) -> tuple[DraftWork, ...]:
        if num_branches == 0:
            return ()
        ratio = self.drafter.pass_ratio
        glue = DraftWork(Operation.GLUE, verified.num_nodes + 1, 1, ratio)
        if self.drafter.one_pass:
            return (glue, DraftWork(Operation.TREE_STEP, num_branches, 1, ratio))
        if set(self.tree.num_expanded) == {1}:
            return (glue, DraftWork(Operation.TREE_STEP, num_branches, self.tree.depth, ratio))
        steps = (DraftWork(Operation.TREE_STEP, num_branches * num, 1, ratio) for num in self.tree.num_expanded)
        return (glue, *steps)


def prepared_tree(
    tree: TokenTree,
    budget: int,
    agreement: Agreement,
    fallback: Fallback = Fallback.DRAFT_MISSING,
    drafter: Drafter = DRAFT_MODEL,
) -> PreparedTree:
    """With the fan-out of the largest hit probability within a budget of branches, after a hit and after a miss."""
    lists = []
    for source in (Source.HIT, Source.MISS):
        verified = EMPTY if source is Source.MISS and fallback is Fallback.NONE else tree
        lists.append(_best_fan_out(verified, budget, rank_law(agreement, source, drafter)))
    return PreparedTree(tree, lists[0], lists[1], fallback, drafter)


def _best_fan_out(tree: TokenTree, budget: int, law: RankLaw) -> tuple[int, ...]:
    hit_mass = [
        [float(np.mean(end.prepared(fan_out, law))) for fan_out in range(budget + 1)] for end in path_ends(tree, law)
    ]
    return exact_fan_out(hit_mass, budget)
