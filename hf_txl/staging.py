"""Folders that appear only when they are complete."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    """See before any work is done that `folder` can be written; its parent is made if it is not there.

    Args:
        folder (`Path`): Where the finished folder will be.
        check_replaceable (`Callable[[Path], None]`): Raises if what is at `folder` must not be replaced.

    Raises:
        FileExistsError: what `check_replaceable` raises.
        PermissionError: if its parent cannot be written to.
    """
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.parent, os.W_OK):
        raise PermissionError(f"The output must be in a folder that can be written to, but {folder.parent} cannot.")


@contextmanager
def written_beside(folder: Path, check_replaceable: Callable[[Path], None]) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when the block ends well, and goes away when it does not.

    Args:
        folder (`Path`): Where the finished folder will be.
        check_replaceable (`Callable[[Path], None]`): Raises if what is at `folder` by then must not be replaced.
    """
    staging = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
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
