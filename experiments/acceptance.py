"""How often draft tokens are accepted, as a file of numbers may say it: never without the definition."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from experiments.strict_yaml import Section
from sim.errors import BadInput
from sim.parametric import conditional_from_cumulative
from sim.theory import acceptance_of_tokens_per_round

Probability = Annotated[float, Field(ge=0, le=1)]
DEFINITIONS = (
    "conditional (accepted of the tokens tested, by position), cumulative (of all rounds, those that accept so many),"
    " or with a speculation_length: mean_acceptance_length (tokens per round, bonus included), mean_accepted (without"
    " the bonus) or accepted_over_drafted"
)
OF_A_LENGTH = ("mean_acceptance_length", "mean_accepted", "accepted_over_drafted")


class AcceptanceConfig(Section):
    """Acceptance by one definition.

    `conditional`: of the tokens tested at a position, the share accepted; the last entry stands for all that follow.
    `cumulative`: of all rounds, the share that accepts this position and everything before it. The three means are
    those of rounds with `speculation_length` draft tokens and become the one conditional rate that leads to them.
    `records`: files of agreement records beside this one, two where a dump leaves something open, its lower end first;
    `record_number` says which of them counts. `plus_minus` is how far every conditional rate may lie above or below,
    all of them together, and `shift` where they lie.
    """

    conditional: Annotated[tuple[Probability, ...], Field(min_length=1)] | None = None
    cumulative: Annotated[tuple[Probability, ...], Field(min_length=1)] | None = None
    mean_acceptance_length: Annotated[float, Field(ge=1)] | None = None
    mean_accepted: Annotated[float, Field(ge=0)] | None = None
    accepted_over_drafted: Probability | None = None
    speculation_length: Annotated[int, Field(ge=1)] | None = None
    records: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)] | None = None
    record_number: Annotated[int, Field(ge=0, le=1)] = 0
    plus_minus: Annotated[float, Field(ge=0, lt=1)] = 0.0
    shift: Annotated[float, Field(gt=-1, lt=1)] = 0.0

    def conditional_rates(self) -> tuple[float, ...]:
        """By draft position. Raises `BadInput` unless there is exactly one definition, and it can be met."""
        self.check()
        rates = self.conditional or self._from_cumulative() or (self._from_mean(),)
        return tuple(min(1.0, max(0.0, rate + self.shift)) for rate in rates)

    def check(self) -> None:
        """Raises `BadInput` unless exactly one definition is given, with what belongs to it."""
        names = ("conditional", "cumulative", *OF_A_LENGTH, "records")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadInput("acceptance", f"must hold exactly one definition: {DEFINITIONS}", given or None)
        if (given[0] in OF_A_LENGTH) != (self.speculation_length is not None):
            raise BadInput(
                "acceptance.speculation_length", f"must be given with {', '.join(OF_A_LENGTH)} and only there"
            )
        if self.records is not None and (self.plus_minus or self.shift):
            raise BadInput("acceptance.plus_minus", "must be left out with records, which hold every position")
        if self.record_number >= len(self.records or (0,)):
            raise BadInput("acceptance.record_number", "must be that of one of the records", self.record_number)

    def _from_cumulative(self) -> tuple[float, ...]:
        return conditional_from_cumulative(self.cumulative) if self.cumulative else ()

    def _from_mean(self) -> float:
        length = self.speculation_length
        assert length is not None
        if self.accepted_over_drafted is not None:
            tokens = 1 + length * self.accepted_over_drafted
        elif self.mean_accepted is not None:
            tokens = 1 + self.mean_accepted
        else:
            assert self.mean_acceptance_length is not None
            tokens = self.mean_acceptance_length
        try:
            return acceptance_of_tokens_per_round(tokens, length)
        except ValueError as error:
            raise BadInput("acceptance", str(error)) from None
