from __future__ import annotations

import json
import os
import py_compile
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError, ExitCode, RefusedError
from sglang_crashkit.installer.apply import apply, exclusive, revert
from sglang_crashkit.installer.record import format_row, read_rows
from sglang_crashkit.installer.status import MANIFEST_NAME, State, read_tree
from unit.installer.fake_sglang import FILES, install, overall, snapshot, write_wheel
from unit.support.killing import Step, run_in_child
from unit.support.small_disk import fill, mounted

FIRST = (
    b"import os\nfrom sglang_crashkit.errors import ExitCode\n\n\ndef run():\n    ExitCode()\n    return os.getpid()\n"
)
CHANGED = ("srt/deep/second.py", "srt/first.py", "srt/new/third.py")
MEANT = {apply: State.PATCHED, revert: State.PRISTINE}

both = pytest.mark.parametrize("action", [apply, revert])


@pytest.fixture
def ready(environment, kit):
    """Return the installation that `action` has something to do on."""

    def make(action, at=environment):
        if action is revert:
            apply(at, kit.patches, kit.lock)
        return at

    return make


def test_apply_patches_and_revert_gives_back_the_exact_bytes(environment, kit):
    pristine = snapshot(environment.site)
    assert apply(environment, kit.patches, kit.lock, dry_run=True).changed == CHANGED
    assert snapshot(environment.site) == pristine
    outcome = apply(environment, kit.patches, kit.lock)
    assert (outcome.changed, outcome.before) == (CHANGED, State.PRISTINE)
    patched = snapshot(environment.site)
    assert [patched[f"sglang/{path}"] for path in CHANGED] == [b'VALUE = "1"\nOTHER = "two"', FIRST, b"THIRD = 3\n"]
    rows = dict(read_rows(patched[f"{environment.dist_info.name}/RECORD"], source="RECORD"))
    assert rows.keys() == {name for name, data in patched.items() if data != b"folder"}
    for path, row in rows.items():
        hashed = not path.endswith((f"/{MANIFEST_NAME}", "/RECORD"))
        assert row == format_row(path, patched[path] if hashed else None)
    assert overall(environment, kit) is State.PATCHED
    assert apply(environment, kit.patches, kit.lock).changed == ()
    assert revert(environment, kit.patches, kit.lock, dry_run=True).changed == CHANGED
    assert snapshot(environment.site) == patched
    py_compile.compile(str(environment.package / "srt/new/third.py"), doraise=True)
    outcome = revert(replace(environment, kit=None), kit.patches, kit.lock)  # needs no kit there
    assert (outcome.changed, outcome.before) == (CHANGED, State.PATCHED)
    assert snapshot(environment.site) == pristine
    assert revert(environment, kit.patches, kit.lock).changed == ()


def test_a_missing_record_and_one_that_is_none(environment, kit):
    record = environment.dist_info / "RECORD"
    record.write_bytes(b'"open,,\n')
    with pytest.raises(RefusedError, match=f"{record} does not read as a RECORD"):
        apply(environment, kit.patches, kit.lock)
    record.unlink()
    pristine = snapshot(environment.site)
    for action in (apply, revert):
        action(environment, kit.patches, kit.lock)
        assert overall(environment, kit) is MEANT[action]
    assert snapshot(environment.site) == pristine


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [*rows[:-1], rows[-1].removesuffix("\n")],
        lambda rows: [row.replace("\n", "\r\n") for row in rows],
        lambda rows: [row for row in rows if "first.py" not in row],
        lambda rows: [row.partition(",")[0] + ",,\n" if "first.py" in row else row for row in rows],
        lambda rows: ['"sglang/with,comma.py",sha256=abc,3\n', *rows],
        lambda rows: [],
    ],
    ids=["no-line-end", "dos", "unlisted", "without-hash", "quoted", "empty"],
)
def test_any_record_comes_back_with_pips_own_later_additions(environment, kit, change):
    record, added = environment.dist_info / "RECORD", b"sglang/__pycache__/x.pyc,,\n"
    before = "".join(change(record.read_text().splitlines(keepends=True))).encode()
    record.write_bytes(before)
    apply(environment, kit.patches, kit.lock)
    assert overall(environment, kit) is State.PATCHED
    assert (b"sglang/srt/first.py" in record.read_bytes()) == (b"sglang/srt/first.py" in before)
    record.write_bytes(added + record.read_bytes())
    revert(environment, kit.patches, kit.lock)
    assert record.read_bytes() == added + before


