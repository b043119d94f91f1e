from __future__ import annotations

import errno
import os
import py_compile
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError, ExitCode, RefusedError
from sglang_crashkit.installer.environment import Kit
from sglang_crashkit.installer.files import FileOps
from sglang_crashkit.installer.operations import apply, revert
from sglang_crashkit.installer.record import Record
from sglang_crashkit.installer.state import BACKUP_FOLDER, STATE_NAME
from sglang_crashkit.installer.tree import Overall, read_tree
from unit.installer.fake_sglang import install, is_root, snapshot, without_kit, write_wheel

FIRST = (
    b"import os\nfrom sglang_crashkit.errors import ExitCode\n\n\ndef run():\n    ExitCode()\n    return os.getpid()\n"
)
CHANGED = ("srt/deep/second.py", "srt/first.py", "srt/new/third.py")


def overall(environment, kit) -> Overall:
    return read_tree(environment, kit.lock.find(environment.version)).overall


def test_apply_patches_and_revert_gives_back_the_exact_bytes(environment, kit):
    pristine = snapshot(environment.site)
    outcome = apply(environment, kit.patches, kit.lock)
    assert outcome.changed == CHANGED
    assert outcome.before is Overall.PRISTINE
    assert (environment.package / "srt/first.py").read_bytes() == FIRST
    assert (environment.package / "srt/deep/second.py").read_bytes() == b'VALUE = "1"\nOTHER = "two"'
    assert (environment.package / "srt/new/third.py").read_bytes() == b"THIRD = 3\n"
    assert overall(environment, kit) is Overall.PATCHED
    outcome = revert(environment, kit.patches, kit.lock)
    assert (outcome.changed, outcome.before) == (CHANGED, Overall.PATCHED)
    assert snapshot(environment.site) == pristine


def test_apply_and_revert_twice_do_nothing_the_second_time(environment, kit):
    apply(environment, kit.patches, kit.lock)
    patched = snapshot(environment.site)
    assert apply(environment, kit.patches, kit.lock).changed == ()
    assert snapshot(environment.site) == patched
    revert(environment, kit.patches, kit.lock)
    assert revert(environment, kit.patches, kit.lock).changed == ()


def test_a_dry_run_changes_nothing(environment, kit):
    pristine = snapshot(environment.site)
    assert apply(environment, kit.patches, kit.lock, dry_run=True).changed == CHANGED
    assert snapshot(environment.site) == pristine
    apply(environment, kit.patches, kit.lock)
    patched = snapshot(environment.site)
    assert revert(environment, kit.patches, kit.lock, dry_run=True).changed == CHANGED
    assert snapshot(environment.site) == patched


def test_record_describes_the_patched_files_and_lists_those_of_the_kit(environment, kit):
    apply(environment, kit.patches, kit.lock)
    data = (environment.dist_info / "RECORD").read_bytes()
    record = Record.parse(data, source="RECORD")
    for row in record.rows:
        file = environment.site / row.path
        assert file.is_file(), row.path
        if row.path.endswith((f"/{STATE_NAME}", "/RECORD")):
            assert row.raw == f"{row.path},,\n"
        else:
            assert row.raw == record.format_row(row.path, file.read_bytes())
    listed = {row.path for row in record.rows}
    files = {path.relative_to(environment.site).as_posix() for path in environment.site.rglob("*") if path.is_file()}
    assert files == listed


def test_a_file_that_record_does_not_list_stays_unlisted(environment, kit):
    record = environment.dist_info / "RECORD"
    rows = [row for row in record.read_text().splitlines(keepends=True) if "first.py" not in row]
    record.write_text("".join(rows).removesuffix("\n"))
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    assert "\nsglang/srt/first.py" not in record.read_text()
    revert(environment, kit.patches, kit.lock)
    assert snapshot(environment.site) == pristine


def test_an_installation_without_record_is_patched_all_the_same(environment, kit):
    (environment.dist_info / "RECORD").unlink()
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    assert overall(environment, kit) is Overall.PATCHED
    revert(environment, kit.patches, kit.lock)
    assert snapshot(environment.site) == pristine


