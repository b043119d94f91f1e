import sys

import pytest

from sglang_crashkit.errors import CrashkitError, NothingToDoError, RefusedError
from sglang_crashkit.installer import wheelcache
from sglang_crashkit.installer.lockfile import sha256_hex
from sglang_crashkit.installer.wheelcache import WheelName, cache_folder, find_wheel
from unit.installer.fake_sglang import write_wheel


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang-crashkit" / "wheels"


def test_a_cached_wheel_is_checked_against_the_lock(cache):
    wheel = write_wheel(cache)
    assert cache_folder() == cache
    assert find_wheel("0.5.9", {wheel.name: sha256_hex(wheel.read_bytes())}, download=False) == wheel
    with pytest.raises(RefusedError, match="its sha256 is not the one in the lock") as caught:
        find_wheel("0.5.9", {wheel.name: "0" * 64}, download=False)
    assert caught.value.next_step == f"rm {wheel}"


def test_the_wheel_that_the_lock_names_is_taken_before_others(cache):
    write_wheel(cache, tags="cp310-cp310-linux_x86_64")
    wheel = write_wheel(cache, tags="cp311-cp311-linux_x86_64")
    assert find_wheel("0.5.9", {wheel.name: sha256_hex(wheel.read_bytes())}, download=False) == wheel


def test_a_post_release_is_not_its_release(cache):
    write_wheel(cache, "0.5.9.post1")
    with pytest.raises(NothingToDoError, match=r"no wheel of SGLang 0\.5\.9 in") as caught:
        find_wheel("0.5.9", {}, download=False)
    assert "--download" in caught.value.next_step


def test_pip_is_asked_for_the_very_wheel_that_the_lock_names(cache, tmp_path, monkeypatch):
    made = write_wheel(tmp_path / "registry", tags="cp311-cp311-manylinux_2_34_x86_64")
    pip = tmp_path / "pip"
    script = f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nwhile [ "$1" != --dest ]; do shift; done\ncp {made} "$2"\n'
    pip.write_text(script)
    pip.chmod(0o755)
    monkeypatch.setattr(wheelcache, "_pip", lambda: [str(pip)])
    found = find_wheel("0.5.9", {made.name: sha256_hex(made.read_bytes())}, download=True)
    assert found == cache / made.name
    assert [path.name for path in cache.iterdir()] == [made.name]
    arguments = (tmp_path / "arguments").read_text()
    assert (
        "--platform manylinux_2_34_x86_64 --abi cp311 --implementation cp --python-version 311 sglang==0.5.9"
        in arguments
    )
    assert "--no-deps --only-binary=:all:" in arguments


def test_a_download_that_fails_says_what_pip_said(cache, monkeypatch):
    text = "import sys; sys.exit('ERROR: no matching distribution')"
    monkeypatch.setattr(wheelcache, "_pip", lambda: [sys.executable, "-c", text])
    with pytest.raises(CrashkitError, match=r"could not download sglang==0\.5\.9: ERROR: no matching"):
        find_wheel("0.5.9", {}, download=True)
    assert list(cache.iterdir()) == []


def test_a_python_without_pip_is_named(cache, monkeypatch):
    monkeypatch.setattr(wheelcache.shutil, "which", lambda _name: None)
    monkeypatch.setattr(wheelcache.sys, "executable", "/bin/false")
    with pytest.raises(CrashkitError, match="/bin/false has no pip to download with"):
        find_wheel("0.5.9", {}, download=True)


def test_what_is_not_named_like_a_wheel_is_refused():
    assert WheelName.parse("sglang-0.5.9-py3-none-any.whl").tags == "py3-none-any"
    for name in ("sglang-0.5.9.tar.gz", "sglang-0.5.9-1-py3-none-any.whl", "sglang.whl"):
        with pytest.raises(RefusedError, match="is not named like a wheel"):
            WheelName.parse(name)


def test_a_wheel_for_another_python_is_left_in_the_cache(cache):
    write_wheel(cache, tags="cp311-cp311-linux_x86_64")
    with pytest.raises(NothingToDoError, match="for cp312 in"):
        find_wheel("0.5.9", {}, download=False, python_tag="cp312")
    fitting = write_wheel(cache, tags="cp312-cp312-linux_x86_64")
    assert find_wheel("0.5.9", {}, download=False, python_tag="cp312") == fitting
    pure = write_wheel(cache, "0.5.8")
    assert find_wheel("0.5.8", {}, download=False, python_tag="cp312") == pure
