from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.installer.apply import apply
from sglang_crashkit.installer.patches import LockedFile, LockedRelease
from sglang_crashkit.installer.status import (
    APPLIED,
    APPLYING,
    BY_COMMAND,
    FileState,
    Manifest,
    Overall,
    PatchedFile,
    Tree,
    read_tree,
)

LOCKED = LockedRelease({}, {"a.py": LockedFile("before", "a.patch", "after"), "b.py": LockedFile(None, "b.patch", "b")})
SAME = {"a.py": PatchedFile("before", {"after": ""}), "b.py": PatchedFile(None, {"b": ""})}
OTHER = SAME | {"a.py": PatchedFile("before", {"older": ""})}
PRISTINE, PATCHED, OUTDATED = FileState.PRISTINE, FileState.PATCHED, FileState.OUTDATED


def manifest(files: dict[str, PatchedFile], phase: str = APPLIED) -> Manifest:
    return Manifest(phase, BY_COMMAND, "1", "0.5.9", files)


@pytest.mark.parametrize(
    ("states", "found", "locked", "overall"),
    [
        ([PRISTINE, PRISTINE], None, LOCKED, Overall.PRISTINE),
        ([], None, None, Overall.UNSUPPORTED),
        ([PATCHED, PATCHED], None, LOCKED, Overall.INTERRUPTED),
        ([PATCHED, PATCHED], manifest(SAME), LOCKED, Overall.PATCHED),
        ([PATCHED, PRISTINE], manifest(SAME), LOCKED, Overall.INTERRUPTED),
        ([PATCHED, PRISTINE], manifest(SAME, APPLYING), LOCKED, Overall.INTERRUPTED),
        ([OUTDATED, PATCHED], manifest(OTHER), LOCKED, Overall.OUTDATED),
        ([PATCHED, PATCHED], manifest(SAME), None, Overall.OUTDATED),
        ([PATCHED, FileState.FOREIGN], manifest(SAME), LOCKED, Overall.FOREIGN),
        ([FileState.FOREIGN, FileState.MISSING], None, LOCKED, Overall.FOREIGN),
        ([PRISTINE, FileState.MISSING], None, LOCKED, Overall.MISSING),
    ],
)
def test_one_word_says_what_an_installation_is(
    states: list[FileState], found: Manifest | None, locked: LockedRelease | None, overall: Overall
) -> None:
    environment: Any = SimpleNamespace()
    files = dict(zip(LOCKED.files, states, strict=False))
    assert Tree(environment, locked, found, {}, files).overall is overall


def test_each_file_is_known_by_its_hash(environment, kit):
    locked = kit.lock.find(environment.version)
    assert set(read_tree(environment, locked).files.values()) == {PRISTINE}
    apply(environment, kit.patches, kit.lock)
    (environment.package / "srt/first.py").write_text("somebody's own")
    (environment.package / "srt/deep/second.py").unlink()
    files = read_tree(environment, locked).files
    assert files == {
        "srt/first.py": FileState.FOREIGN,
        "srt/deep/second.py": FileState.MISSING,
        "srt/new/third.py": PATCHED,
    }
