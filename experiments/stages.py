"""Progress on the terminal: what is being done, how far it is, how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Stages:
    """Prints each stage's time when it ends and keeps it in `durations_s`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.durations_s: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named piece of work."""
        start_s = time.perf_counter()
        yield
        self.durations_s[name] = time.perf_counter() - start_s
        self.console.print(f"{name:<44} {self.durations_s[name]:7.1f} s", highlight=False)

    @contextmanager
    def counted(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """A stage of `total` steps; call the value after each of them."""
        with self.stage(name), self._progress() as progress:
            task = progress.add_task(name, total=total)

            def advance() -> None:
                progress.update(task, advance=1)
                progress.refresh()

            yield advance

    @contextmanager
    def reported(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """A stage that says itself how far it is: call the value with the steps done and their total."""
        with self.stage(name), self._progress() as progress:
            task = progress.add_task(name, total=None)

            def report(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)
                progress.refresh()

            yield report

    def _progress(self) -> Progress:
        # Refreshed by hand, between measurements: a refreshing thread would take time from what is measured.
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        interactive = self.console.is_terminal
        return Progress(*columns, console=self.console, auto_refresh=False, transient=True, disable=not interactive)
