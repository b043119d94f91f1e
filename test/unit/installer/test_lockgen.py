import pytest

from sglang_crashkit.installer.lockfile import sha256_hex
from sglang_crashkit.installer.lockgen import generate_lock, normalise_patches
from sglang_crashkit.installer.resolver import PatchDataError, PatchTree
from unit.installer.fake_sglang import FILES, PATCHES, write_patches, write_wheel


def test_the_lock_has_the_hashes_before_and_after(wheel, kit):
    locked = generate_lock(kit.patches, {"0.5.9": wheel}).releases["0.5.9"]
    assert locked.wheels == {wheel.name: sha256_hex(wheel.read_bytes())}
    assert list(locked.files) == ["srt/deep/second.py", "srt/first.py", "srt/new/third.py"]
    assert locked.files["srt/first.py"].pristine == sha256_hex(FILES["srt/first.py"])
    assert locked.files["srt/new/third.py"].pristine is None
    assert locked.files["srt/new/third.py"].patched == sha256_hex(b"THIRD = 3\n")


def test_a_patch_left_with_lone_hunk_headers_gets_its_numbers(wheel, tmp_path):
    write_patches(tmp_path / "exact", PATCHES)
    drafts = {
        "0.5.9": {
            path: "".join("@@\n" if line.startswith("@@") else line for line in text.splitlines(keepends=True))
            for path, text in PATCHES["0.5.9"].items()
        }
    }
    write_patches(tmp_path / "draft", drafts)
    changed = normalise_patches(PatchTree.load(tmp_path / "draft"), {"0.5.9": wheel})
    assert changed == [f"0.5.9/{path}.patch" for path in sorted(PATCHES["0.5.9"])]
    for path in PATCHES["0.5.9"]:
        expected = (tmp_path / "exact/0.5.9" / f"{path}.patch").read_bytes()
        assert (tmp_path / "draft/0.5.9" / f"{path}.patch").read_bytes() == expected
    assert normalise_patches(PatchTree.load(tmp_path / "draft"), {"0.5.9": wheel}) == []


def test_a_patch_that_does_not_fit_stops_the_lock_and_names_the_release(kit, wheel, tmp_path):
    other = write_wheel(tmp_path / "other", "0.5.10", FILES | {"srt/first.py": b"import sys\n"})
    with pytest.raises(PatchDataError, match="1 of 2 releases do not take their patches") as caught:
        generate_lock(kit.patches, {"0.5.9": wheel, "0.5.10": other})
    assert "\n  0.5.10: the patch of srt/first.py does not fit: hunk 1: " in str(caught.value)
    assert caught.value.next_step == "scripts/port_release 0.5.10"
