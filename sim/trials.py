"""Which policies of a space are evaluated where it is too large to enumerate: Optuna proposes, neighbours finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from sim.agreement import Agreement
from sim.errors import BadInput
from sim.policy import Policy
from sim.search_space import FanOutLists, SearchSpace, Setting, synchronous_candidates
from sim.simulate import Prediction

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

Screened = tuple[list[Prediction[Policy]], list[tuple[Policy, str]]]

MOST_TRIALS = 600  # proposals of Optuna
PATIENCE = 150  # proposals in a row that do not improve on the best
AT_ONCE = 15  # proposals evaluated together: policies of one length share work
NAMES = tuple(entry.name for entry in fields(Setting))


def chosen_by_trials(
    space: SearchSpace,
    screen: Callable[[list[Policy]], Screened],
    merit: Callable[[Prediction[Policy]], float],
    agreement: Agreement,
    seed: int,
) -> tuple[list[Prediction[Policy]], list[tuple[Policy, str]], str]:
    """Predictions, candidates that are refused, and why the search stopped.

    AR and every SD are evaluated. Then a seeded tree-structured Parzen estimator proposes settings, until
    `MOST_TRIALS` or until `PATIENCE` of them bring nothing better; at last the settings next to the best, one field at
    a time, until none is better. Raises `BadInput` where Optuna is not installed.
    """
    trials = _Trials(space, screen, merit, agreement)
    trials.evaluate_policies(synchronous_candidates(space))
    study = _study(seed)
    why = f"{MOST_TRIALS} proposals, the limit"
    for _ in range(MOST_TRIALS // AT_ONCE):
        asked = [study.ask() for _ in range(AT_ONCE)]
        settings = [trials.proposed(trial) for trial in asked]
        for trial, value in zip(asked, trials.evaluate(settings), strict=True):
            study.tell(trial, value)
        if trials.num_since_best >= PATIENCE:
            why = f"{PATIENCE} proposals in a row brought nothing better"
            break
    trials.climb()
    num = len(trials.known) + len(trials.refused)
    stopped = (
        f"{num} policies of {space.num_combinations} combinations were evaluated: {why}, and no neighbour is better"
    )
    return list(trials.known.values()), list(trials.refused.items()), stopped


def _study(seed: int) -> Study:
    try:
        import optuna
    except ImportError:
        rule = "has too many combinations to enumerate; Optuna would choose: install 'saguaro-planner[search]'"
        raise BadInput("search space", rule) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))


class _Trials:
    """What has been evaluated so far; nothing is evaluated twice."""

    def __init__(
        self,
        space: SearchSpace,
        screen: Callable[[list[Policy]], Screened],
        merit: Callable[[Prediction[Policy]], float],
        agreement: Agreement,
    ) -> None:
        self.axes, self.screen, self.merit = space.axes, screen, merit
        self.fan_outs = FanOutLists(agreement, max(space.budgets))
        self.known: dict[Policy, Prediction[Policy]] = {}
        self.refused: dict[Policy, str] = {}
        self.best: tuple[float, Setting | None] = (0.0, None)
        self.num_since_best = 0

    def proposed(self, trial: Trial) -> Setting:
        """Lengths and budgets are ordered, the rest is not."""
        places = [
            trial.suggest_int(name, 0, len(axis) - 1)
            if name in ("speculation_length", "budget")
            else trial.suggest_categorical(name, range(len(axis)))
            for name, axis in zip(NAMES, self.axes, strict=True)
        ]
        return Setting(*(axis[place] for axis, place in zip(self.axes, places, strict=True)))

    def evaluate_policies(self, policies: list[Policy]) -> None:
        """Those that were not met before."""
        new = [policy for policy in dict.fromkeys(policies) if policy not in self.known and policy not in self.refused]
        if new:
            predictions, refused = self.screen(new)
            self.known |= {prediction.policy: prediction for prediction in predictions}
            self.refused |= dict(refused)

    def evaluate(self, settings: list[Setting]) -> list[float]:
        """What each setting is worth, 0 if it is refused."""
        policies = [self.fan_outs.policies(setting) for setting in settings]
        self.evaluate_policies([policy for row in policies for policy in row])
        values = [max(self.merit(self.known[p]) if p in self.known else 0.0 for p in row) for row in policies]
        for setting, value in zip(settings, values, strict=True):
            self.num_since_best += 1
            if value > self.best[0]:
                self.best, self.num_since_best = (value, setting), 0
        return values

    def climb(self) -> None:
        """From the best setting to better neighbours, as long as there are any."""
        while self.best[1] is not None:
            before = self.best
            self.evaluate(list(self._neighbours(self.best[1])))
            if self.best == before:
                return

    def _neighbours(self, setting: Setting) -> Iterator[Setting]:
        for name, axis in zip(NAMES, self.axes, strict=True):
            for value in _next_to(getattr(setting, name), axis, is_ordered=name in ("speculation_length", "budget")):
                yield replace(setting, **{name: value})


def _next_to(value: Any, axis: tuple[Any, ...], *, is_ordered: bool) -> list[Any]:
    if not is_ordered:
        return [other for other in axis if other != value]
    place = axis.index(value)
    return list(axis[max(0, place - 1) : place]) + list(axis[place + 1 : place + 2])
