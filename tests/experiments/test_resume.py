"""A run that is killed, anywhere, goes on: nothing finished is done again, nothing is lost, and the end is the same."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.config import QUICKSTART, ExperimentConfig, load_config
from experiments.ledger import JSON, NOWHERE, TRACE, Kind, Ledger
from experiments.measurement import COMPANIONS, MEASURED
from experiments.output import KEPT, LEDGER, is_finished, output_folder, resumable_folder
from experiments.run import measure_profile, run_experiment
from experiments.sessions import Sessions
from experiments.short_runs import PIECES
from experiments.stages import Stages
from sim.errors import BadInput, Interrupted
from sim.policy import Policy, Speculative
from sim.trace import Trace
from sim.workload import Workload
from tests.experiments.fake_bench import FakeBench

SMALL = (
    "search={speculation_lengths: [2], budgets: [4], fan_out_rules: [uniform], fallbacks: [draft]}",
    *("workload.max_new_tokens=8", "workload.calibration_prompts=5", "workload.test_prompts=2"),
    *("profile.max_speculation_length=2", "profile.branch_counts=[1, 4]"),
)
VOLATILE = {"date", "durations_s", "sessions"}  # what a record says of its own making


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    return load_config(QUICKSTART, reduced=True, settings=SMALL)


def quiet() -> Stages:
    return Stages(Console(), quiet=True)


def in_child(action: Callable[[], None]) -> int:
    """Run it in a copy of this process; returns the signal that ended it, 0 if it ended by itself."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalLedger(Ledger):
    """Kills its process when it has stored so many values, or in the middle of storing the next one."""

    def __init__(self, folder: Path, survives: int, *, in_the_middle: bool) -> None:
        super().__init__(folder)
        self._left, self._in_the_middle = survives, in_the_middle

    def _store(self, folder: Path, name: str, kind: Kind[Any], value: Any, seconds: float) -> None:
        def torn(value: Any, path: Path) -> None:
            kind.write(value, path)
            for file in [path, *path.rglob("*")]:
                if file.is_file():
                    os.truncate(file, file.stat().st_size // 2)
            die()

        if self._left == 0:
            if self._in_the_middle:
                super()._store(folder, name, Kind(torn, kind.read), value, seconds)
            die()
        self._left -= 1
        super()._store(folder, name, kind, value, seconds)


# --------------------------------------------------------------------------------------------------------------- ledger


def test_values_are_made_once_whenever_the_process_is_killed(tmp_path: Path) -> None:
    names = [f"a/{number}" for number in range(5)]
    made = tmp_path / "made"

    def work(ledger: Ledger) -> list[Any]:
        def make(name: str) -> dict[str, Any]:
            with made.open("a") as file:
                file.write(f"{name}\n")
            return {"value": [name, 0.1]}

        return [ledger.once(name, JSON, lambda name=name: make(name)) for name in names]

    folder = tmp_path / "ledger"
    for attempt in range(2 * len(names)):
        done, in_the_middle = divmod(attempt, 2)
        survives = 0 if in_the_middle else 1 if done else 0
        killed_by = in_child(lambda s=survives, m=in_the_middle: work(MortalLedger(folder, s, in_the_middle=bool(m))))
        assert killed_by == signal.SIGKILL
    lines = made.read_text().split()
    assert work(Ledger(folder)) == [{"value": [name, 0.1]} for name in names]
    assert made.read_text().split() == lines + [name for name in names if name not in lines] + lines[-1:]


def test_sessions_are_told_apart(tmp_path: Path) -> None:
    for number in range(3):
        ledger = Ledger(tmp_path)
        ledger.once(f"{MEASURED}/0/0/{number}", JSON, lambda number=number: number)
    sessions = Sessions.of(ledger, MEASURED, [(0, 0, number) for number in range(3)])
    assert sessions.to_dict() == {
        "pieces": [1, 1, 1],
        "first_pieces": [[0, 0, n] for n in range(3)],
        "split_batches": 1,
    }
    assert "3 sessions (1 + 1 + 1)" in sessions.notes()[0]
    assert not Sessions.of(NOWHERE, MEASURED, [(0, 0, 0)]).notes()


def test_durations_are_of_all_sessions_together(tmp_path: Path) -> None:
    stages = quiet()
    assert Ledger(tmp_path, stages.spare).once("x", JSON, lambda: 5) == 5
    (seconds,) = tmp_path.rglob("x.seconds")
    seconds.write_text("1e6")
    with stages.stage("work"):
        assert Ledger(tmp_path, stages.spare).once("x", JSON, lambda: pytest.fail("it is there")) == 5
    with stages.stage("other work"):
        pass
    assert stages.durations_s["other work"] < 1e6 <= stages.durations_s["work"]


def test_a_trace_is_read_as_it_was(config: ExperimentConfig, tmp_path: Path) -> None:
    bench = FakeBench(config)
    trace = bench.execute(Speculative(2), bench.workload("test", 2), 0)
    for _ in range(2):
        assert Ledger(tmp_path).once("x", TRACE, lambda: trace) == trace
    assert Trace.read(tmp_path / "0" / "x") == trace


# ----------------------------------------------------------------------------------------------------------- whole runs


@dataclass
class CountingBench(FakeBench):
    """Writes down every run, so that it is known after a kill."""

    log: Path = field(default=Path())

    def execute(self, policy: Policy, workload: Workload, seed: int, *, on_draft_failure: str = "raise") -> Trace:
        trace = super().execute(policy, workload, seed, on_draft_failure=on_draft_failure)
        with self.log.open("a") as file:
            file.write(f"{policy.name} {workload.prompts[0]} {seed}\n")
        return trace


def content(folder: Path) -> dict[str, Any]:
    """Everything in an output folder that does not say when it was made."""
    texts = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "manifest.json":
            texts[name] = without_volatile(json.loads(path.read_text()))
        elif path.suffix in (".json", ".csv"):
            texts[name] = path.read_text()
        elif path.is_file() and not name.startswith(("report", "figures")):
            texts[name] = path.name  # parquet tables, whose contents the traces' JSON and CSV show
    return texts


def without_volatile(entries: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in entries.items() if key not in VOLATILE}
    return {key: without_volatile(value) if isinstance(value, dict) else value for key, value in kept.items()}


def without_notes(texts: dict[str, Any]) -> dict[str, Any]:
    details = json.loads(texts["details.json"])
    details["notes"] = [note for note in details["notes"] if "was interrupted" not in note]
    return texts | {"details.json": details}


@pytest.fixture(scope="module")
def uninterrupted(
    config: ExperimentConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[str]]:
    """Content of the folder, and the names of all values that the ledger held."""
    root = tmp_path_factory.mktemp("whole")
    run_experiment(config, FakeBench(config), root / "out", quiet(), ledger=Ledger(root / LEDGER))
    stored = root / LEDGER / "0"
    names = [str(path.relative_to(stored)) for path in stored.rglob("*") if path.name.isdecimal()]
    return without_notes(content(root / "out")), [name for name in names if (stored / name / "trace.json").exists()]


def test_every_piece_of_a_run_is_a_value_of_its_own(
    uninterrupted: tuple[Any, list[str]], config: ExperimentConfig
) -> None:
    kinds = Counter(name.split("/")[0] for name in uninterrupted[1])
    assert kinds[MEASURED] == 3 * config.run.repeats * config.workload.test_prompts
    assert kinds[COMPANIONS] == config.run.repeats * config.workload.test_prompts
    assert kinds[PIECES] == 4 * config.profile.trace_prompts


@pytest.mark.parametrize("in_the_middle", [False, True], ids=["between pieces", "within pieces"])
def test_a_run_killed_at_every_piece_ends_as_if_it_had_not_been(
    in_the_middle: bool, config: ExperimentConfig, uninterrupted: tuple[dict[str, Any], list[str]], tmp_path: Path
) -> None:
    """Each session finishes one value and is killed with the next one made, or half stored."""
    out, log = tmp_path / "out", tmp_path / "log"

    def session() -> None:
        bench = CountingBench(config, log=log)
        with resumable_folder(out, overwrite=False, resume=True) as folder:
            ledger = MortalLedger(folder / LEDGER, 1, in_the_middle=in_the_middle)
            run_experiment(config, bench, folder, quiet(), ledger=ledger)

    num_kills = 0
    while in_child(session) == signal.SIGKILL:
        assert not out.exists()
        num_kills += 1
        assert num_kills < 100
    assert num_kills >= len(uninterrupted[1])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert without_notes(content(out)) == uninterrupted[0]
    assert "was interrupted and went on later" in (out / "report.md").read_text().split("##")[0]
    sessions = json.loads((out / "manifest.json").read_text())["sessions"]
    assert sum(sessions["pieces"]) == 3 * config.run.repeats * config.workload.test_prompts
    assert len(sessions["pieces"]) == len(sessions["first_pieces"]) > 1
    # A run is repeated only where its session was killed while storing it; warm-ups precede the runs of each session.
    runs = Counter(log.read_text().splitlines())
    assert sum(runs.values()) <= len(uninterrupted[1]) + (num_kills + 1) * 7


@pytest.mark.parametrize("moment", ["before the folder takes its place", "after the old one has gone"])
def test_a_run_killed_while_its_folder_takes_its_place(
    moment: str,
    config: ExperimentConfig,
    uninterrupted: tuple[dict[str, Any], list[str]],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    out = tmp_path / "out"

    def session() -> None:
        with resumable_folder(out, overwrite=True, resume=True) as folder:
            run_experiment(config, FakeBench(config), folder, quiet(), ledger=Ledger(folder / LEDGER))

    def mortal_session() -> None:
        num_left = [0 if moment.startswith("before") else 1]
        rename = Path.rename

        def mortal(self: Path, target: Path) -> Path:
            if target in (out, out.with_name(".out.replaced")):
                if num_left[0] == 0:
                    die()
                num_left[0] -= 1
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", mortal)
        session()

    assert in_child(session) == 0
    assert in_child(mortal_session) == signal.SIGKILL
    assert out.exists() == moment.startswith("before")
    assert in_child(session) == 0
    assert content(out) == uninterrupted[0] | {"details.json": content(out)["details.json"]}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_finished_run_has_nothing_to_resume(config: ExperimentConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not is_finished(out, config.to_dict())
    with output_folder(out, overwrite=False) as folder:
        manifest = {"schema": 1, "record": "validation", "identity": {}, "settings": config.to_dict()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert is_finished(out, config.to_dict())
    with pytest.raises(BadInput, match=r"finished run of another experiment; seed was 0 and is 3"):
        is_finished(out, config.to_dict() | {"seed": 3})


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture
def begun(config: ExperimentConfig, tmp_path: Path) -> Path:
    """An output that was interrupted in its profile."""
    out = tmp_path / "out"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    bench = FakeBench(config)
    bench.measure_latency = stop  # type: ignore[method-assign,assignment]
    with pytest.raises(Interrupted, match=KEPT), resumable_folder(out, overwrite=False, resume=False) as folder:
        run_experiment(config, bench, folder, quiet(), ledger=Ledger(folder / LEDGER))
    return out


def test_a_run_that_was_begun_is_neither_repeated_nor_lost_unasked(begun: Path) -> None:
    with (
        pytest.raises(BadInput, match="was begun and not finished; --resume goes on with it, --overwrite begins anew"),
        resumable_folder(begun, overwrite=False, resume=False),
    ):
        pytest.fail("the work must not start")
    with resumable_folder(begun, overwrite=False, resume=True) as folder:
        assert (folder / LEDGER / "0" / "profile" / "agreement").exists()
        (folder / "manifest.json").write_text("{}")
    assert sorted(path.name for path in begun.iterdir()) == ["manifest.json"]


def test_beginning_anew_starts_with_an_empty_folder(begun: Path) -> None:
    with resumable_folder(begun, overwrite=True, resume=False) as folder:
        assert not list(folder.iterdir())


def test_two_runs_do_not_share_a_folder(begun: Path) -> None:
    with resumable_folder(begun, overwrite=False, resume=True):
        for options in ({"overwrite": True, "resume": False}, {"overwrite": False, "resume": True}):
            with pytest.raises(BadInput, match="another run is writing there"), resumable_folder(begun, **options):
                pytest.fail("the work must not start")


@pytest.mark.parametrize(
    ("setting", "identity", "message"),
    [
        ("seed=1", {}, r"settings\.seed was 0 and is 1"),
        ("run.repeats=4", {}, r"settings\.run\.repeats was 3 and is 4"),
        ("seed=0", {"device": "another"}, r"identity\.device was 'none' and is 'another'"),
        ("seed=0", {"sha256": {"target": "t", "draft": "new"}}, r"identity\.sha256\.draft was 'd' and is 'new'"),
    ],
)
def test_a_resume_of_another_experiment_is_refused_naming_the_difference(
    begun: Path, setting: str, identity: dict[str, Any], message: str
) -> None:
    other = load_config(QUICKSTART, reduced=True, settings=[*SMALL, setting])
    bench = FakeBench(other)
    bench.identity.update(identity)
    match = f"--resume: must go on with what the run was begun with; {message}"
    with pytest.raises(BadInput, match=match), resumable_folder(begun, overwrite=False, resume=True) as folder:
        run_experiment(other, bench, folder, quiet(), ledger=Ledger(folder / LEDGER))
    assert not bench.executed
    with resumable_folder(begun, overwrite=False, resume=True) as folder:
        assert (folder / LEDGER).exists()


def test_a_resume_with_another_profile_is_refused(config: ExperimentConfig, tmp_path: Path) -> None:
    profile, ledger = measure_profile(config, FakeBench(config), quiet()), tmp_path / LEDGER
    run_experiment(config, FakeBench(config), tmp_path / "out", quiet(), earlier=profile, ledger=Ledger(ledger))
    with pytest.raises(BadInput, match=r"profile was '.*' and is None"):
        run_experiment(config, FakeBench(config), tmp_path / "out", quiet(), ledger=Ledger(ledger))
