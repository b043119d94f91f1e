from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lanelib.paths import ROOT
from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError, NothingToDoError, RefusedError
from sglang_crashkit.installer.apply import apply, revert
from sglang_crashkit.installer.patches import sha256_hex
from sglang_crashkit.installer.record import format_row, read_rows
from sglang_crashkit.installer.status import State, read_tree
from sglang_crashkit.installer.wheel import (
    build_kit_wheel,
    build_patched_wheel,
    find_wheel,
    install_command,
)
from unit.installer.fake_sglang import FILES, install, write_wheel
from unit.support.targets import make_tool

VERSION = f"0.5.9+crashkit.{__version__}"
INFO = f"sglang-{VERSION}.dist-info"


@pytest.fixture
def built(tmp_path, wheel, kit):
    (tmp_path / "built wheels").mkdir()
    return build_patched_wheel(wheel, tmp_path / "built wheels", kit.patches, kit.lock)


def test_the_wheel_is_a_reproducible_local_version_of_the_release(built, wheel, kit, tmp_path):
    assert built.name == f"sglang-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(built) as new, zipfile.ZipFile(wheel) as old:
        head, _, text = new.read(f"{INFO}/METADATA").decode().partition("\n\n")
        assert f"Version: {VERSION}\nRequires-Dist: sglang-crashkit=={__version__}\n" in head
        assert "Requires-Dist: torch" in head
        assert text == "Text.\nVersion: of the text\n"
        assert new.read(f"{INFO}/WHEEL").endswith(b"Tag: py3-none-any\n")
        assert new.getinfo("sglang/tool.so").external_attr >> 16 == 0o100755
        assert new.read("sglang/tool.so") == old.read("sglang/tool.so")
        assert new.read("sglang/srt/new/third.py") == b"THIRD = 3\n"
        names = new.namelist()
        rows = read_rows(new.read(f"{INFO}/RECORD"), source="RECORD")
        expected = [(name, format_row(name, new.read(name))) for name in names[:-1]]
        assert rows == [*expected, (names[-1], f"{INFO}/RECORD,,\n")]
    again, elsewhere = tmp_path / "again", write_wheel(tmp_path, tags="cp312-cp312-linux_x86_64")
    again.mkdir()
    assert build_patched_wheel(wheel, again, kit.patches, kit.lock).read_bytes() == built.read_bytes()
    # One that the lock does not list is built from its files.
    other = build_patched_wheel(elsewhere, again, kit.patches, kit.lock)
    assert other.name == f"sglang-{VERSION}-cp312-cp312-linux_x86_64.whl"


def test_an_installation_of_it_is_patched_and_tells_how_back(built, kit, other_kit, tmp_path):
    environment = install(built, tmp_path / "patched-site")
    tree = read_tree(environment, kit.lock.find(environment.version))
    assert (tree.overall, tree.by_wheel) == (State.PATCHED, True)
    assert apply(environment, kit.patches, kit.lock).changed == ()
    with pytest.raises(RefusedError, match="came patched, from a wheel that the kit built") as caught:
        revert(environment, kit.patches, kit.lock)
    assert caught.value.next_step.endswith("install --force-reinstall --no-deps sglang==0.5.9")
    with pytest.raises(RefusedError, match="from a wheel that another kit built") as caught:
        apply(environment, other_kit.patches, other_kit.lock)
    assert "sglang-crashkit wheel 0.5.9" in caught.value.next_step


