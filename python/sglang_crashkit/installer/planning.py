"""Decide what `apply` and `revert` do to an installation; pure but for reading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from sglang_crashkit import __version__
from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.files import read_or_none
from sglang_crashkit.installer.hunks import apply_patch
from sglang_crashkit.installer.lockfile import LockedRelease, sha256_hex
from sglang_crashkit.installer.record import Record
from sglang_crashkit.installer.resolver import PatchDataError, PatchTree
from sglang_crashkit.installer.state import (
    APPLIED,
    APPLYING,
    BACKUP_FOLDER,
    BY_COMMAND,
    REVERTING,
    STATE_NAME,
    PatchedFile,
    State,
)
from sglang_crashkit.installer.transaction import Change, Plan
from sglang_crashkit.installer.tree import FileState, Tree


def refuse_foreign(tree: Tree) -> None:
    """Check that every file is upstream's or the kit's.

    Raises:
        RefusedError: one is not; the message names all of them.
    """
    wrong = [path for path, state in tree.files.items() if state in (FileState.FOREIGN, FileState.MISSING)]
    if wrong:
        named = ", ".join(f"{path} ({tree.files[path].value})" for path in wrong)
        raise RefusedError(
            f"neither upstream's nor the kit's in {tree.environment.package}: {named}",
            next_step=f"keep your edit elsewhere, then {tree.environment.reinstall}",
        )


def plan_apply(tree: Tree, locked: LockedRelease, patches: PatchTree) -> Plan:
    """Return the plan that patches `tree`, from whatever state it is in.

    Raises:
        RefusedError: a file is foreign, or its pristine bytes are lost.
        PatchDataError: a patch does not give what the lock says.
    """
    refuse_foreign(tree)
    environment, dist_info = tree.environment, tree.environment.dist_info
    refs = patches.resolve(environment.release)
    pristine = {path: _pristine(tree, path, patches) for path in tree.files}
    patched = dict(pristine)
    for path, entry in locked.files.items():
        if path not in refs or refs[path].name != entry.patch:
            raise PatchDataError(f"the lock names {entry.patch} for {path}, the patches do not")
        data = apply_patch(pristine[path], refs[path].read())
        if sha256_hex(data) != entry.patched:
            raise PatchDataError(f"{entry.patch} does not give {path} the sha256 in the lock")
        patched[path] = data
    files = {
        path: PatchedFile(_sha256(pristine[path]), _sha256(patched[path]), was=_sha256(tree.contents[path]))
        for path in tree.files
    }
    backups = {
        dist_info / BACKUP_FOLDER / path: data
        for path, data in pristine.items()
        if data is not None and path in locked.files
    }
    rows, record = _patched_record(tree, {path: patched[path] for path in locked.files}, pristine, backups, patches)
    during = State(
        phase=APPLYING,
        by=BY_COMMAND,
        kit_version=__version__,
        release=environment.release,
        files=files,
        # Until RECORD is rewritten it may hold rows of an earlier kit that this one does not touch.
        record_rows=(pristine_rows(tree, patches) if record else {}) | rows,
        folders=_new_folders(tree, patched),
    )
    kept = {path: replace(files[path], was=None) for path in locked.files}
    final = replace(during, phase=APPLIED, files=kept, record_rows=rows)
    return Plan(
        changes=(*record, *_changes(tree, patched)),
        touched=_touched(tree),
        state_file=dist_info / STATE_NAME,
        during=during.dump(),
        final=final.dump(),
        backups={path: data for path, data in backups.items() if read_or_none(path) != data},
        obsolete=tuple(file for file in _backup_files(dist_info) if file not in backups),
        obsolete_folders=_folders_to_clear(tree),
    )


def plan_revert(tree: Tree, patches: PatchTree) -> Plan:
    """Return the plan that gives `tree` upstream's bytes back.

    Raises:
        RefusedError: a file is foreign, or its pristine bytes are lost.
    """
    refuse_foreign(tree)
    environment, dist_info = tree.environment, tree.environment.dist_info
    pristine = {path: _pristine(tree, path, patches) for path in tree.files}
    rows = pristine_rows(tree, patches)
    during = State(
        phase=REVERTING,
        by=BY_COMMAND,
        kit_version=__version__,
        release=environment.release,
        files={path: PatchedFile(_sha256(data), _sha256(tree.contents[path])) for path, data in pristine.items()},
        record_rows=rows,
        folders=tree.state.folders if tree.state else (),
    )
    record = _read_record(tree)
    restored = record.with_rows(rows) if record else None
    # RECORD goes last: until then it still lists the files of the kit that are there.
    return Plan(
        changes=(*_changes(tree, pristine), *_record_change(tree, record, restored)),
        touched=_touched(tree),
        state_file=dist_info / STATE_NAME,
        during=during.dump(),
        final=None,
        obsolete=tuple(_backup_files(dist_info)),
        obsolete_folders=_folders_to_clear(tree),
    )


def pristine_rows(tree: Tree, patches: PatchTree) -> dict[str, str | None]:
    """Return the rows that RECORD had before the kit, None for those it did not have.

    They are in the state file; where that is gone, they are formatted anew from upstream's bytes.
    """
    if tree.state is not None:
        return dict(tree.state.record_rows)
    record = _read_record(tree)
    if record is None:
        return {}
    rows: dict[str, str | None] = {}
    ours = f"{tree.environment.dist_info.name}/{BACKUP_FOLDER}/"
    state_row = f"{tree.environment.dist_info.name}/{STATE_NAME}"
    for row in record.rows:
        if row.path.startswith(ours) or row.path == state_row:
            rows[row.path] = None
    for path, state in tree.files.items():
        name = f"sglang/{path}"
        if state is not FileState.PRISTINE and record.find(name) is not None:
            data = _pristine(tree, path, patches)
            rows[name] = None if data is None else record.format_row(name, data)
    return rows


def _patched_record(
    tree: Tree,
    patched: dict[str, bytes | None],
    pristine: dict[str, bytes | None],
    backups: dict[Path, bytes],
    patches: PatchTree,
) -> tuple[dict[str, str | None], tuple[Change, ...]]:
    """Return RECORD's rows before the kit, and the change of RECORD, if there is one."""
    record = _read_record(tree)
    if record is None:
        return {}, ()
    base = record.with_rows(pristine_rows(tree, patches))
    site = tree.environment.site
    rows: dict[str, str | None] = {}
    for path, data in patched.items():
        name = f"sglang/{path}"
        listed = base.find(name) is not None
        if data is not None and (listed or pristine[path] is None):
            rows[name] = base.format_row(name, data)
    for file, data in backups.items():
        name = file.relative_to(site).as_posix()
        rows[name] = base.format_row(name, data)
    state_name = (tree.environment.dist_info / STATE_NAME).relative_to(site).as_posix()
    rows[state_name] = base.format_row(state_name, None)
    before = {name: base.find(name) for name in rows}
    return before, _record_change(tree, record, base.with_rows(rows))


