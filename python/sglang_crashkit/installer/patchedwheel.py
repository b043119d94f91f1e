"""Build a patched wheel from upstream's, to install in its place.

Only the patched files and the metadata differ: tags, compiled extensions and permission bits are
kept. The version gets the local part ``+crashkit.VERSION``, which a requirement of
``sglang==RELEASE`` still accepts. Building twice gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import zipfile
from pathlib import Path

from sglang_crashkit import __version__
from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.hunks import apply_patch
from sglang_crashkit.installer.lockfile import Lock, LockedRelease, sha256_hex
from sglang_crashkit.installer.record import Record, format_row
from sglang_crashkit.installer.releases import local_label
from sglang_crashkit.installer.resolver import PatchDataError, PatchTree
from sglang_crashkit.installer.state import APPLIED, BY_WHEEL, STATE_NAME, PatchedFile, State
from sglang_crashkit.installer.wheelcache import WheelName, check_wheel
from sglang_crashkit.installer.ziparchive import Member, write_archive

_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_VERSION_LINE = re.compile(rb"^Version: (.*)$", re.MULTILINE)


def patched_version(release: str) -> str:
    """Return the version of the patched wheel of `release`: ``0.5.23+crashkit.0.1.0``."""
    return f"{release}+crashkit.{__version__}"


def install_command(folder: Path, release: str) -> str:
    """Return the shell command that installs the patched wheel of `release` from `folder`, and shows that it did.

    It names the whole version: what is installed as ``0.5.23`` satisfies ``sglang==0.5.23`` and would stay. The wheel
    requires the kit, which lies beside it; what upstream requires comes from the index where it is not installed.
    """
    wanted = f"sglang=={patched_version(release)}"
    return f"pip install --find-links {shlex.quote(str(folder))} {wanted} && sglang-crashkit status"


def build_patched_wheel(wheel: Path, out: Path, patches: PatchTree, lock: Lock) -> Path:
    """Write the patched wheel into the folder `out`.

    Args:
        wheel: upstream's wheel, of any platform.
        out: an existing folder.
        patches: the kit's patches.
        lock: what they give.

    Returns:
        The new wheel.

    Raises:
        RefusedError: it is not a wheel of a supported release as upstream built it.
        OSError: a wheel cannot be read or written.
    """
    name = WheelName.parse(wheel.name)
    if name.distribution != "sglang" or local_label(name.version):
        raise RefusedError(f"{wheel} is not a wheel of SGLang as upstream built it")
    locked = lock.require(name.version)
    check_wheel(wheel, locked.wheels)
    version = patched_version(name.version)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                Member(info.filename, archive.read(info), (info.external_attr >> 16) or 0o100644)
                for info in archive.infolist()
                if not info.is_dir()
            ]
    except zipfile.BadZipFile as error:
        raise RefusedError(f"{wheel} does not read as a wheel: {error}") from error
    dist_info = f"sglang-{name.version}.dist-info"
    _check_record(wheel, members, dist_info)
    patched = _patch_files(wheel, members, name.version, locked, patches)
    result = _rewrite(wheel, members, patched, dist_info, f"sglang-{version}.dist-info", version)
    marker = _marker(name.version, locked)
    result.append(Member(f"sglang-{version}.dist-info/{STATE_NAME}", marker))
    target = out / f"sglang-{version}-{name.tags}.whl"
    record_mode = next(member.mode for member in members if member.name == f"{dist_info}/RECORD")
    write_wheel(target, result, f"sglang-{version}.dist-info", record_mode)
    return target


def write_wheel(target: Path, members: list[Member], dist_info: str, record_mode: int = 0o100644) -> None:
    """Write `members` and their RECORD as the wheel `target`, replacing it in one step."""
    rows = "".join(format_row(member.name, member.data) for member in members)
    record_name = f"{dist_info}/RECORD"
    record = Member(record_name, (rows + format_row(record_name, None)).encode(), record_mode)
    temporary = target.with_name(f".{target.name}.new")
    try:
        write_archive(temporary, [*members, record])
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _check_record(wheel: Path, members: list[Member], dist_info: str) -> None:
    """Check every member against the wheel's own RECORD."""
    data = next((member.data for member in members if member.name == f"{dist_info}/RECORD"), None)
    if data is None:
        raise RefusedError(f"{wheel} has no {dist_info}/RECORD")
    record = Record.parse(data, source=f"{wheel}: RECORD")
    listed = {row.path: row.raw for row in record.rows}
    for member in members:
        if member.name.startswith(f"{dist_info}/RECORD"):
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(member.data).digest()).rstrip(b"=")
        if f"sha256={digest.decode()}" not in listed.get(member.name, ""):
            raise RefusedError(f"{wheel} is damaged: {member.name} is not as its RECORD says")


def _patch_files(
    wheel: Path,
    members: list[Member],
    release: str,
    locked: LockedRelease,
    patches: PatchTree,
) -> dict[str, bytes]:
    """Return the name and bytes of each patched member, the new ones included."""
    contents = {member.name: member.data for member in members}
    refs = patches.resolve(release)
    patched: dict[str, bytes] = {}
    for path, entry in locked.files.items():
        pristine = contents.get(f"sglang/{path}")
        if (None if pristine is None else sha256_hex(pristine)) != entry.pristine:
            raise RefusedError(f"{wheel}: {path} is not upstream's of {release}")
        data = apply_patch(pristine, refs[path].read())
        if sha256_hex(data) != entry.patched:
            raise PatchDataError(f"{entry.patch} does not give {path} the sha256 in the lock")
        patched[f"sglang/{path}"] = data
    return patched


def _rewrite(
    wheel: Path,
    members: list[Member],
    patched: dict[str, bytes],
    old_dist_info: str,
    new_dist_info: str,
    version: str,
) -> list[Member]:
    """Return the members in their order, patched and renamed, without RECORD."""
    result: list[Member] = []
    for member in members:
        name, data = member.name, patched.get(member.name, member.data)
        if name.startswith(f"{old_dist_info}/"):
            rest = name.removeprefix(f"{old_dist_info}/")
            if rest == "RECORD" or rest in _SIGNATURES:
                continue
            if rest == "METADATA":
                data = _rewrite_metadata(wheel, data, version)
            name = f"{new_dist_info}/{rest}"
        result.append(Member(name, data, member.mode))
    present = {member.name for member in members}
    return [*result, *(Member(name, patched[name]) for name in sorted(patched.keys() - present))]


def _rewrite_metadata(wheel: Path, data: bytes, version: str) -> bytes:
    """Return METADATA with another version and one more requirement."""
    match = _VERSION_LINE.search(data)
    if match is None:
        raise RefusedError(f"{wheel}: METADATA has no Version")
    lines = f"Version: {version}\nRequires-Dist: sglang-crashkit=={__version__}".encode()
    return data[: match.start()] + lines + data[match.end() :]


def _marker(release: str, locked: LockedRelease) -> bytes:
    """Return the state file by which `status` knows an installation of the wheel."""
    files = {path: PatchedFile(file.pristine, file.patched) for path, file in locked.files.items()}
    return State(APPLIED, BY_WHEEL, __version__, release, files, record_rows={}).dump()