def test_linked_caches_stay_unchanged_and_modes_and_owners_are_kept(environment, kit, tmp_path):
    cache, package = tmp_path / "cache", environment.package
    cache.mkdir()
    (package / "srt/deep/second.py").chmod(0o750)
    if os.geteuid() == 0:
        os.chown(package / "srt/deep/second.py", 1234, 2345)
    for file in (package / "srt/deep/second.py", environment.dist_info / "RECORD"):
        os.link(file, cache / file.name)
    (package / "srt/first.py").rename(cache / "first.py")
    (package / "srt/first.py").symlink_to(cache / "first.py")
    cached = {path: (path.stat(), path.read_bytes()) for path in cache.iterdir()}
    for action, data in ((apply, FIRST), (revert, FILES["srt/first.py"])):
        action(environment, kit.patches, kit.lock)
        for path, (before, content) in cached.items():
            assert (path.stat().st_ino, path.read_bytes()) == (before.st_ino, content)
        assert (package / "srt/first.py").read_bytes() == data
        before, after = cached[cache / "second.py"][0], (package / "srt/deep/second.py").stat()
        assert after.st_ino != before.st_ino
        assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o750, before.st_uid, before.st_gid)


def test_new_files_are_read_by_whom_the_others_are(environment, kit):
    before = os.umask(0o077)
    try:
        apply(environment, kit.patches, kit.lock)
    finally:
        os.umask(before)
    for path in ("srt/new/third.py", "srt/new", f"../{environment.dist_info.name}/{MANIFEST_NAME}"):
        assert (environment.package / path).stat().st_mode & 0o044 == 0o044, path


@both
def test_compiled_files_that_cannot_be_removed_are_named_and_nothing_changes(ready, kit, action, monkeypatch):
    at = ready(action)
    cache = at.package / "srt" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "first.cpython-311.pyc").touch()
    before = snapshot(at.site)
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cache and allowed(path, mode))
    with pytest.raises(RefusedError, match="__pycache__"):
        action(at, kit.patches, kit.lock)
    assert snapshot(at.site) == before


@both
def test_stale_bytecode_goes_and_that_of_other_modules_stays(ready, kit, action):
    package = ready(action).package
    stale, other = (Path(py_compile.compile(str(package / name))) for name in ("srt/first.py", "srt/__init__.py"))
    optimised, neighbour = (stale.with_name(name) for name in ("first.cpython-39.opt-1.pyc", "firsts.cpython-39.pyc"))
    for path in (optimised, neighbour):
        path.touch()
    action(ready(apply), kit.patches, kit.lock)
    assert [path.exists() for path in (stale, optimised, other, neighbour)] == [False, False, True, True]


@both
@pytest.mark.parametrize(
    ("path", "data", "state"),
    [
        ("srt/first.py", b"mine\n", State.FOREIGN),
        ("srt/first.py", None, State.MISSING),
        ("srt/new/third.py", b"mine\n", State.FOREIGN),  # where the kit would make its own
    ],
)
def test_a_foreign_file_is_refused_by_name(ready, kit, action, path, data, state):
    environment = ready(action)
    file = environment.package / path
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)
    before = snapshot(environment.site)
    with pytest.raises(RefusedError, match=rf"{path} \({state.value}\)") as caught:
        action(environment, kit.patches, kit.lock)
    assert "sglang==0.5.9" in caught.value.next_step
    assert caught.value.exit_code is ExitCode.REFUSED
    assert snapshot(environment.site) == before
    assert overall(environment, kit) is state


def test_an_unsupported_release_may_be_reverted(environment, tmp_path, kit):
    other = install(write_wheel(tmp_path / "other", "0.5.99"), tmp_path / "other-site")
    assert revert(other, kit.patches, kit.lock).changed == ()
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    assert read_tree(environment, None).overall is State.OUTDATED
    revert(environment, kit.patches, replace(kit.lock, releases={}))
    assert snapshot(environment.site) == pristine


def test_patches_of_an_earlier_kit_are_replaced_and_reverted(environment, kit, other_kit):
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    direct = snapshot(environment.site)
    for action, expected in ((apply, direct), (revert, pristine)):
        revert(environment, kit.patches, kit.lock)
        apply(environment, other_kit.patches, other_kit.lock)
        assert overall(environment, other_kit) is State.PATCHED
        tree = read_tree(environment, kit.lock.find("0.5.9"))
        assert list(tree.files.values()) == [State.PRISTINE, State.OUTDATED, State.OUTDATED]
        assert action(environment, kit.patches, kit.lock).before is State.OUTDATED
        assert snapshot(environment.site) == expected


@both
@pytest.mark.parametrize("lost", ["manifest", "a patched file"])
def test_what_somebody_took_away_is_made_up_for(environment, kit, action, lost):
    pristine = snapshot(environment.site)
    apply(environment, kit.patches, kit.lock)
    expected = {apply: snapshot(environment.site), revert: pristine}
    if lost == "manifest":
        (environment.dist_info / MANIFEST_NAME).unlink()
    else:
        (environment.package / "srt/first.py").write_bytes(FILES["srt/first.py"])
    assert overall(environment, kit) is State.INTERRUPTED
    action(environment, kit.patches, kit.lock)
    assert snapshot(environment.site) == expected[action]


