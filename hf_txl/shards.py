"""Results of many texts in parts that are whole or absent: killed runs go on, processes share the work.

The work is cut into blocks in a way that does not depend on the processes. A process computes a block, writes it
beside its place and moves it there, so a part that exists is complete. When all parts exist they become one file.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SETTINGS = "settings.json"


class Shards:
    """Parts of an output file, in the folder `FILE.parts` beside it until all are there.

    Args:
        output (`Path`): The file that will hold everything.
        num_blocks (`int`): Number of parts.
        settings (`dict`): What the parts depend on, as JSON.

    Attributes:
        is_finished (`bool`): Whether a run with these settings was killed after its output was complete.

    Raises:
        FileExistsError: if `output` exists, or there are parts of other settings.
        OSError: if nothing can be written there.
    """

    def __init__(self, output: Path, num_blocks: int, settings: dict[str, Any]):
        self.output, self.num_blocks = output, num_blocks
        self.folder = output.with_name(f"{output.name}.parts")
        recorded = self.folder / SETTINGS
        # the folder is removed last
        self.is_finished = os.path.lexists(output) and self.folder.exists()
        if os.path.lexists(output) and not self.is_finished:
            raise FileExistsError(f"`output` must be a new file, but {output} exists.")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not recorded.exists():
            if not self.is_finished:
                with self.discarded_if_empty():
                    self._write(recorded, json.dumps(settings, sort_keys=True, indent=1).encode())
        elif (found := json.loads(recorded.read_text(encoding="utf-8"))) != json.loads(json.dumps(settings)):
            names = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
            raise FileExistsError(
                f"`output` must be continued with the same settings, but the parts in {self.folder} have other "
                f"{', '.join(f'`{name}`' for name in names)}; remove that folder to start again."
            )

    def missing(self) -> list[int]:
        """Indices of the blocks that are not there yet."""
        return (
            [] if self.is_finished else [block for block in range(self.num_blocks) if not self._part(block).exists()]
        )

    def write(self, block: int, content: str) -> None:
        """Write a part, whole or not at all."""
        self._write(self._part(block), content.encode())

    def join(self, head: str = "", convert: Callable[[Path, Path], None] | None = None) -> None:
        """Make the output of the parts, and remove them.

        Args:
            head (`str`): What the joined parts begin with.
            convert (`Callable[[Path, Path], None]`, *optional*): Makes a file (second) from the joined parts (first).
        """
        if not self.is_finished:
            joined, converted = self.folder / "joined", self.folder / "converted"
            try:
                self._join(joined, head)
                if convert is not None:
                    convert(joined, converted)
                os.replace(converted if convert is not None else joined, self.output)
            finally:
                joined.unlink(missing_ok=True)
                converted.unlink(missing_ok=True)
        self._remove()

    def _join(self, joined: Path, head: str) -> None:
        with joined.open("wb") as file:
            file.write(head.encode())
            for block in range(self.num_blocks):
                with self._part(block).open("rb") as part:
                    shutil.copyfileobj(part, file)

    @contextmanager
    def discarded_if_empty(self) -> Iterator[None]:
        """A block after whose error the folder is removed unless it has a part."""
        try:
            yield
        except BaseException:
            # another process may do the same
            with suppress(OSError):
                if len(self.missing()) == self.num_blocks:
                    self._remove()
            raise

    def _part(self, block: int) -> Path:
        return self.folder / f"{block:08d}"

    def _write(self, path: Path, content: bytes) -> None:
        beside = self.folder / f".{path.name}.{uuid.uuid4().hex[:8]}"
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def _remove(self) -> None:
        """Remove the folder, the settings last: they tell a killed run that its output is complete."""
        for path in self.folder.iterdir():
            if path.name != SETTINGS:
                path.unlink()
        (self.folder / SETTINGS).unlink(missing_ok=True)
        self.folder.rmdir()


__all__ = ["Shards"]
