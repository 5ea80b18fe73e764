"""The draft role of the event engine: devices that answer outcomes, and build when nobody waits for an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

import simpy
from simpy.events import NORMAL, Event, Timeout

from sim.durations import Residuals, Step, Task
from sim.errors import RunFailed
from sim.policy import LateBuild
from sim.trace import Lane, Operation, Span

Process = Generator[Event, Any, Any]
Place = tuple[int, int]  # sequence and round that an operation belongs to
Meter = Callable[[Lane, float, float], None]  # told of each operation's lane, start and duration when it has ended


class Recorder:
    """Where operations end: sees that the clock has moved, and keeps their spans if asked to."""

    def __init__(self, env: simpy.Environment, spans: list[Span] | None, meter: Meter | None = None) -> None:
        self.env, self.spans, self.meter = env, spans, meter

    def end(
        self,
        lane: Lane,
        device: int,
        place: Place,
        operation: Operation,
        num_rows: int,
        num_tokens: float,
        context: float,
        start_s: float,
        duration_s: float,
    ) -> None:
        """An operation that began at `start_s` and takes `duration_s` has ended; tokens and context are means of the
        rows."""
        self.worked(lane, start_s, duration_s)
        if self.spans is not None:
            size = (round(num_tokens * num_rows), int(context))
            self.spans.append(Span(lane, operation, *place, *size, start_s, self.env.now, num_rows, device))

    def worked(self, lane: Lane, start_s: float, duration_s: float) -> None:
        """A device of a lane has worked from `start_s` on, and nothing more is kept of it."""
        self.check_clock(start_s, duration_s)
        if self.meter is not None:
            self.meter(lane, start_s, duration_s)

    def check_clock(self, start_s: float, duration_s: float) -> None:
        """Raises `RunFailed` if a duration above 0 was too short to move the clock."""
        if duration_s > 0 and not self.env.now > start_s:
            raise RunFailed(f"the clock stands still at {start_s} s: a duration of {duration_s} s is lost in rounding")


class Later(Event):
    """An event whose time is set after others wait for it."""

    def happen_in(self, delay: float) -> None:
        """Happens after `delay` seconds."""
        self._ok, self._value = True, None
        self.env.schedule(self, NORMAL, delay)


class Work:
    """What a target gives to one or more draft devices: a task for each."""

    __slots__ = ("_all_ended", "env", "num_open", "place", "residuals", "start_s", "tasks", "took_s")

    def __init__(
        self, env: simpy.Environment, tasks: tuple[Task, ...], residuals: list[Residuals], place: Place
    ) -> None:
        self.env, self.tasks, self.residuals, self.place = env, tasks, residuals, place
        self.num_open = len(tasks)
        self.start_s = self.took_s = 0.0
        self._all_ended: Event | None = None

    def ended(self) -> Event:
        """Happens when the last device has ended its task; asked for while one has not."""
        self._all_ended = Event(self.env)
        return self._all_ended

    def passes(self, device: int, seconds: float) -> Event:
        """The time of an operation on a device."""
        return Timeout(self.env, seconds)

    def end_task(self) -> bool:
        """One more device has ended its task. Whether this is what somebody waited for."""
        self.num_open -= 1
        if self.num_open:
            return False
        self.took_s = self.env.now - self.start_s
        if self._all_ended is None:
            return False
        self._all_ended.succeed()
        return True


class Build(Work):
    """Glue pass and tree steps beside one verification."""

    __slots__ = ("in_one", "is_abandoned", "on_late", "progress")

    def __init__(
        self,
        env: simpy.Environment,
        tasks: tuple[Task, ...],
        residuals: list[Residuals],
        place: Place,
        on_late: LateBuild,
        in_one: bool,
    ) -> None:
        """`in_one`: its operations pass as one event, as nothing can come between them."""
        super().__init__(env, tasks, residuals, place)
        self.on_late, self.in_one, self.is_abandoned = on_late, in_one, False
        self.progress = [] if in_one else [0] * len(tasks)  # operations done by each device

    def is_needed_no_more(self) -> None:
        """Whether that ends it early is the policy's choice."""
        self.is_abandoned = self.on_late is LateBuild.ABANDON

    def is_done(self, device: int) -> bool:
        """Whether a device has no operation left. The glue pass is always run: it tells what is prepared."""
        progress = self.progress[device]
        return progress == len(self.tasks[device].steps) or (self.is_abandoned and progress > 0)


