import pytest

from sglang_crashkit.installer.operations import apply
from sglang_crashkit.installer.tree import FileState, Overall, read_tree


def test_each_file_is_told_by_its_hash(environment, kit, other_kit):
    locked = kit.lock.releases["0.5.9"]
    assert set(read_tree(environment, locked).files.values()) == {FileState.PRISTINE}
    apply(environment, other_kit.patches, other_kit.lock)
    (environment.package / "srt/deep/second.py").unlink()
    tree = read_tree(environment, locked)
    assert tree.files == {
        "srt/deep/second.py": FileState.MISSING,
        "srt/first.py": FileState.OUTDATED,
        "srt/new/third.py": FileState.OUTDATED,
    }
    assert tree.overall is Overall.MISSING


def test_a_tree_patched_in_part_is_not_called_patched(environment, kit):
    locked = kit.lock.releases["0.5.9"]
    pristine = (environment.package / "srt/first.py").read_bytes()
    apply(environment, kit.patches, kit.lock)
    assert read_tree(environment, locked).overall is Overall.PATCHED
    (environment.package / "srt/first.py").write_bytes(pristine)
    assert read_tree(environment, locked).overall is Overall.INTERRUPTED


def test_pristine_bytes_that_are_nowhere_are_not_made_up(environment, kit):
    (environment.package / "srt/first.py").write_text("mine\n")
    tree = read_tree(environment, kit.lock.releases["0.5.9"])
    with pytest.raises(KeyError):
        tree.pristine_bytes("srt/first.py", kit.patches)
    assert tree.pristine_bytes("srt/new/third.py", kit.patches) is None
