"""Folders that appear when they are complete, and leave nothing where they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_txl.staging import check_writable, new_or_forced, written_beside

CHECK = new_or_forced(False, [])
FORCE = new_or_forced(True, [])


def write(folder: Path) -> None:
    with written_beside(folder, FORCE) as staging:
        (staging / "new.txt").write_text("new", encoding="utf-8")


@pytest.mark.parametrize("name", ["out", "a/out", "a/b/c/out", "a/../out", "a/b/../out"])
def test_a_block_that_ends_well_leaves_the_folder_and_its_parents(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_writable(Path(name), CHECK)
    assert list(tmp_path.iterdir()) == []
    write(Path(name))
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file == Path(name).resolve() / "new.txt"
    assert len(list(file.parent.parent.iterdir())) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["out", "a/out", "a/b/c/out", "there/out", "there/a/out"])
def test_a_block_that_fails_leaves_what_was_there_before(
    name: str, error: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(error), written_beside(tmp_path / name, CHECK) as staging:
        (staging / "sub").mkdir()
        (staging / "sub" / "file").write_bytes(b"1")
        raise error
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_parent_that_others_use_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(ValueError), written_beside(tmp_path / "a" / "b" / "out", CHECK):
        (tmp_path / "a" / "theirs").mkdir()
        raise ValueError
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "theirs"]


def test_what_is_replaced_is_gone_and_what_appeared_meanwhile_is_not(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "old.txt").touch()
    write(output)
    assert [path.name for path in output.iterdir()] == ["new.txt"]
    assert list(tmp_path.iterdir()) == [output]
    late = tmp_path / "late"
    with pytest.raises(FileExistsError, match="must be new or empty"), written_beside(late, CHECK):
        late.mkdir()
        (late / "theirs").touch()
    assert [path.name for path in late.iterdir()] == ["theirs"]
    assert sorted(tmp_path.iterdir()) == [late, output]


def test_a_folder_that_cannot_be_exchanged_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "old.txt").touch()
    rename = os.rename

    def fail_for_staging(source: Path, target: Path) -> None:
        if target == output and not str(source).endswith(".earlier"):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_staging)
    with pytest.raises(OSError, match="no"):
        write(output)
    assert [path.name for path in output.iterdir()] == ["old.txt"]
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("name", [".", "..", "../..", "sub/..", "../here"])
def test_the_folder_that_the_program_works_in_is_never_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither are those that hold it."""
    here = tmp_path / "over" / "here"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here)
    for check in (CHECK, FORCE):
        with pytest.raises(FileExistsError, match="`output` must be a new folder"):
            check_writable(Path(name), check)


def test_a_place_that_cannot_be_written_to_is_known_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="must be in a folder, but .*file is a file"):
        check_writable(tmp_path / "file" / "a" / "out", CHECK)
    with pytest.raises(FileExistsError, match="must be a folder, but .* is not one"):
        check_writable(tmp_path / "file", FORCE)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="must be a folder, but .* is not one"):
        check_writable(tmp_path / "link", FORCE)
    # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path or mode != os.W_OK | os.X_OK)
    with pytest.raises(PermissionError, match=f"{tmp_path} is not"):
        check_writable(tmp_path / "a" / "b", CHECK)


def test_an_output_that_holds_a_source_is_refused_even_if_forced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "in").mkdir(parents=True)
    for source in (output, output / "in", output / "in" / "model.pt"):
        with pytest.raises(FileExistsError, match="must not hold the source"):
            check_writable(output, new_or_forced(True, [source]))
    check_writable(output, new_or_forced(True, [tmp_path / "outside", tmp_path]))