class Answer(Work):
    """Draft steps in the open, the hand-over to the target, and then the build of the round."""

    __slots__ = ("build", "given", "host_s")

    def __init__(
        self,
        env: simpy.Environment,
        tasks: tuple[Task, ...],
        residuals: list[Residuals],
        place: Place,
        host_s: float,
        build: Build | None,
    ) -> None:
        super().__init__(env, tasks, residuals, place)
        self.host_s, self.build = host_s, build
        self.given = Later(env)  # the target has its speculations and the build begins


class DraftDevice:
    """Works on answers in the order in which they were asked for, and on builds, oldest first, while no answer waits.

    An answer is not interrupted, a build is between its operations. The first device hands the answers over.
    """

    def __init__(self, devices: list[DraftDevice], recorder: Recorder) -> None:
        self.devices, self.recorder, self.env = devices, recorder, recorder.env
        self.index = len(devices)
        self.is_recorded = recorder.spans is not None
        self.answers: deque[Answer] = deque()
        self.builds: deque[Build] = deque()
        self._idle: Event | None = None
        self._is_over = False

    def stop(self) -> None:
        """Nothing will be asked any more."""
        self._is_over = True
        self.wake()

    def wake(self) -> None:
        """There is something to do."""
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None

    def run(self) -> Process:
        """Until it is stopped."""
        while not self._is_over:
            if self.answers:
                yield from self._answer(self.answers.popleft())
            elif self.builds:
                yield from self._build_on(self.builds[0])
            else:
                self._idle = Event(self.env)
                yield self._idle

    def _answer(self, answer: Answer) -> Process:
        if self.is_recorded or len(answer.tasks) > 1:
            yield from self._draft_in_steps(answer)
            wait_s, drafting_s = answer.host_s, 0.0  # drafting has been accounted for
        else:
            if answer.tasks:
                answer.took_s = answer.tasks[0].seconds(answer.residuals[0])
            wait_s, drafting_s = answer.took_s + answer.host_s, answer.took_s
        if self.index:
            return
        start_s = self.env.now
        answer.given.happen_in(wait_s)
        yield answer.given
        self.recorder.check_clock(start_s, wait_s)
        if drafting_s:
            self.recorder.worked(Lane.DRAFT, start_s, drafting_s)
        if answer.build is not None:
            self.start(answer.build)

    def _draft_in_steps(self, answer: Answer) -> Process:
        """This device's draft steps; on the first device also the wait for the others'."""
        if self.index == 0:
            answer.start_s = self.env.now
        if self.index < len(answer.tasks):
            yield from self._work(answer.tasks[self.index].steps, answer)
            answer.end_task()
            if self.index == 0 and answer.num_open:
                yield answer.ended()

    def start(self, build: Build) -> None:
        """Give every draft device its part of a build."""
        build.start_s = self.env.now
        for device in self.devices[: len(build.tasks)]:
            device.builds.append(build)
            device.wake()

    def _build_on(self, build: Build) -> Process:
        """The next operation of a build, or all of them."""
        task = build.tasks[self.index]
        if build.in_one:
            start_s, seconds = self.env.now, task.seconds(build.residuals[self.index])
            yield Timeout(self.env, seconds)
            self.recorder.worked(Lane.DRAFT, start_s, seconds)
        elif not build.is_done(self.index):
            progress = build.progress[self.index]
            yield from self._work(task.steps[progress : progress + 1], build)
            build.progress[self.index] = progress + 1
        if build.in_one or build.is_done(self.index):
            self.builds.popleft()
            if build.end_task():
                yield Timeout(self.env, 0)  # who waited asks before another build goes on

    def _work(self, steps: Iterable[Step], work: Work) -> Process:
        residuals = work.residuals[self.index]
        for step in steps:
            start_s, duration_s = self.env.now, step.location_s * next(residuals[step.operation])
            yield work.passes(self.index, duration_s)
            self.recorder.end(Lane.DRAFT, self.index, work.place, *step[:-1], start_s, duration_s)


def ask(devices: list[DraftDevice], answer: Answer) -> Event:
    """Give every draft device its part of an answer; happens when the answer is given."""
    for device in devices[: max(1, len(answer.tasks))]:
        device.answers.append(answer)
        device.wake()
    return answer.given
