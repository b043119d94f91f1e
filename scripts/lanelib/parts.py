"""Carry a folder of files to a machine without network, in parts of a bounded size with a checksum each."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lanelib.errors import LaneError

MANIFEST = "manifest.json"
PART = "part.{:03d}"
MOST_PART_BYTES = 60 << 20
_CHUNK = 1 << 20
_VERSION = 1


def write_parts(files: Iterable[Path], out: Path, most_bytes: int = MOST_PART_BYTES) -> list[Path]:
    """Write `files`, side by side, into one archive in parts, and their manifest.

    Args:
        files: with a name of its own each.
        out: the folder for the parts; made where it is missing.
        most_bytes: the size of each part but the last, in bytes.

    Returns:
        The parts, in order.

    Raises:
        LaneError: there are parts in `out` already.
    """
    out.mkdir(parents=True, exist_ok=True)
    if (out / MANIFEST).exists() or any(out.glob("part.*")):
        raise LaneError(f"{out} has parts in it already", next_step=f"rm -r {out}, or name another folder")
    writer = _PartWriter(out, most_bytes)
    names = []
    # Nothing of the machine that packs goes into it.
    with tarfile.open(fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[arg-type]
        for path in sorted(files, key=lambda path: path.name):
            info = tarfile.TarInfo(path.name)
            info.size, info.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                archive.addfile(info, file)
            names.append({"name": path.name, "bytes": info.size})
    parts = writer.close()
    rows = [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in parts]
    document = {"version": _VERSION, "parts": rows, "files": names}
    (out / MANIFEST).write_text(json.dumps(document, indent=1) + "\n")
    return parts


def join_parts(folder: Path, out: Path) -> list[Path]:
    """Check the parts in `folder` by their manifest, and unpack what they hold into `out`.

    Returns:
        The files, in order.

    Raises:
        LaneError: a part is missing, cut off or changed, or the manifest is none.
    """
    manifest = _read_manifest(folder / MANIFEST)
    paths = [folder / str(row["name"]) for row in manifest["parts"]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise LaneError(f"{folder} lacks {', '.join(missing)}", next_step="bring them there, and repeat")
    for row, path in zip(manifest["parts"], paths, strict=True):
        if path.stat().st_size != row["bytes"] or sha256_of(path) != row["sha256"]:
            raise LaneError(f"{path} is not as it was packed", next_step="bring it there again, and repeat")
    out.mkdir(parents=True, exist_ok=True)
    found = []
    with _joined(paths) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for info in archive:
            if not info.isfile() or info.name != os.path.basename(info.name):  # noqa: PTH119 - a name, not a path
                raise LaneError(f"the parts in {folder} hold {info.name!r}, which is no plain file")
            source = archive.extractfile(info)
            assert source is not None
            path = out / info.name
            fresh = path.with_name(f"{path.name}.new")
            with source, fresh.open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
            fresh.replace(path)
            found.append(path)
    wanted = [row["name"] for row in manifest["files"]]
    if [path.name for path in found] != wanted:
        raise LaneError(f"the parts in {folder} hold other files than {MANIFEST} names", next_step="pack them again")
    return found


def sha256_of(path: Path) -> str:
    """Return the checksum of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        plain = all(
            isinstance(row["name"], str) and row["name"] == Path(row["name"]).name
            for row in [*document["parts"], *document["files"]]
        )
        if document["version"] != _VERSION or not plain:
            raise ValueError("of another version")
    except FileNotFoundError as error:
        raise LaneError(f"{path.parent} has no {MANIFEST}", next_step="scripts/gpu_lane pack writes one") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaneError(f"{path} is no manifest of parts: {error}", next_step="bring it there again") from error
    return dict(document)


class _PartWriter:
    """What looks to tarfile like one file that is only ever written on."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most = most_bytes
        self._parts: list[Path] = []
        self._file: BinaryIO | None = None
        self._room = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            if not self._room:
                self._open_next()
            assert self._file is not None
            count = min(len(view), self._room)
            self._file.write(view[:count])
            self._room -= count
            view = view[count:]
        return len(data)

    def close(self) -> list[Path]:
        if self._file is not None:
            self._file.close()
        return self._parts

    def _open_next(self) -> None:
        self.close()
        self._parts.append(self._folder / PART.format(len(self._parts)))
        self._file = self._parts[-1].open("wb")
        self._room = self._most


@contextmanager
def _joined(paths: list[Path]) -> Iterator[BinaryIO]:
    reader = _PartReader(paths)
    try:
        yield reader  # type: ignore[misc]
    finally:
        reader.close()


class _PartReader:
    """What looks to tarfile like one file that is only ever read on."""

    def __init__(self, paths: list[Path]) -> None:
        self._left = list(paths)
        self._file: BinaryIO | None = None

    def read(self, size: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            if self._file is None:
                if not self._left:
                    break
                self._file = self._left.pop(0).open("rb")
            chunk = self._file.read(size - len(chunks))
            if not chunk:
                self.close()
            chunks += chunk
        return bytes(chunks)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
