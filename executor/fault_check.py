"""What becomes of a run when something fails: faults put into real runs of a pair, its draft in a process of its own.

Faults are put in from outside, by signals and by wrapping the roles of a runner; nothing in the loops knows of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from executor.concurrency import Runner, open_runner
from executor.draft_client import DraftFailed
from executor.draft_failure import OnDraftFailure
from executor.draft_process import ProcessDraft
from executor.execute import execute
from executor.messages import Channel, Message
from executor.pairs import load_pair
from executor.recorder import now_s
from executor.sequence import Question
from executor.speculation_cache import Speculation
from sim.policy import Autoregressive, SpeculativeSpeculative
from sim.trace import Trace
from sim.workload import Workload

POLICY = SpeculativeSpeculative(4, (2,) * 5, (2,) * 5)
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 2, 32, 48
AT_QUESTION = 5  # the fault strikes then, in the middle of the first text
ANSWER_TIMEOUT_S = 2.0
MOST_S = 10.0  # that a run may take to end or to go on after its draft failed
MOST_S_WITHOUT_CALLER = 5.0  # that a child may live on

Strike = Callable[[Runner], None]


@dataclass(frozen=True)
class Aftermath:
    """What followed a fault. `seconds` are those from the fault to its effect; `tokens_lost` counts tokens of the
    healthy texts that are missing, None where the run ended by design."""

    fault: str
    on_draft_failure: str
    what_happened: str
    seconds: float
    tokens_lost: int | None
    is_right: bool


def check_faults(pair_name: str, progress: Callable[[str], None] = lambda name: None) -> Iterator[Aftermath]:
    """Put every fault into runs that end with their draft and into runs that go on; `progress` is told what comes.

    Raises `BadInput` if there is no such pair, or if the machine has one core only.
    """
    pair = load_pair(pair_name)
    workload = Workload(
        f"{pair.name}/faults", pair.prompts("test", NUM_PROMPTS, PROMPT_TOKENS), NUM_TOKENS, stop_ids=pair.stop_ids
    )
    for name, strike in _FATAL.items():
        for mode in OnDraftFailure:
            progress(f"{name}, {mode}")
            with open_runner(pair, "processes", answer_timeout_s=ANSWER_TIMEOUT_S) as runner:
                yield _after_losing_the_draft(name, strike, mode, workload, runner)
    with open_runner(pair, "processes", answer_timeout_s=ANSWER_TIMEOUT_S) as runner:
        for mode in OnDraftFailure:
            for name, check in _HARMLESS.items():
                progress(f"{name}, {mode}")
                yield check(name, mode, workload, runner)
    progress("caller killed")
    yield _after_losing_the_caller(pair_name)


# ------------------------------------------------------------------------------------------------- the draft is lost


def _signal(number: signal.Signals, runner: Runner) -> None:
    assert isinstance(runner.draft, ProcessDraft) and runner.draft.process.pid is not None
    os.kill(runner.draft.process.pid, number)


def _make_it_raise(runner: Runner) -> None:
    runner.draft.start("score", [[-1]], num_rows=1)  # a token that no model has


_FATAL: dict[str, Strike] = {
    "draft killed": partial(_signal, signal.SIGKILL),
    "draft stalled": partial(_signal, signal.SIGSTOP),
    "draft raises": _make_it_raise,
}


def _after_losing_the_draft(name: str, strike: Strike, mode: str, workload: Workload, runner: Runner) -> Aftermath:
    expected = execute(Autoregressive(), workload, runner)
    struck: Any = _Struck(runner.draft, partial(strike, runner))
    try:
        trace = execute(POLICY, workload, replace(runner, draft=struck), on_draft_failure=mode)
    except DraftFailed as error:
        seconds = now_s() - struck.at_s
        is_right = mode == OnDraftFailure.RAISE and seconds < MOST_S
        return Aftermath(name, mode, f"ended: {_in_short(error)}", seconds, None, is_right)
    failure, lost = trace.meta["draft_failure"], num_lost(expected, trace)
    seconds = _first_round_after(trace, struck.at_s)
    is_right = mode == OnDraftFailure.CONTINUE and failure is not None and lost == 0 and seconds < MOST_S
    what = "nothing was noticed" if failure is None else f"went on as AR from round {failure['round']}"
    return Aftermath(name, mode, what, seconds, lost, is_right)


class _Struck:
    """A draft role to which something happens before a question."""

    def __init__(self, draft: Any, strike: Callable[[], None]) -> None:
        self._draft, self._strike, self._num_questions = draft, strike, 0
        self.at_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def speculate(self, question: Question) -> dict[int, Speculation]:
        self._num_questions += 1
        if self._num_questions == AT_QUESTION:
            self.at_s = now_s()
            self._strike()
        return self._draft.speculate(question)


def _first_round_after(trace: Trace, moment_s: float) -> float:
    return min(r.end_s for r in trace.rounds if r.end_s > moment_s) - moment_s


def num_lost(expected: Trace, trace: Trace) -> int:
    """Tokens of the texts expected that are not where they should be."""
    pairs = zip(expected.sequences, trace.sequences, strict=True)
    return sum(
        ours != theirs
        for wanted, given in pairs
        for ours, theirs in zip(wanted.tokens, (*given.tokens, *(None,) * len(wanted.tokens)), strict=False)
    )


# --------------------------------------------------------------------------------------------- the draft is still there


def _bad_draft_row(name: str, mode: str, workload: Workload, runner: Runner) -> Aftermath:
    """A distribution of NaN rejects its token and is counted."""
    spoiling: Any = _Spoiling(runner.draft)
    sampled = replace(workload, temperature=1.0)
    trace = execute(POLICY, sampled, replace(runner, draft=spoiling), on_draft_failure=mode)
    num_counted = trace.meta["num_bad_draft_rows"]
    lost = sum(NUM_TOKENS - len(s.tokens) for s in trace.sequences if not s.stopped)
    what = f"{num_counted} rejected and counted"
    seconds = _first_round_after(trace, spoiling.at_s)
    return Aftermath(name, mode, what, seconds, lost, num_counted == spoiling.num_spoiled > 0 and lost == 0)


class _Spoiling:
    """A draft role whose distributions are NaN in one answer."""

    def __init__(self, draft: Any) -> None:
        self._draft, self._num_questions, self.num_spoiled, self.at_s = draft, 0, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def speculate(self, question: Question) -> dict[int, Speculation]:
        answer = self._draft.speculate(question)
        self._num_questions += 1
        if self._num_questions != AT_QUESTION:
            return answer
        self.at_s = now_s()
        return {row: self._spoil(speculation) for row, speculation in answer.items()}

    def _spoil(self, speculation: Speculation) -> Speculation:
        probs = speculation.draft_probs
        if probs is None:
            return speculation
        self.num_spoiled += len(probs)
        return replace(speculation, draft_probs=torch.full_like(probs, torch.nan))


def _bad_target_row(name: str, mode: str, workload: Workload, runner: Runner) -> Aftermath:
    """Nothing can be drawn: the run ends, and says where."""
    with _calls_replaced(runner.target.model, "feed", _with_infinity) as struck:
        try:
            execute(POLICY, workload, runner, on_draft_failure=mode)
        except FloatingPointError as error:
            seconds, message = now_s() - struck.at_s, str(error)
            is_right = "sequence 0, position" in message and seconds < MOST_S
            return Aftermath(name, mode, f"ended: {message}", seconds, None, is_right)
    return Aftermath(name, mode, "nothing was noticed", 0.0, None, is_right=False)


def _with_infinity(feed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return [torch.full_like(logits, torch.inf) for logits in feed(*args, **kwargs)]


def _repeated_reply(name: str, mode: str, workload: Workload, runner: Runner) -> Aftermath:
    """Every message of the draft comes twice, so the second one answers no question any more."""
    expected = execute(Autoregressive(), workload, runner)
    held: list[Message] = []

    def twice(receive: Callable[..., Message], *args: Any, **kwargs: Any) -> Message:
        if held:
            return held.pop()
        held.append(receive(*args, **kwargs))
        return held[0]

    with _calls_replaced(_channel_of(runner), "receive", twice, first=1) as struck:
        trace = execute(POLICY, workload, runner, on_draft_failure=mode)
    return _unharmed(name, mode, expected, trace, struck.at_s)


def _late_reply(name: str, mode: str, workload: Workload, runner: Runner) -> Aftermath:
    """A run is interrupted between a question and its answer; the next run finds that answer and does not use it."""
    expected = execute(Autoregressive(), workload, runner)

    def interrupt(receive: Callable[..., Message], *args: Any, **kwargs: Any) -> Message:
        raise KeyboardInterrupt

    with _calls_replaced(_channel_of(runner), "receive", interrupt) as struck:
        try:
            execute(POLICY, replace(workload, prompts=workload.prompts[::-1]), runner, on_draft_failure=mode)
        except KeyboardInterrupt:
            time.sleep(0.05)  # the answer is there now
    trace = execute(POLICY, workload, runner, on_draft_failure=mode)
    return _unharmed(name, mode, expected, trace, struck.at_s)


def _channel_of(runner: Runner) -> Channel:
    assert isinstance(runner.draft, ProcessDraft)
    return runner.draft._channel


def _unharmed(name: str, mode: str, expected: Trace, trace: Trace, struck_s: float) -> Aftermath:
    lost = num_lost(expected, trace)
    is_right = lost == 0 and trace.meta["draft_failure"] is None and struck_s > 0
    what = "dropped" if is_right else "changed the run"
    return Aftermath(name, mode, what, _first_round_after(trace, struck_s), lost, is_right)


class _Moment:
    """When something happened; 0 as long as it has not."""

    at_s = 0.0


@contextmanager
def _calls_replaced(owner: Any, name: str, by: Callable[..., Any], first: int = AT_QUESTION) -> Iterator[_Moment]:
    """From call number `first` on, calls of a method of one object go to `by`, which is told the method."""
    honest, moment, numbers = getattr(owner, name), _Moment(), count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) < first:
            return honest(*args, **kwargs)
        moment.at_s = moment.at_s or now_s()
        return by(honest, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield moment
    finally:
        delattr(owner, name)


_HARMLESS: dict[str, Callable[[str, str, Workload, Runner], Aftermath]] = {
    "NaN in a draft row": _bad_draft_row,
    "inf in a target row": _bad_target_row,
    "duplicate replies": _repeated_reply,
    "late reply": _late_reply,
}

# ----------------------------------------------------------------------------------------------- the caller is killed

_CALLER = """
import sys, time
from executor.concurrency import open_runner
from executor.pairs import load_pair
with open_runner(load_pair(sys.argv[1]), "processes") as runner:
    print(runner.draft.process.pid, flush=True)
    time.sleep(600)
"""


def _after_losing_the_caller(pair_name: str) -> Aftermath:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", _CALLER, pair_name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdout is not None
        child = int(caller.stdout.readline())
        caller.kill()
        killed_s = now_s()
    while _is_running(child) and now_s() - killed_s < MOST_S_WITHOUT_CALLER:
        time.sleep(0.02)
    seconds, is_left = now_s() - killed_s, _is_running(child)
    what = "the draft process is left behind" if is_left else "the draft process ended"
    return Aftermath("caller killed", "-", what, seconds, None, not is_left)


def _is_running(pid: int) -> bool:
    """Whether a process exists and is more than a zombie that nobody has collected."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _in_short(error: Exception) -> str:
    """What happened; of a traceback, what was raised."""
    lines = str(error).strip().splitlines()
    return lines[-1] if "Traceback" in str(error) else lines[0]