def test_rows_that_others_add_to_record_meanwhile_are_kept(environment, kit):
    apply(environment, kit.patches, kit.lock)
    record = environment.dist_info / "RECORD"
    record.write_text("sglang/__pycache__/x.pyc,,\n" + record.read_text())
    revert(environment, kit.patches, kit.lock)
    assert record.read_text().startswith("sglang/__pycache__/x.pyc,,\n")
    assert "crashkit" not in record.read_text()


def test_a_hard_linked_cache_keeps_its_bytes(environment, kit, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    linked = ["sglang/srt/first.py", "sglang/srt/deep/second.py", "sglang-0.5.9.dist-info/RECORD"]
    for name in linked:
        os.link(environment.site / name, cache / Path(name).name)
    cached = snapshot(cache)
    inodes = {path: path.stat().st_ino for path in cache.iterdir()}
    apply(environment, kit.patches, kit.lock)
    assert snapshot(cache) == cached
    revert(environment, kit.patches, kit.lock)
    assert snapshot(cache) == cached
    assert {path: path.stat().st_ino for path in cache.iterdir()} == inodes
    assert not (cache / "first.py").samefile(environment.package / "srt/first.py")


def test_a_file_that_is_a_link_into_a_cache_leaves_the_cache_alone(environment, kit, tmp_path):
    cached, file = tmp_path / "cached.py", environment.package / "srt/first.py"
    file.rename(cached)
    file.symlink_to(cached)
    data = cached.read_bytes()
    apply(environment, kit.patches, kit.lock)
    assert cached.read_bytes() == data
    assert file.read_bytes() == FIRST
    revert(environment, kit.patches, kit.lock)
    assert file.read_bytes() == data


def test_permission_bits_are_kept(environment, kit):
    file = environment.package / "srt/first.py"
    file.chmod(0o750)
    apply(environment, kit.patches, kit.lock)
    assert stat.S_IMODE(file.stat().st_mode) == 0o750
    revert(environment, kit.patches, kit.lock)
    assert stat.S_IMODE(file.stat().st_mode) == 0o750


def test_stale_bytecode_of_the_same_time_and_size_is_not_used(environment, kit):
    file = environment.package / "srt/first.py"
    for action in (apply, revert):
        compiled = Path(py_compile.compile(str(file), doraise=True))
        other = Path(py_compile.compile(str(environment.package / "__init__.py"), doraise=True))
        action(environment, kit.patches, kit.lock)
        assert not compiled.exists()
        assert other.exists()


@pytest.mark.parametrize("action", [apply, revert])
def test_a_foreign_file_is_refused_by_name_and_nothing_changes(environment, kit, action):
    if action is revert:
        apply(environment, kit.patches, kit.lock)
    with (environment.package / "srt/first.py").open("ab") as file:
        file.write(b"# mine\n")
    before = snapshot(environment.site)
    with pytest.raises(RefusedError, match=r"srt/first\.py \(foreign\)") as caught:
        action(environment, kit.patches, kit.lock)
    assert "sglang==0.5.9" in caught.value.next_step
    assert caught.value.exit_code is ExitCode.REFUSED
    assert snapshot(environment.site) == before
    assert overall(environment, kit) is Overall.FOREIGN


def test_a_file_where_the_kit_would_make_its_own_is_foreign(environment, kit):
    (environment.package / "srt/new").mkdir()
    (environment.package / "srt/new/third.py").write_text("mine\n")
    with pytest.raises(RefusedError, match=r"srt/new/third\.py \(foreign\)"):
        apply(environment, kit.patches, kit.lock)


def test_a_missing_file_is_refused_by_name(environment, kit):
    (environment.package / "srt/deep/second.py").unlink()
    with pytest.raises(RefusedError, match=r"srt/deep/second\.py \(missing\)"):
        apply(environment, kit.patches, kit.lock)
    assert overall(environment, kit) is Overall.MISSING


def test_an_unsupported_release_is_refused(tmp_path, kit):
    environment = install(write_wheel(tmp_path / "wheels", "0.5.99"), tmp_path / "other")
    before = snapshot(environment.site)
    with pytest.raises(RefusedError, match=r"SGLang 0\.5\.99 is not supported"):
        apply(environment, kit.patches, kit.lock)
    assert overall(environment, kit) is Overall.UNSUPPORTED
    assert revert(environment, kit.patches, kit.lock).changed == ()
    assert snapshot(environment.site) == before


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "cannot import sglang_crashkit"),
        (Kit("0.0.1", Path("/x"), {}, only_by_python_path=False), "imports sglang_crashkit 0.0.1"),
        (
            Kit("0.1.0", Path("/x"), {"a.b": "No module named 'a'"}, only_by_python_path=False),
            "cannot import a.b: No module",
        ),
        (Kit("0.1.0", Path("/x"), {}, only_by_python_path=True), "through PYTHONPATH alone"),
    ],
)
def test_apply_refuses_a_python_in_which_patched_files_would_not_run(environment, kit, found, why):
    before = snapshot(environment.site)
    with pytest.raises(RefusedError, match=why) as caught:
        apply(replace(environment, kit=found), kit.patches, kit.lock)
    assert "install" in caught.value.next_step
    assert snapshot(environment.site) == before


