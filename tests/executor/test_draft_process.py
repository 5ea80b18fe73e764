"""Whatever fails or dies is noticed, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from executor.draft_process import DraftFailed, ProcessDraft
from executor.sequence import Request, Verified
from sim.policy import SpeculativeSpeculative
from sim.trace import Outcome

ROOT = Path(__file__).parents[2]
POLICY = SpeculativeSpeculative(4, (2,) * 5, (3,) * 5)


@pytest.fixture(scope="module")
def two_drafts(tiny_pair):
    """Two children for two tests that end them; they load side by side."""
    cores = sorted(os.sched_getaffinity(0))
    drafts = [ProcessDraft(tiny_pair, "float64", core) for core in (cores[0], cores[-1])]
    for draft in drafts:
        draft.wait_until_loaded()
    yield drafts
    for draft in drafts:
        draft.close()


def test_an_exception_in_the_child_arrives_with_its_traceback(two_drafts) -> None:
    draft = two_drafts[0]
    unknown_token = Request(0, (10**6,), 8, 0.0, (), seed=0)
    draft.begin(POLICY, [unknown_token])
    with pytest.raises(DraftFailed, match=r"(?s)Traceback.*language_model\.py.*index out of range"):
        draft.wait()
    with pytest.raises(DraftFailed, match="died"):
        draft.speculate({0: Verified(Outcome(0, 1), remaining=4)})
    draft.process.join(10)
    assert not draft.process.is_alive()


def test_a_killed_child_is_noticed(two_drafts) -> None:
    draft = two_drafts[1]
    draft.begin(POLICY, [Request(0, (1, 2), 8, 0.0, (), seed=0)])
    draft.wait()
    os.kill(draft.process.pid, signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(DraftFailed, match="died with exit code -9"):
        for _ in range(3):
            draft.speculate({0: Verified(Outcome(0, 1), remaining=4)})
    assert time.monotonic() - start_s < 10


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores in the affinity mask")
def test_a_killed_parent_leaves_no_child(tiny_pair, tmp_path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import sys, time\n"
        "from executor.concurrency import open_runner\n"
        "from executor.pairs import load_pair\n"
        "if __name__ == '__main__':\n"
        "    with open_runner(load_pair(sys.argv[1]), 'processes') as runner:\n"
        "        print(runner.draft.process.pid, flush=True)\n"
        "        time.sleep(600)\n"
    )
    command = [sys.executable, str(program), str(tiny_pair.folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.kill()
    deadline_s = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than a zombie that nobody has collected."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
