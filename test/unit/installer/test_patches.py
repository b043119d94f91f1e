import pytest

from lanelib.porting import FIELDS
from sglang_crashkit.errors import UsageError
from sglang_crashkit.installer.patches import (
    LOCK_NAME,
    Hunk,
    HunkConflictError,
    Lock,
    LockedFile,
    LockedRelease,
    Patch,
    PatchDataError,
    PatchTree,
    apply_patch,
    base_release,
    find_patch_root,
    is_release,
    load_lock,
    parse_patch,
    patch_files,
    release_key,
    unapply_patch,
)
from unit.installer.fake_sglang import HEADER

HEAD = HEADER.format(calls="a.b, c.d")
DIFF = "--- a/x/y.py\n+++ b/x/y.py\n@@ -3,2 +3,2 @@\n one\n-two\n+2\n"


def hunk(*lines: bytes) -> Hunk:
    return Hunk(1, tuple((line[:1], line[1:] + b"\n") for line in lines))


def patch_of(*hunks: Hunk, creates: bool = False) -> Patch:
    return Patch("srt/a.py", dict.fromkeys(FIELDS, "text"), creates, hunks)


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEAD,
        HEAD + DIFF + DIFF.replace("x/y", "x/z"),
        HEAD + DIFF.replace("-3,2", "-3,9"),
        HEAD + DIFF.replace("-3,2", "-3,1"),
    ],
    ids=["empty", "no diff", "two files", "longer", "shorter"],
)
def test_what_is_no_patch_of_one_file_is_refused(text):
    with pytest.raises(PatchDataError, match=r"some\.patch does not read as the patch of one file"):
        parse_patch(text, source="some.patch")


@pytest.mark.parametrize(
    ("text", "hunks", "problems"),
    [
        (b"a\nb \n", [(b" b", b"+1")], {1: "nowhere"}),  # a trailing blank is a difference
        (b"a\n\tb\n", [(b" b", b"+1")], {1: "nowhere"}),
        (b"b\nb\n", [(b" b", b"+1")], {1: "at 2 places"}),
        (b"b", [(b" b", b"+1")], {1: "nowhere"}),  # without its newline it is another line
        (b"a\n", [(b"+1",)], {1: "nowhere"}),
        (b"a\nb\nc\n", [(b" c", b"+3"), (b" a", b"+1")], {2: "it stands at line 1, before the end"}),
        (b"a\nb\nc\n", [(b" a", b"-b"), (b" b", b" c", b"+3")], {2: "it stands at line 2"}),
        (b"a\na\n", [(b" a", b"+1"), (b" z", b"+2")], {1: "at 2 places", 2: "nowhere"}),
        (None, [(b" a", b"+1")], {1: "there is no such file"}),
    ],
)
def test_context_matches_exactly_at_exactly_one_place_and_in_order(text, hunks, problems):
    with pytest.raises(HunkConflictError, match=r"the patch of srt/a\.py does not fit: hunk") as caught:
        apply_patch(text, patch_of(*(hunk(*lines) for lines in hunks)))
    assert caught.value.problems.keys() == problems.keys()
    assert all(why in caught.value.problems[number] for number, why in problems.items())


def test_a_new_file_is_made_and_taken_back():
    patch = patch_of(hunk(b"+1"), creates=True)
    assert apply_patch(None, patch) == b"1\n"
    assert unapply_patch(b"1\n", patch) is None
    with pytest.raises(HunkConflictError, match="already there"):
        apply_patch(b"", patch)
    with pytest.raises(HunkConflictError, match="differs"):
        unapply_patch(b"1\n2\n", patch)


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")


def test_each_file_takes_the_highest_baseline_up_to_the_release(tmp_path):
    write(tmp_path, *(f"{baseline}/a.patch" for baseline in ("0.5.9", "0.5.10", "0.5.12.post1")))
    write(tmp_path, "0.5.9/b.patch", "0.5.12/b.drop", "0.5.13/b.patch")
    tree = PatchTree.load(tmp_path)
    chosen = {
        release: [ref.name for ref in tree.resolve(release).values()]
        for release in ("0.5.8", "0.5.9", "0.5.10.post1", "0.5.12", "0.5.12.post2", "0.5.14")
    }
    assert chosen == {
        "0.5.8": [],
        "0.5.9": ["0.5.9/a.patch", "0.5.9/b.patch"],
        "0.5.10.post1": ["0.5.10/a.patch", "0.5.9/b.patch"],
        "0.5.12": ["0.5.10/a.patch"],
        "0.5.12.post2": ["0.5.12.post1/a.patch"],
        "0.5.14": ["0.5.12.post1/a.patch", "0.5.13/b.patch"],
    }


def test_patches_that_contradict_the_lock_are_refused(kit, other_kit):
    locked = kit.lock.releases["0.5.9"]
    pristine = {"srt/first.py": b"import os\n", "srt/deep/second.py": b""}
    with pytest.raises(HunkConflictError):
        patch_files("0.5.9", locked, kit.patches, pristine)
    with pytest.raises(PatchDataError, match="the patches do not"):
        patch_files("0.5.9", locked, other_kit.patches, pristine)
    third = LockedRelease({}, {"srt/new/third.py": locked.files["srt/new/third.py"]})
    with pytest.raises(PatchDataError, match=r"does not give srt/new/third\.py the sha256 in the lock"):
        patch_files("0.5.9", third, other_kit.patches, {})


def test_the_lock_loads_as_dumped_and_finds_builds(tmp_path):
    files = {"srt/a.py": LockedFile("1" * 64, "0.5.9/srt/a.py.patch", "2" * 64), "srt/n.py": LockedFile(None, "x", "3")}
    releases = {
        "0.5.9": LockedRelease({"sglang-0.5.9-py3-none-any.whl": "4" * 64}, files),
        "0.5.10": LockedRelease({}, {}),
    }
    lock = Lock(releases)
    (tmp_path / LOCK_NAME).write_bytes(lock.dump())
    assert load_lock(tmp_path) == lock
    (tmp_path / LOCK_NAME).write_bytes(Lock(dict(reversed(releases.items()))).dump())
    assert list(load_lock(tmp_path).releases) == ["0.5.9", "0.5.10"]
    assert lock.require("0.5.9+cu126") is releases["0.5.9"]
    assert lock.find("0.5.9.dev1") is None
    assert lock.supported_range() == "2 releases, 0.5.9 to 0.5.10"
    assert (find_patch_root() / LOCK_NAME).is_file()


def test_releases_are_ordered_and_their_builds_are_local_versions():
    given = ["0.5.10", "0.5.9", "0.5.12.post1", "0.5.13", "0.5.12", "0.5.10.post1"]
    assert sorted(given, key=release_key) == ["0.5.9", "0.5.10", "0.5.10.post1", "0.5.12", "0.5.12.post1", "0.5.13"]
    assert base_release("0.5.23+crashkit.0.1.0") == "0.5.23"
    for version in ("0.5.24.dev3+g12", "0.5.9rc1", "0.5.9+cu126", "", "v0.5.9", "../0.5.9"):
        assert not is_release(version)
        with pytest.raises(UsageError, match="is not a release"):
            release_key(version)
