from __future__ import annotations

import zipfile

import pytest

from sglang_crashkit.installer.hunks import HunkConflictError
from sglang_crashkit.installer.releasefiles import ReleaseFiles
from sglang_crashkit.installer.resolver import PatchTree

HEADER = "Subject: S\nReason: R\nCalls: sglang_crashkit.srt.x.y\nForwarded: no\nDrop-when: D\n\n"
PATCH = f"{HEADER}--- a/srt/a.py\n+++ b/srt/a.py\n@@ -1,1 +1,2 @@\n one\n+two\n"
NEW = f"{HEADER}--- /dev/null\n+++ b/srt/new.py\n@@ -0,0 +1,1 @@\n+new\n"


@pytest.fixture
def patches(tmp_path) -> PatchTree:
    folder = tmp_path / "patches" / "0.5.9" / "srt"
    folder.mkdir(parents=True)
    (folder / "a.py.patch").write_text(PATCH)
    (folder / "new.py.patch").write_text(NEW)
    return PatchTree.load(tmp_path / "patches")


@pytest.fixture
def read(tmp_path, patches):
    """Return the files of a wheel with these members."""

    def open_wheel(members: dict[str, str]) -> ReleaseFiles:
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
            for name, text in members.items():
                archive.writestr(name, text)
        archive = zipfile.ZipFile(tmp_path / "a.whl")
        archives.append(archive)
        return ReleaseFiles(archive, patches.resolve("0.5.9"))

    archives: list[zipfile.ZipFile] = []
    yield open_wheel
    for archive in archives:
        archive.close()


def test_a_file_is_read_before_and_after(read):
    files = read({"sglang/srt/a.py": "one\n", "sglang/srt/b.py": "b\n"})
    assert (files.pristine("srt/a.py"), files.patched("srt/a.py")) == (b"one\n", b"one\ntwo\n")
    assert (files.pristine("srt/b.py"), files.patched("srt/b.py")) == (b"b\n", b"b\n")
    assert (files.pristine("srt/new.py"), files.patched("srt/new.py")) == (None, b"new\n")
    assert (files.pristine("srt/c.py"), files.patched("srt/c.py")) == (None, None)


def test_a_patch_that_does_not_fit_is_an_error(read):
    with pytest.raises(HunkConflictError):
        read({"sglang/srt/a.py": "other\n"}).patched("srt/a.py")


def test_entry_points_are_upstreams(read):
    name = "sglang-0.5.9.dist-info/entry_points.txt"
    assert read({name: "[console_scripts]\n"}).entry_points() == "[console_scripts]\n"
    assert read({}).entry_points() == ""
