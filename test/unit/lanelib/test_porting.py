"""`scripts/port_release` on a small SGLang whose next release moved a hook, and what it is made of."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from lanelib.porting import generate_lock
from sglang_crashkit.installer.patches import LOCK_NAME, PatchDataError, PatchTree, sha256_hex
from unit.installer.fake_sglang import FILES, FakeKit, make_kit, write_patches, write_wheel

SCRIPT = Path(__file__).parents[3] / "scripts" / "port_release"
NEXT = FILES | {"srt/first.py": b"import os\n\n\nclass A:\n    def run():\n        return os.getpid()\n"}


@pytest.fixture
def wheel(tmp_path) -> Path:
    return write_wheel(tmp_path / "wheels")


@pytest.fixture
def kit(tmp_path, wheel) -> FakeKit:
    return make_kit(tmp_path / "patches", wheel)


@pytest.fixture
def port_release(kit, wheel, tmp_path, monkeypatch, capsys):
    """Run the script on the patches of `kit` with a cache of its own."""
    loader = importlib.machinery.SourceFileLoader("port_release", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("port_release", loader))
    loader.exec_module(module)
    monkeypatch.setattr(module, "PATCHES", kit.patches.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache/sglang-crashkit/wheels"
    write_wheel(cache, "0.5.10", NEXT)
    shutil.copy(wheel, cache)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["port_release", *arguments])
        code = module.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_once_the_draft_is_edited_the_lock_has_the_release(port_release, kit):
    port_release("0.5.10")
    file = kit.patches.root / "0.5.10/srt/first.py.patch"
    lines = [line for line in file.read_text().splitlines(keepends=True) if not line.startswith("# PORT:")]
    file.write_text("".join(lines).replace(" def run():\n+    ExitCode()\n", "     def run():\n+        ExitCode()\n"))
    code, out, _ = port_release("0.5.10")
    assert (code, "0.5.10: 3 of 3 patches apply as they are" in out) == (0, True)
    assert "2 releases; the lock was rewritten" in out
    lock = json.loads((kit.patches.root / LOCK_NAME).read_text())["releases"]
    assert lock["0.5.10"]["files"]["srt/first.py"]["patch"] == "0.5.10/srt/first.py.patch"
    assert lock["0.5.10"]["files"]["srt/deep/second.py"]["patch"] == "0.5.9/srt/deep/second.py.patch"
    assert "the lock is as it was" in port_release("--lock")[1]


def test_the_lock_has_both_hashes_or_names_what_fails(kit, wheel, tmp_path):
    locked = kit.lock.releases["0.5.9"]
    assert locked.wheels == {wheel.name: sha256_hex(wheel.read_bytes())}
    assert list(locked.files) == ["srt/deep/second.py", "srt/first.py", "srt/new/third.py"]
    assert locked.files["srt/first.py"].pristine == sha256_hex(FILES["srt/first.py"])
    assert locked.files["srt/new/third.py"].pristine is None
    assert locked.files["srt/new/third.py"].patched == sha256_hex(b"THIRD = 3\n")
    other = write_wheel(tmp_path / "other", "0.5.10", FILES | {"srt/first.py": b"import sys\n"})
    with pytest.raises(PatchDataError, match="1 of 2 releases do not take their patches") as caught:
        generate_lock(kit.patches, {"0.5.9": wheel, "0.5.10": other})
    assert "\n  0.5.10: the patch of srt/first.py does not fit: hunk 1: " in str(caught.value)
    assert caught.value.next_step == "scripts/port_release 0.5.10"


def test_a_patch_that_cannot_be_taken_back_is_not_locked(wheel, tmp_path):
    # A blank line stands at three places of the patched file.
    diff = "--- a/srt/first.py\n+++ b/srt/first.py\n@@ -1,1 +1,1 @@\n-import os\n+\n"
    write_patches(tmp_path / "odd", {"0.5.9": {"srt/first.py": diff}})
    with pytest.raises(PatchDataError, match="its 1 old lines stand at 3 places"):
        generate_lock(PatchTree.load(tmp_path / "odd"), {"0.5.9": wheel})