def test_bytes_that_nothing_can_bring_back_are_named(environment, kit, other_kit):
    apply(environment, kit.patches, kit.lock)
    manifest = environment.dist_info / MANIFEST_NAME
    document = json.loads(manifest.read_text())
    patched = document["files"]["srt/first.py"]["patched"]
    patched.update(dict.fromkeys(patched, ""))
    manifest.write_text(json.dumps(document))
    before = snapshot(environment.site)
    with pytest.raises(RefusedError, match=r"upstream's srt/first\.py is not in"):
        revert(environment, other_kit.patches, other_kit.lock)
    assert snapshot(environment.site) == before
    revert(environment, kit.patches, kit.lock)  # which has the patch to take back
    assert overall(environment, kit) is State.PRISTINE


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "install"), ("{}", "install"), ("[]", "install"), ('{"schema_version": 99}', "revert with that kit")],
)
def test_a_manifest_that_does_not_read_is_named(environment, kit, text, why):
    (environment.dist_info / MANIFEST_NAME).write_text(text)
    with pytest.raises(RefusedError, match=MANIFEST_NAME) as caught:
        apply(environment, kit.patches, kit.lock)
    assert why in caught.value.next_step
    assert "sglang==0.5.9" in caught.value.next_step


@both
def test_a_read_only_folder_is_named_and_nothing_changes(ready, kit, action):
    environment = ready(action)
    before = snapshot(environment.site)
    folder = environment.package / "srt/deep"
    message = f"cannot make files in {folder}: it is read-only"
    with mounted(folder, "bind,ro", folder), pytest.raises(RefusedError, match=message) as caught:
        action(environment, kit.patches, kit.lock)
    assert "make it writable" in caught.value.next_step
    assert snapshot(environment.site) == before


@both
def test_a_full_disk_is_named_and_nothing_changes(tmp_path, wheel, kit, ready, action):
    with mounted(tmp_path / "small", "size=256k") as small:
        environment = ready(action, install(wheel, small / "site"))
        before = snapshot(environment.site)
        fill(small)
        with pytest.raises(CrashkitError, match=f"no space left for new files in {small}.*nothing was changed"):
            action(environment, kit.patches, kit.lock)
        assert snapshot(environment.site) == before
        next(small.glob("filling-*")).unlink()
        action(environment, kit.patches, kit.lock)
        assert overall(environment, kit) is MEANT[action]


@both
def test_what_somebody_writes_meanwhile_is_not_lost(ready, kit, action):
    environment = ready(action)
    file = environment.package / "srt/first.py"

    def write(step: Step) -> None:
        if step.event == "os.rename" and step.paths[1].endswith(f"/{MANIFEST_NAME}"):
            file.write_text("theirs")

    def act() -> None:
        with pytest.raises(CrashkitError, match=rf"{file} was written by somebody else meanwhile"):
            action(environment, kit.patches, kit.lock)

    assert run_in_child(act, environment.site, write) == 0
    assert file.read_text() == "theirs"
    assert overall(environment, kit) is State.FOREIGN
    file.write_bytes(FILES["srt/first.py"])
    assert overall(environment, kit) is State.INTERRUPTED
    action(environment, kit.patches, kit.lock)
    assert overall(environment, kit) is MEANT[action]


@pytest.mark.parametrize("actions", [[apply] * 4, [revert] * 4, [apply, revert] * 3], ids=["apply", "revert", "both"])
def test_commands_at_once_take_their_turns(environment, kit, ready, actions):
    pristine = snapshot(environment.site)
    ready(actions[0])
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
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(actions)
    assert overall(environment, kit) in {MEANT[action] for action in actions}
    revert(environment, kit.patches, kit.lock)
    assert snapshot(environment.site) == pristine


def test_a_second_process_gets_an_error_unless_the_first_died(environment):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with exclusive(environment.dist_info):
            os.write(writer, b"held")
            signal.pause()
    assert os.read(reader, 4) == b"held"
    message = f"another sglang-crashkit is changing {environment.site}"
    with pytest.raises(CrashkitError, match=message), exclusive(environment.dist_info, wait=0):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with exclusive(environment.dist_info, wait=0):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_files_that_their_owner_could_not_read_any_more_are_refused(environment, kit):
    for path in [environment.site, *environment.site.rglob("*")]:
        path.chmod(0o770 if path.is_dir() else 0o640)
        os.chown(path, 1001, 2000)
    pristine = snapshot(environment.site)

    def change() -> None:
        os.setgroups([2000])
        os.setgid(1002)
        os.setuid(1002)
        with pytest.raises(RefusedError, match="user 1001 and group 2000"):
            apply(environment, kit.patches, kit.lock)

    for folder in environment.site.parents:
        if folder.stat().st_mode & 0o005 != 0o005 and folder != Path("/"):
            folder.chmod(0o755)
    assert run_in_child(change, environment.site, lambda _step: None) == 0
    assert snapshot(environment.site) == pristine
