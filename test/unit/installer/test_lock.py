from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.lock import Lock, LockedFile, LockedRelease, load_lock, patch_files, sha256_hex
from sglang_crashkit.installer.patches import LOCK_NAME, PatchDataError
from unit.installer.fake_sglang import FILES, RELEASE, FakeKit

ONE = LockedRelease({"a.whl": "1"}, {"srt/x.py": LockedFile(None, "x.patch", "2")})


def test_a_lock_comes_back_oldest_release_first(tmp_path: Path) -> None:
    lock = Lock({"0.5.10": ONE, "0.5.9": ONE})
    (tmp_path / LOCK_NAME).write_bytes(lock.dump())
    found = load_lock(tmp_path)
    assert (list(found.releases), found.releases) == (["0.5.9", "0.5.10"], lock.releases)
    assert found.supported_range() == "2 releases, 0.5.9 to 0.5.10"


def test_a_build_of_a_release_is_found_and_another_refused() -> None:
    lock = Lock({"0.5.9": ONE})
    assert lock.require("0.5.9+crashkit.1") is ONE
    with pytest.raises(RefusedError, match=r"SGLang 0\.5\.8 is not supported; supported are 1 releases"):
        lock.require("0.5.8")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 9}', '{"schema_version": 1, "releases": {"x": 1}}']
)
def test_what_is_no_lock_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_NAME).write_text(text)
    with pytest.raises(PatchDataError, match=LOCK_NAME):
        load_lock(tmp_path)


def test_patched_files_are_those_of_the_lock(kit: FakeKit) -> None:
    locked = kit.lock.require(RELEASE)
    patched = patch_files(RELEASE, locked, kit.patches, FILES)
    assert {path: sha256_hex(data) for path, data in patched.items()} == {
        path: entry.patched for path, entry in locked.files.items()
    }
    path = next(iter(locked.files))
    locked.files[path] = LockedFile(None, locked.files[path].patch, "another")
    with pytest.raises(PatchDataError, match="does not give"):
        patch_files(RELEASE, locked, kit.patches, FILES)
