"""Build a patched wheel from upstream's, and the kit's own wheel; a second build gives the same bytes.

A patched wheel differs from upstream's in the patched files and the metadata only: tags, compiled extensions and
permission bits stay. Its version has the local part ``+crashkit.VERSION``, which ``sglang==RELEASE`` still accepts.

Upstream's wheels are cached in ``$XDG_CACHE_HOME/sglang-crashkit/wheels``, by default below ``~/.cache``.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError, NothingToDoError, RefusedError
from sglang_crashkit.installer.environment import run_tool
from sglang_crashkit.installer.patches import Lock, PatchTree, find_patch_root, patch_files, sha256_hex
from sglang_crashkit.installer.record import format_row, read_rows
from sglang_crashkit.installer.status import APPLIED, BY_WHEEL, MANIFEST_NAME, Manifest, PatchedFile, hash_or_none

#: Most seconds for one download; the largest wheels are about 40 MB.
_DOWNLOAD_SECS = 900.0
_KIT = "sglang_crashkit"
_KIT_WHEEL = b"Wheel-Version: 1.0\nGenerator: sglang-crashkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_VERSION_LINE = re.compile(rb"^Version: (.*)$", re.MULTILINE)
#: The earliest time that a zip archive can hold, and the number for Unix in its ``create_system`` field.
_TIME, _UNIX = (1980, 1, 1, 0, 0, 0), 3


@dataclass(frozen=True)
class Member:
    """One file of an archive."""

    name: str
    data: bytes
    mode: int = 0o100644  # file type and permission bits, as in `os.stat_result.st_mode`


def release_of(wheel: Path) -> str:
    """Return the release of a `wheel` named like ``sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl``.

    Raises:
        RefusedError: it is not named like a wheel of SGLang as upstream builds it.
    """
    with suppress(InvalidWheelFilename):
        name, version, build, _tags = parse_wheel_filename(wheel.name)
        if name == "sglang" and not build and version.local is None:
            return str(version)
    raise RefusedError(f"{wheel} is not a wheel of SGLang as upstream built it")


def _fits(wheel: Path, python_tag: str | None) -> bool:
    """Say whether a python with `python_tag` can install the wheel; None stands for any python."""
    try:
        tags = parse_wheel_filename(wheel.name)[3]
    except InvalidWheelFilename:
        return False
    return python_tag is None or any(tag.interpreter in (python_tag, "py3") or tag.abi == "abi3" for tag in tags)


def cache_folder() -> Path:
    """Return the folder of the cached wheels, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-crashkit" / "wheels"


def check_wheel(wheel: Path, known: Mapping[str, str]) -> None:
    """Check `wheel` against the sha256 that `known` has for its name, if any; raises RefusedError where they differ."""
    if known.get(wheel.name) not in (None, sha256_hex(wheel.read_bytes())):
        raise RefusedError(
            f"{wheel} is not upstream's wheel: its sha256 is not the one in the lock", next_step=f"rm {wheel}"
        )


def find_wheel(release: str, known: Mapping[str, str], *, download: bool, python_tag: str | None = None) -> Path:
    """Return a wheel of `release`: one that `known` (file name → sha256, from the lock) names, else any in the cache.

    `python_tag`, such as ``cp311``, is that of a python that must be able to install the wheel. Where the cache has no
    such wheel, `download` has this python's pip fetch the one that fits this python.

    Raises:
        NothingToDoError: the cache has none and `download` is false.
        RefusedError: its sha256 is not the one in the lock.
        CrashkitError: the download failed.
    """
    all_cached = sorted(cache_folder().glob(f"sglang-{release}-*.whl"))
    cached = [wheel for wheel in all_cached if _fits(wheel, python_tag)]
    found = next((wheel for wheel in cached if wheel.name in known), cached[0] if cached else None)
    if found is None:
        if not download:
            suited = "" if python_tag is None else f" for {python_tag}"
            raise NothingToDoError(
                f"no wheel of SGLang {release}{suited} in {cache_folder()}",
                next_step=f"sglang-crashkit wheel {release} --out DIR --download",
            )
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", f"sglang=={release}"]
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            argv = [sys.executable, "-m", "pip", "download", "--dest", temporary, *options]
            run = run_tool(argv, timeout=_DOWNLOAD_SECS)
            wheels = list(Path(temporary).glob("*.whl"))
            if run.returncode or len(wheels) != 1:
                why = ["no wheel came", *run.stderr.strip().splitlines()][-1]
                raise CrashkitError(
                    f"{sys.executable} could not download sglang=={release}: {why}",
                    next_step=f"pip download --no-deps sglang=={release}, then sglang-crashkit wheel FILE --out DIR",
                )
            found = wheels[0].replace(folder / wheels[0].name)
    check_wheel(found, known)
    return found


def patched_version(release: str) -> str:
    """Return the version of the patched wheel of `release`: ``0.5.23+crashkit.1.0.0``."""
    return f"{release}+crashkit.{__version__}"


def install_command(folder: Path, release: str) -> str:
    """Return the shell command that installs the patched wheel of `release` from `folder`, and then shows the status.

    It names the whole version: an installed ``0.5.23`` satisfies ``sglang==0.5.23``, and pip would leave it there.
    """
    wanted = f"sglang=={patched_version(release)}"
    return f"pip install --find-links {shlex.quote(str(folder))} {wanted} && sglang-crashkit status"


