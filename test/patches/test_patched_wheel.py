"""A patched platform wheel: upstream's but for the patches, installable, and run as patched."""

from __future__ import annotations

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


def run(*argv: object, status: int | None = 0, **options) -> subprocess.CompletedProcess[str]:
    """Run a program, which is to end with this status, or any."""
    words = [str(part) for part in argv]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=240, **options)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory, wheels) -> Path:
    """A folder with both wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "sglang_crashkit", "wheel", wheels[RELEASE], "--out", folder)
    return folder


def test_only_the_patched_files_and_the_metadata_differ_from_upstreams(built, wheels, lock):
    patched, kit = sorted(built.iterdir())
    assert patched.name.startswith(f"sglang-{RELEASE}+crashkit.{__version__}-cp311-")
    assert kit.name == f"sglang_crashkit-{__version__}-py3-none-any.whl"
    old_info, new_info = f"sglang-{RELEASE}.dist-info/", f"sglang-{RELEASE}+crashkit.{__version__}.dist-info/"
    with zipfile.ZipFile(wheels[RELEASE]) as old, zipfile.ZipFile(patched) as new:
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
    _needing_wheel(built)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--isolated"]
    options = ["--no-compile", "--no-deps", "--no-index", "--find-links", built]
    run(*pip, "install", *options, f"sglang=={RELEASE}", "sglang-crashkit", "needs-sglang", env=clean)
    problems = run(*pip, "check", status=None, env=clean).stdout.splitlines()
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
    refused = run(tool, "revert", status=4, env=clean)
    assert f"--force-reinstall --no-deps sglang=={RELEASE}" in refused.stderr

    run(*pip, "uninstall", "--yes", "sglang", env=clean)
    assert not environment.package.exists()
    assert not environment.dist_info.exists()
