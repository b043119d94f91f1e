"""A patched platform wheel: the same bytes twice, installable, and run as patched."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from sglang_crashkit import __version__
from sglang_crashkit.installer.environment import find_environment
from sglang_crashkit.installer.patches import sha256_hex
from sglang_crashkit.installer.record import format_row

pytestmark = pytest.mark.wheels

#: The smallest of the wheels with compiled extensions.
RELEASE = "0.5.11"


def run(*argv: object, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in argv], check=False, capture_output=True, text=True, timeout=240, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory, wheels) -> list[Path]:
    """Two folders, each from a build of its own."""
    folders = [tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")]
    commands = [
        [sys.executable, "-m", "sglang_crashkit", "wheel", str(wheels[RELEASE]), "--out", str(folder)]
        for folder in folders
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait(120) for process in processes] == [0, 0]
    return folders


def patched_wheel(folder: Path) -> Path:
    return next(folder.glob("sglang-*.whl"))


@pytest.mark.wide
def test_a_second_build_gives_the_same_bytes(built):
    names = [sorted(path.name for path in folder.iterdir()) for folder in built]
    assert names[0] == names[1]
    assert names[0][0].startswith(f"sglang-{RELEASE}+crashkit.{__version__}-cp311-")
    assert names[0][1] == f"sglang_crashkit-{__version__}-py3-none-any.whl"
    for name in names[0]:
        digests = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in built]
        assert digests[0] == digests[1], name


def test_only_the_patched_files_and_the_metadata_differ_from_upstreams(built, wheels, lock):
    old_info, new_info = f"sglang-{RELEASE}.dist-info/", f"sglang-{RELEASE}+crashkit.{__version__}.dist-info/"
    with zipfile.ZipFile(wheels[RELEASE]) as old, zipfile.ZipFile(patched_wheel(built[0])) as new:
        before = {info.filename.replace(old_info, new_info): info for info in old.infolist() if not info.is_dir()}
        after = {info.filename: info for info in new.infolist()}
        changed = {name for name, info in before.items() if name in after and after[name].CRC != info.CRC}
        assert before.keys() - after.keys() == set()
        locked_files = lock.releases[RELEASE].files.items()
        created = {f"sglang/{path}" for path, locked in locked_files if locked.pristine is None}
        assert after.keys() - before.keys() == {f"{new_info}sglang-crashkit.json", *created}
        files = {f"sglang/{path}" for path, _locked in locked_files}
        assert changed == {*(files - created), f"{new_info}METADATA", f"{new_info}RECORD"}
        assert any(name.endswith(".so") for name in after)
        for name, info in before.items():
            assert after[name].external_attr >> 16 == (info.external_attr >> 16 or 0o100644), name
        for path, locked in lock.releases[RELEASE].files.items():
            assert sha256_hex(new.read(f"sglang/{path}")) == locked.patched


def _needing_wheel(folder: Path) -> None:
    """Write a wheel whose one content is the requirement of exactly this release."""
    info = "needs_sglang-1.0.dist-info"
    members = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: needs-sglang\nVersion: 1.0\n"
        f"Requires-Dist: sglang=={RELEASE}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(format_row(name, text.encode()) for name, text in members.items())
    with zipfile.ZipFile(folder / "needs_sglang-1.0-py3-none-any.whl", "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)


@pytest.mark.wide
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the wheel in the lock is for Python 3.11")
def test_pip_installs_it_without_an_index_for_exactly_this_release(built, tmp_path):
    folder = built[1]
    _needing_wheel(folder)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--isolated"]
    from_folder = ["--no-index", "--find-links", folder]
    run(
        *pip,
        "install",
        "--no-compile",
        "--no-deps",
        *from_folder,
        f"sglang=={RELEASE}",
        "sglang-crashkit",
        "needs-sglang",
        env=clean,
    )
    problems = subprocess.run(
        [*map(str, pip), "check"], check=False, capture_output=True, text=True, timeout=60, env=clean
    ).stdout.splitlines()
    # torch and the rest are left out on purpose; that sglang itself is met is what counts.
    assert [line for line in problems if " requires sglang==" in line or "needs-sglang" in line] == []

    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    # What the kit needs (psutil and so on) comes from the environment that runs the tests.
    (site / "borrowed.pth").write_text(str(Path(psutil.__file__).parents[1]) + "\n")
    environment = find_environment(str(python))
    assert environment.version == f"{RELEASE}+crashkit.{__version__}"
    tool = tmp_path / "venv" / "bin" / "sglang-crashkit"
    status = json.loads(run(tool, "status", "--json", env=clean).stdout)
    assert (status["state"], status["patched_by"], status["next"]) == ("patched", "wheel", None)
    assert "already patched" in run(tool, "apply", env=clean).stdout
    refused = subprocess.run([tool, "revert"], check=False, capture_output=True, text=True, timeout=60, env=clean)
    assert refused.returncode == 4
    assert f"--force-reinstall --no-deps sglang=={RELEASE}" in refused.stderr

    run(*pip, "uninstall", "--yes", "sglang", env=clean)
    assert not environment.package.exists()
    assert not environment.dist_info.exists()
