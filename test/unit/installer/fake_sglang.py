"""A small SGLang: real files, a real wheel, real patches, and a site folder to install it into."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from lanelib.porting import generate_lock
from sglang_crashkit import __version__
from sglang_crashkit.installer.environment import Environment, Kit
from sglang_crashkit.installer.patches import LOCK_NAME, Lock, PatchTree
from sglang_crashkit.installer.record import format_row
from sglang_crashkit.installer.status import State, read_tree

RELEASE = "0.5.9"

FILES = {
    "__init__.py": b"",
    "srt/__init__.py": b"",
    "srt/first.py": b"import os\n\n\ndef run():\n    return os.getpid()\n",
    "srt/deep/__init__.py": b"",
    "srt/deep/second.py": b'VALUE = "one"\nOTHER = "two"',  # no newline at its end
}

HEADER = "Subject: a subject\nReason: a reason\nCalls: {calls}\nForwarded: no\nDrop-when: never\n\n"

#: Baseline → path → text of the diff.
PATCHES = {
    "0.5.9": {
        "srt/first.py": "--- a/srt/first.py\n+++ b/srt/first.py\n@@ -1,1 +1,2 @@\n import os\n"
        "+from sglang_crashkit.errors import ExitCode\n@@ -4,1 +5,2 @@\n def run():\n+    ExitCode()\n",
        "srt/deep/second.py": "--- a/srt/deep/second.py\n+++ b/srt/deep/second.py\n@@ -1,2 +1,2 @@\n"
        '-VALUE = "one"\n+VALUE = "1"\n OTHER = "two"\n\\ No newline at end of file\n',
        "srt/new/third.py": "--- /dev/null\n+++ b/srt/new/third.py\n@@ -0,0 +1,1 @@\n+THIRD = 3\n",
    }
}

#: Those of another kit: one file fewer, one other text.
OTHER_PATCHES = {
    "0.5.9": {
        "srt/first.py": "--- a/srt/first.py\n+++ b/srt/first.py\n@@ -1,1 +1,2 @@\n import os\n+import sys\n",
        "srt/new/third.py": "--- /dev/null\n+++ b/srt/new/third.py\n@@ -0,0 +1,1 @@\n+THIRD = 333\n",
    }
}

METADATA = b"Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9\nRequires-Dist: torch\n\nText.\nVersion: of the text\n"


@dataclass(frozen=True)
class FakeKit:
    """Patches and the lock that goes with them."""

    patches: PatchTree
    lock: Lock


def write_patches(root: Path, texts: dict[str, dict[str, str]]) -> None:
    for baseline, files in texts.items():
        for path, text in files.items():
            file = root / baseline / f"{path}.patch"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(HEADER.format(calls="sglang_crashkit.errors.ExitCode") + text)


def write_wheel(
    folder: Path, release: str = RELEASE, files: dict[str, bytes] = FILES, tags: str = "py3-none-any"
) -> Path:
    """Write a wheel of a small SGLang; ``tool.so`` in it is executable."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"sglang-{release}-{tags}.whl"
    dist_info = f"sglang-{release}.dist-info"
    members = {f"sglang/{path}": data for path, data in files.items()}
    members["sglang/tool.so"] = b"\x7fELF" + bytes(range(256))
    members[f"{dist_info}/METADATA"] = METADATA.replace(b"0.5.9", release.encode())
    members[f"{dist_info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n".encode()
    rows = "".join(format_row(name, data) for name, data in members.items())
    members[f"{dist_info}/RECORD"] = (rows + f"{dist_info}/RECORD,,\n").encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, date_time=(2025, 1, 2, 3, 4, 6))
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(info, data)
    return wheel


def make_kit(root: Path, wheel: Path, texts: dict[str, dict[str, str]] = PATCHES) -> FakeKit:
    """Write patches and their lock below `root`."""
    write_patches(root, texts)
    tree = PatchTree.load(root)
    lock = generate_lock(tree, {RELEASE: wheel})
    (root / LOCK_NAME).write_bytes(lock.dump())
    return FakeKit(tree, lock)


def install(wheel: Path, site: Path) -> Environment:
    """Unpack `wheel` into `site`, as an installer would."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    version = wheel.name.split("-")[1]
    kit = Kit(__version__, Path("/nowhere"), {})
    dist_info = site / f"sglang-{version}.dist-info"
    return Environment(Path(sys.executable), version, site / "sglang", dist_info, kit)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file and folder below `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = b"folder" if path.is_dir() else path.read_bytes()
    return found


def overall(environment: Environment, kit: FakeKit) -> State:
    """Return the state of the installed SGLang."""
    return read_tree(environment, kit.lock.find(environment.version)).overall