def test_revert_works_where_the_kit_is_gone(environment, kit):
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    revert(without_kit(environment), kit.patches, kit.lock)
    assert snapshot(environment.site) == pristine


def test_patches_of_an_earlier_kit_are_replaced_and_reverted(environment, kit, other_kit):
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    direct = snapshot(environment.site)
    revert(environment, kit.patches, kit.lock)
    apply(environment, other_kit.patches, other_kit.lock)
    assert overall(environment, kit) is Overall.OUTDATED
    outcome = apply(environment, kit.patches, kit.lock)
    assert outcome.before is Overall.OUTDATED
    assert snapshot(environment.site) == direct
    assert overall(environment, other_kit) is Overall.OUTDATED
    apply(environment, other_kit.patches, other_kit.lock)
    assert (environment.package / "srt/deep/second.py").read_bytes() == pristine["sglang/srt/deep/second.py"]
    revert(environment, kit.patches, kit.lock)  # with another kit than the one that patched
    assert snapshot(environment.site) == pristine


def test_a_release_that_a_later_kit_no_longer_supports_can_be_reverted(environment, kit):
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    empty = replace(kit.lock, releases={})
    assert read_tree(environment, None).overall is Overall.OUTDATED
    revert(environment, kit.patches, empty)
    assert snapshot(environment.site) == pristine


@pytest.mark.parametrize("action", [apply, revert])
def test_a_lost_state_file_is_made_up_for(environment, kit, action):
    def files() -> dict[str, bytes]:
        return {name: data for name, data in snapshot(environment.site).items() if data != b"folder"}

    pristine = files()
    apply(environment, kit.patches, kit.lock)
    patched = files()
    (environment.dist_info / STATE_NAME).unlink()
    assert overall(environment, kit) is Overall.INTERRUPTED
    action(environment, kit.patches, kit.lock)
    if action is apply:
        assert files().keys() == patched.keys()
        assert overall(environment, kit) is Overall.PATCHED
        revert(environment, kit.patches, kit.lock)
    assert files() == pristine


def test_a_folder_that_the_kit_made_goes_with_the_bytecode_in_it(environment, kit):
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    py_compile.compile(str(environment.package / "srt/new/third.py"), doraise=True)
    revert(environment, kit.patches, kit.lock)
    assert snapshot(environment.site) == pristine


def test_a_lost_pristine_copy_is_made_up_for_by_taking_the_patch_back(environment, kit):
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    (environment.dist_info / BACKUP_FOLDER / "srt/first.py").write_text("not it")
    revert(environment, kit.patches, kit.lock)
    assert snapshot(environment.site) == pristine


def test_bytes_that_nothing_can_bring_back_are_named(environment, kit, other_kit):
    apply(environment, kit.patches, kit.lock)
    (environment.dist_info / BACKUP_FOLDER / "srt/first.py").unlink()
    before = snapshot(environment.site)
    with pytest.raises(RefusedError, match=r"upstream's srt/first\.py is nowhere in"):
        revert(environment, other_kit.patches, other_kit.lock)
    assert snapshot(environment.site) == before


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema_version": 99}'])
def test_a_damaged_state_file_is_named(environment, kit, text):
    (environment.dist_info / STATE_NAME).write_text(text)
    with pytest.raises(RefusedError, match=STATE_NAME) as caught:
        apply(environment, kit.patches, kit.lock)
    assert "sglang==0.5.9" in caught.value.next_step


