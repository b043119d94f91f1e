import pytest

from sglang_crashkit.installer.patchfile import PatchFormatError
from sglang_crashkit.installer.resolver import PatchDataError, PatchTree, find_patch_root
from unit.installer.fake_sglang import HEADER


def write(root, *names):
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")


def names(tree, release):
    return [ref.name for ref in tree.resolve(release).values()]


def test_each_file_takes_the_highest_baseline_at_or_below_the_release(tmp_path):
    write(
        tmp_path, "0.5.9/srt/a.py.patch", "0.5.9/srt/b.py.patch", "0.5.10/srt/a.py.patch", "0.5.12.post1/srt/a.py.patch"
    )
    tree = PatchTree.load(tmp_path)
    assert names(tree, "0.5.9") == ["0.5.9/srt/a.py.patch", "0.5.9/srt/b.py.patch"]
    assert names(tree, "0.5.10.post1") == ["0.5.10/srt/a.py.patch", "0.5.9/srt/b.py.patch"]
    assert names(tree, "0.5.12") == ["0.5.10/srt/a.py.patch", "0.5.9/srt/b.py.patch"]
    assert names(tree, "0.5.13") == ["0.5.12.post1/srt/a.py.patch", "0.5.9/srt/b.py.patch"]
    assert names(tree, "0.5.8") == []


def test_a_drop_ends_a_patch_until_a_later_baseline_brings_it_back(tmp_path):
    write(tmp_path, "0.5.9/srt/a.py.patch", "0.5.10/srt/a.py.drop", "0.5.12/srt/a.py.patch")
    tree = PatchTree.load(tmp_path)
    assert names(tree, "0.5.9") == ["0.5.9/srt/a.py.patch"]
    assert names(tree, "0.5.11") == []
    assert names(tree, "0.5.12") == ["0.5.12/srt/a.py.patch"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["next/srt/a.py.patch"], "is not named for a release"),
        (["0.5.9/srt/a.py.orig"], "is neither a patch nor a drop"),
        (["0.5.9/srt/a.py.patch", "0.5.9/srt/a.py.drop"], "both patches and drops srt/a.py"),
    ],
)
def test_what_does_not_belong_among_the_patches_is_refused(tmp_path, given, why):
    write(tmp_path, *given)
    with pytest.raises(PatchDataError, match=why):
        PatchTree.load(tmp_path)


def test_a_patch_of_another_file_than_its_name_says_is_refused(tmp_path):
    write(tmp_path, "0.5.9/srt/a.py.patch")
    diff = "--- a/srt/b.py\n+++ b/srt/b.py\n@@ -1,1 +1,2 @@\n a\n+b\n"
    (tmp_path / "0.5.9/srt/a.py.patch").write_text(HEADER.format(calls="x.y") + diff)
    with pytest.raises(PatchFormatError, match=r"patches srt/b\.py, not the file it is named for"):
        PatchTree.load(tmp_path).resolve("0.5.9")["srt/a.py"].read()


def test_the_kit_finds_its_own_patches():
    assert (find_patch_root() / "0.5.9").is_dir()
