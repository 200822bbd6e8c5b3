"""Results of many texts in parts that are whole or absent: killed runs go on, processes share the work.

Texts are cut into blocks of a fixed number. A process computes a block, writes it beside its place and moves it there,
so a part that exists is complete, and what it holds does not depend on the number of processes. When all parts exist
they become one file.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SETTINGS = "settings.json"


class Shards:
    """Parts of an output file, in a folder beside it until all are there.

    Args:
        output (`Path`): The file that will hold everything, `FILE`; its parts are in `FILE.parts`.
        num_blocks (`int`): Number of parts.
        settings (`dict`): What the parts depend on. A folder of other settings is refused.

    Raises:
        FileExistsError: if `output` exists, or there are parts of other settings.
        OSError: if nothing can be written there.
    """

    def __init__(self, output: Path, num_blocks: int, settings: dict[str, Any]):
        self.output, self.num_blocks = output, num_blocks
        self.folder = output.with_name(f"{output.name}.parts")
        if output.exists():
            raise FileExistsError(f"`output` must be a new file, but {output} exists.")
        described = json.dumps(settings, sort_keys=True, indent=1)
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded = self.folder / SETTINGS
        if not recorded.exists():
            self._write(recorded, described.encode())
        elif (found := recorded.read_text(encoding="utf-8")) != described:
            before, now = json.loads(found), json.loads(described)
            names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
            raise FileExistsError(
                f"`output` must be continued with the same settings, but the parts in {self.folder} have other "
                f"{names}; remove it to start again."
            )

    def missing(self, process: int = 0, num_processes: int = 1) -> Iterator[int]:
        """Indices of the blocks that are not there yet and belong to a process."""
        for block in range(process, self.num_blocks, num_processes):
            if not self._part(block).exists():
                yield block

    def write(self, block: int, content: bytes) -> None:
        """Write a part, whole or not at all."""
        self._write(self._part(block), content)

    def join(self, convert: Callable[[Path, Path], None] | None = None, head: bytes = b"") -> None:
        """Make the output of the parts, and remove them.

        Args:
            convert (`Callable[[Path, Path], None]`, *optional*): Makes a file (second) from the joined parts (first).
            head (`bytes`): What the output begins with.
        """
        joined = self.folder / "joined"
        with joined.open("wb") as file:
            file.write(head)
            for block in range(self.num_blocks):
                with self._part(block).open("rb") as part:
                    shutil.copyfileobj(part, file)
        if convert is not None:
            converted = self.folder / "converted"
            convert(joined, converted)
            joined = converted
        os.replace(joined, self.output)
        shutil.rmtree(self.folder)

    def _part(self, block: int) -> Path:
        return self.folder / f"{block:08d}"

    def _write(self, path: Path, content: bytes) -> None:
        beside = self.folder / f".{path.name}.{uuid.uuid4().hex[:8]}"
        try:
            beside.write_bytes(content)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def content_hash(*parts: Any) -> str:
    """SHA-256 of texts, in hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(str(part).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


__all__ = ["Shards", "content_hash"]