@pytest.mark.parametrize("action", [apply, revert])
def test_a_read_only_folder_is_named_and_nothing_changes(environment, kit, action, request):
    if action is revert:
        apply(environment, kit.patches, kit.lock)
    before = snapshot(environment.site)
    folder = environment.package / "srt/deep"
    if is_root():
        _mount("--bind", folder, folder)
        request.addfinalizer(lambda: subprocess.run(["umount", folder], check=True, timeout=10))
        _mount("-o", "remount,ro,bind", folder)
    else:
        folder.chmod(0o500)
        request.addfinalizer(lambda: folder.chmod(0o700))
    with pytest.raises(RefusedError, match=f"cannot make files in {folder}: it is read-only") as caught:
        action(environment, kit.patches, kit.lock)
    assert "make it writable" in caught.value.next_step
    assert snapshot(environment.site) == before


def _mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], check=False, timeout=10, capture_output=True)
    if done.returncode != 0:
        pytest.skip("this machine does not let root mount")


@pytest.mark.parametrize("action", [apply, revert])
def test_a_full_disk_is_named_and_nothing_changes(tmp_path, wheel, kit, action, request):
    if not is_root():
        pytest.skip("only root can make a small file system")
    small = tmp_path / "small"
    small.mkdir()
    _mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", small)
    request.addfinalizer(lambda: subprocess.run(["umount", small], check=True, timeout=10))
    environment = install(wheel, small / "site")
    if action is revert:
        apply(environment, kit.patches, kit.lock)
    before = snapshot(environment.site)
    _fill(small)
    with pytest.raises(CrashkitError, match=f"no space left for new files in {small}.*nothing was changed"):
        action(environment, kit.patches, kit.lock)
    assert snapshot(environment.site) == before
    (small / "filler").unlink()
    action(environment, kit.patches, kit.lock)
    assert overall(environment, kit) is (Overall.PATCHED if action is apply else Overall.PRISTINE)


def test_commands_at_once_take_their_turns(environment, kit):
    pristine = snapshot(environment.site)
    for actions in ([apply] * 4, [revert] * 4, [apply, revert] * 3):
        children = []
        for action in actions:
            child = os.fork()
            if child == 0:
                try:
                    action(environment, kit.patches, kit.lock)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * len(actions)
        assert overall(environment, kit) in (Overall.PATCHED, Overall.PRISTINE)
        if actions[0] is actions[-1]:
            assert overall(environment, kit) is (Overall.PATCHED if actions[0] is apply else Overall.PRISTINE)
    revert(environment, kit.patches, kit.lock)
    assert snapshot(environment.site) == pristine


def _fill(folder: Path) -> None:
    """Leave no room for another block below `folder`."""
    file = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(file, 0, 1 << 30)
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize
    os.posix_fallocate(file, 0, free)
    os.close(file)


def steps_of(environment, kit, action) -> list[str]:
    """Return the steps that `action` takes, and take them."""
    steps: list[str] = []
    action(environment, kit.patches, kit.lock, ops=FileOps(steps.append))
    return steps


@pytest.mark.parametrize("action", [apply, revert])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_step_leaves_everything_as_it_was_or_as_meant(tmp_path, wheel, kit, action, code):
    sample = install(wheel, tmp_path / "sample")
    pristine = snapshot(sample.site)
    steps = steps_of(sample, kit, apply)
    patched = snapshot(sample.site)
    if action is revert:
        steps = steps_of(sample, kit, revert)
    assert len(steps) > 20
    for number, name in enumerate(steps):
        environment = install(wheel, tmp_path / str(number))
        if action is revert:
            apply(environment, kit.patches, kit.lock)
        before = snapshot(environment.site)
        taken = iter(range(len(steps) * 2))

        def fail(_step, taken=taken, number=number):
            if next(taken) == number:
                raise OSError(code, os.strerror(code), "/some/file")

        with pytest.raises(CrashkitError):
            action(environment, kit.patches, kit.lock, ops=FileOps(fail))
        if snapshot(environment.site) != before:
            # Past the point of no return: the phase says so, and the same command finishes it.
            meant = Overall.PATCHED if action is apply else Overall.PRISTINE
            assert overall(environment, kit) in (Overall.INTERRUPTED, meant), name
            action(environment, kit.patches, kit.lock)
            assert snapshot(environment.site) == (patched if action is apply else pristine), name
