"""Whatever fails or dies is noticed, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from executor.concurrency import open_runner
from executor.draft_client import DraftFailed
from executor.draft_process import ProcessDraft
from executor.execute import execute
from executor.messages import Ask
from executor.place import Place
from executor.sequence import Question, Request, Verified
from sim.policy import Autoregressive, Drafting, Speculative, SpeculativeSpeculative
from sim.trace import Outcome, Source
from sim.workload import Sampling, Workload
from tests.executor.tiny_models import prompts

REQUEST = Request(0, (1, 2), 8, Sampling(), (), seed=0)
FIRST_TOKEN = {0: Verified(Outcome(0, 1), remaining=7)}
ROOT = Path(__file__).parents[2]
POLICY = SpeculativeSpeculative(4, (2,) * 5, (3,) * 5)


@pytest.fixture(scope="module")
def drafts(tiny_pair):
    """Children for tests that end them; they load side by side. The last two are going to hang."""
    cores = sorted(os.sched_getaffinity(0))
    drafts = [
        ProcessDraft(tiny_pair, "float64", Place(core=cores[i % len(cores)]), timeout_s)
        for i, timeout_s in enumerate((60.0, 60.0, 1.0, 1.0))
    ]
    for draft in drafts:
        draft.wait_until_loaded()
    yield drafts
    for draft in drafts:
        draft.close()


def test_an_exception_in_the_child_arrives_with_its_traceback(drafts) -> None:
    draft = drafts[0]
    unknown_token = Request(0, (10**6,), 8, Sampling(), (), seed=0)
    draft.begin([unknown_token])
    with pytest.raises(DraftFailed, match=r"(?s)Traceback.*language_model\.py.*index out of range"):
        draft.wait()
    with pytest.raises(DraftFailed, match="index out of range"):  # said again, not that its process has ended
        draft.speculate(Question(POLICY, {0: Verified(Outcome(0, 1), remaining=4)}))
    draft.process.join(10)
    assert not draft.process.is_alive()


def test_a_killed_child_is_noticed(drafts) -> None:
    draft = drafts[1]
    draft.begin([Request(0, (1, 2), 8, Sampling(), (), seed=0)])
    draft.wait()
    os.kill(draft.process.pid, signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(DraftFailed, match="died with exit code -9"):
        for _ in range(3):
            draft.speculate(Question(POLICY, {0: Verified(Outcome(0, 1), remaining=4)}))
    assert time.monotonic() - start_s < 10


class HangingPolicy(Speculative):
    """Its draft tokens never come."""

    def drafting(self, source: Source) -> Drafting:
        time.sleep(600)
        return super().drafting(source)


def test_a_hanging_child_is_ended_and_says_where_it_hangs(drafts) -> None:
    draft = drafts[2]
    draft.begin([REQUEST])
    draft.wait()
    start_s = time.monotonic()
    with pytest.raises(DraftFailed, match=r"(?s)has not answered for 1.0 s.*test_draft_process\.py.* in drafting"):
        draft.speculate(Question(HangingPolicy(3), FIRST_TOKEN))
    assert time.monotonic() - start_s < 10
    draft.process.join(5)
    assert not draft.process.is_alive()


def test_replies_that_nobody_waits_for_are_dropped_and_a_stopped_child_is_ended(drafts) -> None:
    draft = drafts[3]
    speculations = []
    for num_left_open in range(3):
        draft.begin([REQUEST])
        draft.wait()
        speculations.append(draft.speculate(Question(POLICY, FIRST_TOKEN))[0].tokens)
        for token in range(num_left_open):  # the caller is interrupted before it has read the reply
            question = Question(POLICY, {0: Verified(Outcome(0, token), 3)})
            draft._send(Ask(draft._next_number(), question), timeout_s=None)
    assert len(set(speculations)) == 1 and len(speculations[0]) == 4
    os.kill(draft.process.pid, signal.SIGSTOP)
    with pytest.raises(DraftFailed, match=r"(?s)has not answered for 1.0 s.*did not say where"):
        draft.begin([replace(REQUEST, prompt=(1,) * 10**6)])  # more than the pipe holds
    with pytest.raises(DraftFailed, match="has not answered"):
        draft.wait()
    draft.process.join(5)
    assert not draft.process.is_alive()


def test_a_child_that_does_nothing_while_it_should_load_is_ended(tiny_pair) -> None:
    with closing(ProcessDraft(tiny_pair, "float64", Place(), answer_timeout_s=0.2)) as draft:
        os.kill(draft.process.pid, signal.SIGSTOP)
        with pytest.raises(DraftFailed, match=r"(?s)has done nothing for 0.2 s.*its process was ended"):
            draft.wait_until_loaded()
        draft.process.join(5)
        assert not draft.process.is_alive()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores in the affinity mask")
def test_a_run_survives_its_draft_if_told_so(tiny_pair, tiny_serial) -> None:
    rules = Workload("test", prompts(4, 9), 32, stop_ids=(17,))
    expected = [s.tokens for s in execute(Autoregressive(), rules, tiny_serial).sequences]
    with open_runner(tiny_pair, "processes", dtype="float64") as runner:
        child, honest, num_rounds = runner.draft.process, runner.target.verify, []

        def verify(speculations):
            num_rounds.append(1)
            if len(num_rounds) == 6:
                os.kill(child.pid, signal.SIGKILL)
            return honest(speculations)

        runner.target.verify = verify
        trace = execute(POLICY, rules, runner, on_draft_failure="continue")
        assert [s.tokens for s in trace.sequences] == expected
        assert trace.meta["draft_failure"]["round"] > 0
        assert "died with exit code -9" in trace.meta["draft_failure"]["message"]
        with pytest.raises(DraftFailed, match="died with exit code -9"):
            execute(POLICY, rules, runner)


# A shell lets what it starts in the background ignore Ctrl-C, and that is inherited: the tests' own parents heed it.
HEED_INTERRUPTS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
LOADING_CHILD = """
import multiprocessing, sys, time
from executor.child import start_child

def load(connection):
    connection.send("alive")
    time.sleep(600)

if __name__ == "__main__":
    own_end, child_end = multiprocessing.Pipe()
    child = start_child(load, child_end, name="draft")
    own_end.recv()
    print(child.pid, flush=True)
    time.sleep(600)
"""
RUNNER = """
import sys, time
from executor.concurrency import open_runner
from executor.pairs import load_pair

if __name__ == "__main__":
    with open_runner(load_pair(sys.argv[1]), "processes") as runner:
        print(runner.draft.process.pid, flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("program", "sent"), [(LOADING_CHILD, signal.SIGKILL), (LOADING_CHILD, signal.SIGINT), (RUNNER, signal.SIGINT)]
)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores in the affinity mask")
def test_a_killed_or_interrupted_parent_leaves_no_child(program: str, sent, tiny_pair, tmp_path) -> None:
    """A child that is busy with something else, and one that serves."""
    file = tmp_path / "parent.py"
    file.write_text(HEED_INTERRUPTS + program)
    parent = subprocess.Popen(
        [sys.executable, str(file), str(tiny_pair.folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        child = int(parent.stdout.readline())
        assert is_running(child)
        if sent == signal.SIGKILL:
            parent.kill()
        else:
            os.killpg(parent.pid, sent)  # a terminal's Ctrl-C reaches every process of the group
        deadline_s = time.monotonic() + 5
        while is_running(child) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not is_running(child)
        assert parent.stderr.read().count("Traceback") == (sent != signal.SIGKILL)  # the parent's own
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
        parent.stderr.close()


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than a zombie that nobody has collected."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end at any moment
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
