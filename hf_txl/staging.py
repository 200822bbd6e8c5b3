"""Folders that appear only when they are complete."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def new_or_forced(force: bool, sources: Iterable[str | Path]) -> Callable[[Path], None]:
    """A check for the functions below: refuses an output that is not empty, unless forced, or that holds a source."""

    def check(output: Path) -> None:
        if not os.path.lexists(output):
            return
        if not output.is_dir() or output.is_symlink():
            raise FileExistsError(f"`output` must be a folder, but {output} is none.")
        for source in sources:
            path = Path(source).expanduser().resolve()
            if output.resolve() in [path, *path.parents]:
                raise FileExistsError(f"`output` must not hold the source, but {output} does ({source}).")
        if not force and any(output.iterdir()):
            raise FileExistsError(f"`output` must be new or empty, but {output} is not; `force` replaces it.")

    return check


def check_writable(folder: Path, check_replaceable: Callable[[Path], None]) -> None:
    """See before any work is done that `folder` can be written. Nothing is made or changed yet.

    Args:
        folder (`Path`): Where the finished folder will be.
        check_replaceable (`Callable[[Path], None]`): Raises if what is at `folder` must not be replaced.

    Raises:
        FileExistsError: what `check_replaceable` raises; if the program works in `folder`, or a file is in its way.
        PermissionError: if the folder that it will be in cannot be written to.
    """
    here = Path.cwd()
    if folder.resolve() in [here, *here.parents]:
        raise FileExistsError(f"`output` must be a new folder, but {folder} is the one that the program works in.")
    check_replaceable(folder)
    parent = next(each for each in folder.resolve().parents if os.path.lexists(each))
    if not parent.is_dir():
        raise FileExistsError(f"`output` must be in a folder, but {parent} is a file.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"`output` must be in a folder that can be written to, but {parent} cannot.")


@contextmanager
def written_beside(folder: Path, check_replaceable: Callable[[Path], None]) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when the block ends well, and goes away when it does not.

    Folders that lead to it and are not there are made, and go away too.

    Args:
        folder (`Path`): Where the finished folder will be.
        check_replaceable (`Callable[[Path], None]`): Raises if what is at `folder` by then must not be replaced.
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
            # in use now, or never made
            with suppress(OSError):
                parent.rmdir()


__all__ = ["check_writable", "new_or_forced", "written_beside"]
