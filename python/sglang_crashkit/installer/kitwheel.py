"""Assemble the kit's own wheel from the kit that runs, installed or in a checkout.

No build backend is needed. Building twice gives the same bytes.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from sglang_crashkit import __version__
from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.patchedwheel import write_wheel
from sglang_crashkit.installer.resolver import find_patch_root
from sglang_crashkit.installer.ziparchive import Member

_PACKAGE = "sglang_crashkit"
_WHEEL = b"Wheel-Version: 1.0\nGenerator: sglang-crashkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_kit_wheel(out: Path) -> Path:
    """Write the kit's wheel into the folder `out` and return it.

    Raises:
        RefusedError: the kit has no metadata, or that of another version.
        OSError: a file cannot be read or written.
    """
    dist_info = f"{_PACKAGE}-{__version__}.dist-info"
    package = Path(__file__).resolve().parents[1]
    members = [
        *_files_below(package, _PACKAGE, without="patches"),
        *_files_below(find_patch_root(), f"{_PACKAGE}/patches"),
        *_metadata(dist_info, package),
        Member(f"{dist_info}/WHEEL", _WHEEL),
    ]
    target = out / f"{_PACKAGE}-{__version__}-py3-none-any.whl"
    write_wheel(target, members, dist_info)
    return target


def _files_below(folder: Path, prefix: str, *, without: str = "") -> list[Member]:
    members: list[Member] = []
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        compiled = "__pycache__" in parts or file.suffix == ".pyc"
        if file.is_dir() or compiled or parts[0] == without or file.name.startswith("."):
            continue
        members.append(Member("/".join((prefix, *parts)), file.read_bytes()))
    return members


def _metadata(dist_info: str, package: Path) -> list[Member]:
    """Return the metadata of the installed kit, without what its installer added."""
    try:
        distribution = importlib.metadata.distribution("sglang-crashkit")
    except importlib.metadata.PackageNotFoundError:
        found = None
    else:
        found = distribution.version
    if found != __version__:
        raise RefusedError(
            f"the kit in {package} is {__version__}, but its metadata "
            + ("is not installed" if found is None else f"is that of {found}"),
            next_step="pip install the kit again, then run this again",
        )
    members = []
    for path in sorted(distribution.files or [], key=str):
        parts = path.parts
        wanted = len(parts) > 1 and (parts[1] in ("METADATA", "entry_points.txt") or parts[1] == "licenses")
        if parts[0] == dist_info and wanted:
            data = Path(str(distribution.locate_file(path))).read_bytes()
            members.append(Member("/".join(parts), data))
    return members
