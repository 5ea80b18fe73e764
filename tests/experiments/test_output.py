"""An output appears whole or not at all, and nothing that exists is replaced unasked."""

import json
import os
from pathlib import Path

import pytest

from experiments.output import output_files, output_folder
from sim.errors import BadInput

MANIFEST = json.dumps({"schema": 1, "record": "validation", "identity": {}})


def write(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(MANIFEST)
    (folder / "result.txt").write_text(content)


def test_folder_appears_with_its_parents(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with output_folder(out, overwrite=False) as folder:
        write(folder, "first")
        assert not out.exists()
    assert (out / "result.txt").read_text() == "first"
    assert list(out.parent.iterdir()) == [out]


def test_failure_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), output_folder(out, overwrite=False) as folder:
        write(folder, "half")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with output_folder(out, overwrite=False) as folder:
        write(folder, "first")
    with pytest.raises(KeyboardInterrupt), output_folder(out, overwrite=True) as folder:
        write(folder, "half")
        raise KeyboardInterrupt
    assert (out / "result.txt").read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


def test_finished_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with output_folder(out, overwrite=False) as folder:
        write(folder, "first")
    with (
        pytest.raises(BadInput, match="already exists; give another --out or --overwrite"),
        output_folder(out, overwrite=False),
    ):
        pytest.fail("the work must not start")
    with output_folder(out, overwrite=True) as folder:
        (folder / "manifest.json").write_text(MANIFEST)
    assert [path.name for path in out.iterdir()] == ["manifest.json"]  # nothing of the old content stays


@pytest.mark.parametrize("manifest", [None, "not json", "[]", '{"name": "a web application"}'])
def test_folder_of_something_else_is_never_replaced(tmp_path: Path, manifest: str | None) -> None:
    out = tmp_path / "photos"
    out.mkdir()
    (out / "cat.jpg").write_text("")
    if manifest is not None:
        (out / "manifest.json").write_text(manifest)
    with pytest.raises(BadInput, match="is not an output folder"), output_folder(out, overwrite=True):
        pytest.fail("the work must not start")
    assert (out / "cat.jpg").exists()


def test_file_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(BadInput), output_folder(out, overwrite=overwrite):
            pytest.fail("the work must not start")
    with pytest.raises(BadInput, match="cannot be written"), output_folder(out / "below", overwrite=False):
        pytest.fail("the work must not start")
    assert out.read_text() == "precious"


def test_empty_folder_is_used(tmp_path: Path) -> None:
    with output_folder(tmp_path, overwrite=False) as folder:
        write(folder, "first")
    assert (tmp_path / "result.txt").exists()


def test_files_move_beside_each_other(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "system.json"
    with output_files(out, overwrite=False) as file:
        file.write_text("{}")
        file.with_suffix(".parquet").write_text("")
    assert sorted(path.name for path in out.parent.iterdir()) == ["system.json", "system.parquet"]
    with pytest.raises(BadInput, match="already exists"), output_files(out, overwrite=False):
        pytest.fail("the work must not start")
    with pytest.raises(RuntimeError), output_files(out, overwrite=True) as file:
        file.write_text("half")
        raise RuntimeError
    assert out.read_text() == "{}"
    with output_files(out, overwrite=True) as file:
        file.write_text("[]")
    assert out.read_text() == "[]"


def test_a_link_and_the_current_folder_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    with output_folder(link, overwrite=False) as folder:
        (folder / "manifest.json").write_text("{}")
    assert (real / "manifest.json").is_file() and link.is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with output_folder(Path(), overwrite=False) as folder:
        (folder / "manifest.json").write_text("{}")
    assert (tmp_path / "here" / "manifest.json").is_file()


def test_a_file_beside_the_one_asked_for_is_not_replaced_either(tmp_path: Path) -> None:
    (tmp_path / "system.agreement.parquet").write_text("precious")
    with (
        pytest.raises(BadInput, match=r"agreement\.parquet: already exists"),
        output_files(tmp_path / "system.json", overwrite=False) as file,
    ):
        file.write_text("new")
        file.with_name("system.agreement.parquet").write_text("new")
    assert (tmp_path / "system.agreement.parquet").read_text() == "precious"
    assert not (tmp_path / "system.json").exists()


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with output_folder(out, overwrite=False) as folder:
        with (
            pytest.raises(BadInput, match="another run is writing there"),
            output_folder(out, overwrite=True),
        ):
            pytest.fail("the work must not start")
        write(folder, "first")
    assert (out / "result.txt").read_text() == "first"


def test_what_appears_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder is synchronised before its name appears, and the name after it."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def synchronised(handle: int) -> None:
        calls.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        calls.append(("rename", str(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(Path, "rename", renamed)
    out = tmp_path / "out"
    with output_folder(out, overwrite=False) as folder:
        (folder / "below").mkdir()
        write(folder / "below", "first")
    appears = calls.index(("rename", str(out)))
    before = {path for what, path in calls[:appears] if what == "sync"}
    names = ("", "/below", "/below/manifest.json", "/below/result.txt")
    assert before >= {f"{folder}{name}" for name in names}
    assert ("sync", str(tmp_path)) in calls[appears:]