def build_patched_wheel(wheel: Path, out: Path, patches: PatchTree, lock: Lock) -> Path:
    """Write the patched wheel of upstream's `wheel`, of any platform, into the folder `out` and return it.

    Raises:
        RefusedError: it is not a wheel of a supported release as upstream built it.
        OSError: a wheel cannot be read or written.
    """
    release = release_of(wheel)
    version = patched_version(release)
    locked = lock.require(release)
    check_wheel(wheel, locked.wheels)
    old_info, new_info = f"sglang-{release}.dist-info", f"sglang-{version}.dist-info"
    members = _read_members(wheel, old_info)
    pristine = {path: members[f"sglang/{path}"].data for path in locked.files if f"sglang/{path}" in members}
    for path, entry in locked.files.items():
        if hash_or_none(pristine.get(path)) != entry.pristine:
            raise RefusedError(f"{wheel}: {path} is not upstream's of {release}")
    patched = {f"sglang/{path}": data for path, data in patch_files(release, locked, patches, pristine).items()}
    result: list[Member] = []
    for member in members.values():
        data = patched.pop(member.name, member.data)
        folder, _slash, rest = member.name.partition("/")
        if folder == old_info and rest in ("RECORD", "RECORD.jws", "RECORD.p7s"):
            continue
        if folder == old_info and rest == "METADATA":
            lines = f"Version: {version}\nRequires-Dist: sglang-crashkit=={__version__}".encode()
            data, count = _VERSION_LINE.subn(lines, data, count=1)
            if not count:
                raise RefusedError(f"{wheel}: METADATA has no Version")
        result.append(Member(f"{new_info}/{rest}" if folder == old_info else member.name, data, member.mode))
    files = {path: PatchedFile(entry.pristine, {entry.patched: ""}) for path, entry in locked.files.items()}
    manifest = Manifest(APPLIED, BY_WHEEL, __version__, release, files)
    result += [Member(name, patched[name]) for name in sorted(patched)]
    result.append(Member(f"{new_info}/{MANIFEST_NAME}", manifest.dump()))
    target = out / wheel.name.replace(release, version, 1)
    _write_wheel(target, result, new_info, members[f"{old_info}/RECORD"].mode)
    return target


def build_kit_wheel(out: Path) -> Path:
    """Write the wheel of the running kit, installed or in a checkout, into the folder `out`, without a build backend.

    Raises RefusedError where the kit has no metadata, or metadata of another version, and OSError.
    """
    dist_info = f"{_KIT}-{__version__}.dist-info"
    package = Path(__file__).resolve().parents[1]
    try:
        distribution = importlib.metadata.distribution("sglang-crashkit")
        found = f"is that of {distribution.version}"
    except importlib.metadata.PackageNotFoundError:
        distribution, found = None, "is not installed"
    if distribution is None or distribution.version != __version__:
        raise RefusedError(
            f"the kit in {package} is {__version__}, but its metadata {found}",
            next_step="pip install the kit again, then run this again",
        )
    members = _files_below(package, _KIT, without="patches") + _files_below(find_patch_root(), f"{_KIT}/patches")
    for path in sorted(distribution.files or [], key=str):
        folder, *rest = path.parts
        # Files that the installer of the kit added are left out.
        if folder == dist_info and rest and rest[0] in ("METADATA", "entry_points.txt", "licenses"):
            members.append(Member("/".join(path.parts), Path(str(distribution.locate_file(path))).read_bytes()))
    members.append(Member(f"{dist_info}/WHEEL", _KIT_WHEEL))
    target = out / f"{_KIT}-{__version__}-py3-none-any.whl"
    _write_wheel(target, members, dist_info)
    return target


def _write_wheel(target: Path, members: list[Member], dist_info: str, record_mode: int = 0o100644) -> None:
    """Write `members` and their RECORD as the wheel `target`, replacing it in one step.

    The bytes depend on the members alone: their order, a fixed time and a fixed compression.
    """
    name = f"{dist_info}/RECORD"
    rows = [*(format_row(member.name, member.data) for member in members), format_row(name, None)]
    temporary = target.with_name(f".{target.name}.new")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for member in [*members, Member(name, "".join(rows).encode(), record_mode)]:
                info = zipfile.ZipInfo(member.name, date_time=_TIME)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.create_system = _UNIX
                info.external_attr = member.mode << 16
                archive.writestr(info, member.data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _read_members(wheel: Path, dist_info: str) -> dict[str, Member]:
    """Return the files of `wheel` by name; raises RefusedError where one differs from the wheel's own RECORD."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            modes = {info.filename: (info.external_attr >> 16) or 0o100644 for info in infos}
            members = {name: Member(name, archive.read(name), mode) for name, mode in modes.items()}
    except zipfile.BadZipFile as error:
        raise RefusedError(f"{wheel} does not read as a wheel: {error}") from error
    if f"{dist_info}/RECORD" not in members:
        raise RefusedError(f"{wheel} has no {dist_info}/RECORD")
    listed = dict(read_rows(members[f"{dist_info}/RECORD"].data, source=f"{wheel}: RECORD"))
    for member in members.values():
        hash_of = format_row("", member.data).split(",")[1]
        if not member.name.startswith(f"{dist_info}/RECORD") and hash_of not in listed.get(member.name, ""):
            raise RefusedError(f"{wheel} is damaged: {member.name} is not as its RECORD says")
    return members


def _files_below(folder: Path, prefix: str, *, without: str = "") -> list[Member]:
    members: list[Member] = []
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        compiled = "__pycache__" in parts or file.suffix == ".pyc"
        if not (file.is_dir() or compiled or parts[0] == without or file.name.startswith(".")):
            members.append(Member("/".join((prefix, *parts)), file.read_bytes()))
    return members
