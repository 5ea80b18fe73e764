"""Who drafts: how acceptance goes on along a speculation, and how many passes it takes."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import BadInput, require_number


@dataclass(frozen=True)
class Drafter:
    """A drafter by what sets it apart from the system's draft model.

    Its token number j, drafted `stale` steps after the last one that the target has seen, is accepted with the
    agreement's probability for j times `decay` ** (j + stale) (`stale` counts only where it `needs_features`). A pass
    takes `pass_ratio` times a step of the draft model; `one_pass` drafters make all tokens of a speculation in one.
    Raises `BadInput` outside these ranges.
    """

    name: str
    decay: float = 1.0
    pass_ratio: float = 1.0
    one_pass: bool = False
    needs_features: bool = False

    def __post_init__(self) -> None:
        require_number("drafter: decay", self.decay, 0, 1)
        require_number("drafter: pass_ratio", self.pass_ratio, 0)
        if self.one_pass and self.needs_features:
            rule = "must not need the target's features of every token: it has no steps after the first"
            raise BadInput("drafter of one pass", rule)

    def acceptance(self, recorded: float, draft_index: int, stale: int = 0) -> float:
        """Probability that its token number `draft_index` is accepted, once it is tested."""
        return recorded * self.decay ** (draft_index + (stale if self.needs_features else 0))


DRAFT_MODEL = Drafter("draft model")


def one_pass_drafter(decay: float, pass_ratio: float = 1.0) -> Drafter:
    """K tokens for one pass: multi-token prediction (arXiv 2404.19737), Medusa heads (2401.10774), a draft model that
    fills K masked places at once (PARD, 2504.18583).

    Assumes that a pass costs the same whatever K is, and that acceptance falls by the same factor with each place, as
    later tokens are drafted without knowing the ones before them. Under SSD it must be a model of its own (PARD): heads
    on the target's last features cannot draft for an outcome before the target has computed them.
    """
    return Drafter("one pass", decay, pass_ratio, one_pass=True)


def feature_drafter(decay: float, pass_ratio: float = 1.0) -> Drafter:
    """A head that continues from the target's own features (EAGLE, arXiv 2401.15077; EAGLE-3, 2503.01840).

    Its first token stands on features of the target, every later one on its own guesses of them: acceptance falls by
    the factor `decay` with each such step. EAGLE-3 is trained on its own guesses, which is to bring the decay close to
    1. The agreement's acceptance must be that of the head's first token. Under SSD it builds before the verification
    has ended: a speculation for k accepted tokens begins k + 1 steps after the last true feature (k tokens and the
    bonus token), and its acceptance has decayed by so many steps more. The hit curves are taken to be unchanged, which
    favours it there. What it recomputes with true features after a verification is taken to fit in its first step.
    """
    return Drafter("target features", decay, pass_ratio, needs_features=True)
