"""Progress on the terminal: what is being done, how far it is, how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SETTLED_S, MIN_STEPS = 3.0, 2  # before which a stage does not say how long it will take


class Stages:
    """Prints each stage's time when it ends and keeps it in `durations_s`.

    A terminal sees a bar with the time left; elsewhere a stage that takes long says once how long it will take. With
    `quiet` nothing is printed.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console = Console(quiet=True) if quiet else console
        self.durations_s: dict[str, float] = {}
        self._spared_s = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named piece of work."""
        start_s, self._spared_s = time.perf_counter(), 0.0
        yield
        elapsed_s = time.perf_counter() - start_s
        self.durations_s[name] = elapsed_s + self._spared_s
        before = f", {self._spared_s:.1f} s of it before" if self._spared_s else ""
        self.console.print(f"{name:<44} {self.durations_s[name]:7.1f} s{before}", highlight=False)

    def split(self, name: str, part: str, seconds: float) -> None:
        """So many seconds of a stage that has ended were for something else."""
        self.durations_s[name] -= seconds
        self.durations_s[part] = seconds

    def spare(self, seconds: float) -> None:
        """A part of the present stage was done by an earlier session, in so many seconds."""
        self._spared_s += seconds

    @contextmanager
    def counted(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """A stage of `total` steps; call the value after each of them."""
        with self.reported(name) as report:
            done = count(1)
            yield lambda: report(next(done), total)

    @contextmanager
    def reported(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """A stage that says itself how far it is: call the value with the steps done and their total."""
        with self.stage(name), self._progress() as progress:
            task = progress.add_task(name, total=None)
            forecast = _Forecast(name)

            def report(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)
                progress.refresh()
                if not self.console.is_terminal and (text := forecast.after(done, total)):
                    self.console.print(text, highlight=False)

            yield report

    def _progress(self) -> Progress:
        # Refreshed by hand, between measurements: a refreshing thread would take time from what is measured.
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        interactive = self.console.is_terminal
        return Progress(*columns, console=self.console, auto_refresh=False, transient=True, disable=not interactive)


class _Forecast:
    """Says once, when a stage has run for a while, how long it still takes."""

    def __init__(self, name: str) -> None:
        self._name, self._start_s, self._is_told = name, time.perf_counter(), False

    def after(self, done: int, total: int) -> str | None:
        """The line to print after a step, if it is time for it."""
        elapsed_s = time.perf_counter() - self._start_s
        if self._is_told or elapsed_s < SETTLED_S or done < MIN_STEPS or done >= total:
            return None
        self._is_told = True
        return f"{self._name}: {done} of {total}, about {elapsed_s * (total - done) / done:.0f} s left"