def test_what_is_no_supported_upstream_wheel_is_refused(tmp_path, kit, wheel, built):
    mine = FILES | {"srt/first.py": b"mine\n"}
    damaged, torn = (tmp_path / f"sglang-0.5.9-py3-none-{name}.whl" for name in ("linux_x86_64", "win32"))
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"other" if name.endswith("tool.so") else old.read(name))
    torn.write_bytes(b"PK")
    for path, why in {
        write_wheel(tmp_path / "changed", files=mine): "its sha256 is not the one in the lock",
        # Of a platform that the lock does not list: its files decide.
        write_wheel(
            tmp_path, files=mine, tags="cp312-cp312-linux_x86_64"
        ): r"srt/first\.py is not upstream's of 0\.5\.9",
        built: "is not a wheel of SGLang as upstream built it",
        damaged: r"tool\.so is not as its RECORD says",
        torn: "does not read as a wheel",
        write_wheel(tmp_path, "0.5.99"): "is not supported",
    }.items():
        with pytest.raises(RefusedError, match=why):
            build_patched_wheel(path, tmp_path, kit.patches, kit.lock)


@pytest.mark.wide
def test_the_kit_builds_the_same_wheel_from_its_own(tmp_path):
    (tmp_path / "again").mkdir()
    wheel = build_kit_wheel(tmp_path)
    assert wheel.name == f"sglang_crashkit-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = archive.namelist()
        info = f"sglang_crashkit-{__version__}.dist-info"
        assert {"sglang_crashkit/patches/releases.lock.json", "sglang_crashkit/py.typed"} <= set(names)
        assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
        assert b"sglang-crashkit = sglang_crashkit.cli.main:main" in archive.read(f"{info}/entry_points.txt")
        assert f"\nVersion: {__version__}\n".encode() in archive.read(f"{info}/METADATA")
        assert [path for path, _row in read_rows(archive.read(f"{info}/RECORD"), source="RECORD")] == names
    text = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from sglang_crashkit.installer.wheel import build_kit_wheel\n"
        "print(build_kit_wheel(Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", text, str(tmp_path / "site"), str(tmp_path / "again")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == wheel.read_bytes()


def test_the_documents_give_the_command_that_is_printed() -> None:
    assert f"\n{install_command(Path('wheels'), '0.5.23')}\n" in (ROOT / "docs" / "install.md").read_text()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang-crashkit" / "wheels"


def test_a_cached_wheel_is_checked_against_the_lock(cache):
    write_wheel(cache, tags="cp310-cp310-linux_x86_64")
    write_wheel(cache, "0.5.8.post1")
    wheel = write_wheel(cache, tags="cp311-cp311-linux_x86_64")
    assert find_wheel("0.5.9", {wheel.name: sha256_hex(wheel.read_bytes())}, download=False) == wheel
    with pytest.raises(RefusedError, match="its sha256 is not the one in the lock") as caught:
        find_wheel("0.5.9", {wheel.name: "0" * 64}, download=False)
    assert caught.value.next_step == f"rm {wheel}"
    with pytest.raises(NothingToDoError, match=r"no wheel of SGLang 0\.5\.8 in") as caught:
        find_wheel("0.5.8", {}, download=False)
    assert "--download" in caught.value.next_step


def test_pip_is_asked_for_a_wheel_and_its_error_is_told(cache, tmp_path, monkeypatch):
    made = write_wheel(tmp_path / "registry", tags="cp311-cp311-manylinux_2_34_x86_64")
    script = f'echo "$@" > {tmp_path}/arguments\nwhile [ "$1" != --dest ]; do shift; done\ncp {made} "$2"'
    monkeypatch.setattr(sys, "executable", make_tool(tmp_path, script, "python"))
    known = {made.name: sha256_hex(made.read_bytes())}
    assert find_wheel("0.5.9", known, download=True) == cache / made.name
    assert [path.name for path in cache.iterdir()] == [made.name]
    assert "--no-deps --only-binary=:all: sglang==0.5.9\n" in (tmp_path / "arguments").read_text()
    failing = make_tool(tmp_path, 'echo "ERROR: no matching distribution" >&2\nexit 1', "python")
    monkeypatch.setattr(sys, "executable", failing)
    with pytest.raises(CrashkitError, match=r"could not download sglang==0\.5\.8: ERROR: no matching"):
        find_wheel("0.5.8", {}, download=True)
    assert [path.name for path in cache.iterdir()] == [made.name]