def _record_change(tree: Tree, record: Record | None, wanted: Record | None) -> tuple[Change, ...]:
    if record is None or wanted is None or record == wanted:
        return ()
    path = tree.environment.dist_info / "RECORD"
    return (Change(path, record.to_bytes(), wanted.to_bytes()),)


def _read_record(tree: Tree) -> Record | None:
    path = tree.environment.dist_info / "RECORD"
    data = read_or_none(path)
    return None if data is None else Record.parse(data, source=str(path))


def _changes(tree: Tree, wanted: dict[str, bytes | None]) -> list[Change]:
    package = tree.environment.package
    return [
        Change(package / path, tree.contents[path], data)
        for path, data in wanted.items()
        if tree.contents[path] != data
    ]


def _pristine(tree: Tree, path: str, patches: PatchTree) -> bytes | None:
    try:
        return tree.pristine_bytes(path, patches)
    except KeyError:
        raise RefusedError(
            f"upstream's {path} is nowhere in {tree.environment.site}: the copy that the kit kept "
            "is gone or was changed",
            next_step=tree.environment.reinstall,
        ) from None


def _sha256(data: bytes | None) -> str | None:
    return None if data is None else sha256_hex(data)


def _new_folders(tree: Tree, patched: dict[str, bytes | None]) -> tuple[str, ...]:
    """Return the folders that the new files need or already got, outermost first."""
    known = list(tree.state.folders) if tree.state else []
    for path, data in patched.items():
        for parent in reversed(PurePosixPath(path).parents):
            name = str(parent)
            missing = not (tree.environment.package / name).is_dir()
            if data is not None and missing and name not in known:
                known.append(name)
    return tuple(known)


def _touched(tree: Tree) -> tuple[Path, ...]:
    record = tree.environment.dist_info / "RECORD"
    return (record, *(tree.environment.package / path for path in tree.files))


def _backup_files(dist_info: Path) -> list[Path]:
    return sorted(file for file in (dist_info / BACKUP_FOLDER).rglob("*") if not file.is_dir())


def _folders_to_clear(tree: Tree) -> tuple[Path, ...]:
    """Return the kit's own folders, innermost first."""
    backups = tree.environment.dist_info / BACKUP_FOLDER
    inner = [folder for folder in backups.rglob("*") if folder.is_dir()] if backups.is_dir() else []
    made = [tree.environment.package / name for name in (tree.state.folders if tree.state else ())]
    # Python leaves a folder of its own beside modules that it compiled.
    folders = [backups, *inner, *made, *(folder / "__pycache__" for folder in made)]
    return tuple(sorted(folders, key=lambda folder: len(folder.parts), reverse=True))
