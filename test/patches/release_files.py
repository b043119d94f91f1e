"""What a release's wheel holds, as published and once patched."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping

from lanelib.porting import read_package_file
from sglang_crashkit.installer.patches import PatchRef, apply_patch


class ReleaseFiles:
    """The files of one release, as published and as they are once patched.

    Args:
        archive: upstream's wheel, open for as long as files are read.
        refs: the patch of each file, as `PatchTree.resolve` gives them.
    """

    def __init__(self, archive: zipfile.ZipFile, refs: Mapping[str, PatchRef]) -> None:
        self._archive = archive
        self._refs = refs

    def pristine(self, path: str) -> bytes | None:
        """Return the file at `path` below the package as upstream has it, None where it has none."""
        return read_package_file(self._archive, path)

    def patched(self, path: str) -> bytes | None:
        """Return the file at `path` below the package as it is once patched, None if absent.

        Raises:
            HunkConflictError: its patch does not fit.
        """
        pristine, ref = self.pristine(path), self._refs.get(path)
        return pristine if ref is None else apply_patch(pristine, ref.read())

    def entry_points(self) -> str:
        """Return upstream's ``entry_points.txt``, empty where it has none."""
        names = [name for name in self._archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        return self._archive.read(names[0]).decode() if names else ""
