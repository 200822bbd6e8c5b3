"""Output folders and files that are written beside their destination and renamed when they are complete."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def new_or_forced(force: bool, sources: Iterable[str | Path]) -> Callable[[Path], None]:
    """A check for the functions below: refuses an output that contains a source or, unless forced, any file."""

    def check(output: Path) -> None:
        if not os.path.lexists(output):
            return
        if not output.is_dir() or output.is_symlink():
            raise FileExistsError(f"`output` must be a folder, but {output} is not one.")
        for source in sources:
            path = Path(source).expanduser().resolve()
            if output.resolve() in [path, *path.parents]:
                raise FileExistsError(f"`output` must not hold the source, but {output} does ({source}).")
        if not force and any(output.iterdir()):
            raise FileExistsError(f"`output` must be new or empty, but {output} is not; `force` replaces it.")

    return check


def check_writable(folder: Path, check_replaceable: Callable[[Path], None]) -> None:
    """Check before any work is done that `folder` can be written. Nothing is created or changed.

    Args:
        folder (`Path`): Where the finished folder will be.
        check_replaceable (`Callable[[Path], None]`): Raises if what is at `folder` must not be replaced.

    Raises:
        FileExistsError: from `check_replaceable`, and if `folder` is or contains the working directory, or a parent is
            a file.
        PermissionError: if its parent cannot be written to.
    """
    here = Path.cwd()
    if folder.resolve() in [here, *here.parents]:
        raise FileExistsError(f"`output` must be a new folder, but {folder} is or contains the working directory.")
    check_replaceable(folder)
    parent = next(each for each in folder.resolve().parents if os.path.lexists(each))
    if not parent.is_dir():
        raise FileExistsError(f"`output` must be in a folder, but {parent} is a file.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"`output` must be in a folder that can be written to, but {parent} is not.")


@contextmanager
def written_beside(folder: Path, check_replaceable: Callable[[Path], None]) -> Iterator[Path]:
    """A new folder beside `folder` that replaces it when the block succeeds, and is removed when it raises.

    Missing parents are created, and removed too if the block raises.

    Args:
        folder (`Path`): Where the finished folder will be.
        check_replaceable (`Callable[[Path], None]`): Raises if what is at `folder` at the end must not be replaced.
    """
    folder = folder.resolve()
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    staging = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    try:
        staging.mkdir(parents=True)
        yield staging
        check_replaceable(folder)
        if folder.exists():
            earlier = staging.with_name(staging.name + ".earlier")
            os.rename(folder, earlier)
            try:
                os.rename(staging, folder)
            except OSError:
                os.rename(earlier, folder)
                raise
            shutil.rmtree(earlier)
        else:
            os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in new_parents:
            # not empty, or never created
            with suppress(OSError):
                parent.rmdir()


def write_file(path: Path, content: str) -> None:
    """Write a text file in UTF-8, whole or not at all: beside its place, then moved there.

    Raises:
        OSError: if the folder is missing or cannot be written to.
    """
    staging = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        staging.write_text(content, encoding="utf-8", newline="")
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


__all__ = ["check_writable", "new_or_forced", "write_file", "written_beside"]
