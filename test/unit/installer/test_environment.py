"""Real virtual environments with a small SGLang in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_crashkit
from sglang_crashkit import __version__
from sglang_crashkit.errors import CrashkitError, NothingToDoError, RefusedError, UsageError
from sglang_crashkit.installer.environment import find_environment, find_python, require_kit
from unit.installer.fake_sglang import install

KIT_ROOT = Path(sglang_crashkit.__file__).parents[1]


@pytest.fixture
def venv(tmp_path) -> Path:
    folder = tmp_path / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.fixture
def site(venv) -> Path:
    return next((venv / "lib").glob("python*/site-packages"))


def add_kit(site: Path, root: Path = KIT_ROOT) -> None:
    (site / "kit.pth").write_text(f"{root}\n")


def test_an_installation_is_found_without_importing_it(venv, site, wheel, monkeypatch):
    install(wheel, site)
    (site / "sglang/__init__.py").write_text("raise SystemExit('imported')\n")
    add_kit(site)
    found = find_environment(str(venv), calls=["sglang_crashkit.errors.ExitCode"])
    assert found.python == venv / "bin" / "python"
    assert found.version == "0.5.9"
    assert found.package == (site / "sglang").resolve()
    assert found.dist_info == (site / "sglang-0.5.9.dist-info").resolve()
    assert found.kit is not None
    assert found.kit.version == __version__
    assert found.kit.missing == {}
    assert not found.has_pip
    require_kit(found)


def test_the_empty_folder_of_an_uninstalled_kit_is_no_kit(venv, site, wheel):
    install(wheel, site)
    (site / "sglang_crashkit").mkdir()
    assert find_environment(str(venv)).kit is None


def test_start_up_files_that_print_do_no_harm(venv, site, wheel):
    install(wheel, site)
    (site / "noise.pth").write_text("import sys; print('noise'); print('more', file=sys.stderr)\n")
    assert find_environment(str(venv)).version == "0.5.9"


def test_a_folder_named_sglang_in_the_working_directory_is_not_it(venv, site, wheel, tmp_path, monkeypatch):
    install(wheel, site)
    install(wheel, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert find_environment(str(venv)).package == (site / "sglang").resolve()


def test_a_python_without_sglang_is_named(venv):
    with pytest.raises(NothingToDoError, match=f"{venv}/bin/python has no SGLang installed") as caught:
        find_environment(str(venv))
    assert "--python PATH" in str(caught.value)


def test_a_package_without_metadata_is_not_an_installation(venv, site):
    (site / "sglang").mkdir()
    (site / "sglang/__init__.py").touch()
    with pytest.raises(NothingToDoError, match=r"but .*/sglang is importable"):
        find_environment(str(venv))


def test_an_editable_install_is_refused(venv, site, wheel):
    environment = install(wheel, site)
    url = {"url": "file:///src/sglang", "dir_info": {"editable": True}}
    (environment.dist_info / "direct_url.json").write_text(json.dumps(url))
    with pytest.raises(RefusedError, match="an editable install of file:///src/sglang") as caught:
        find_environment(str(venv))
    assert caught.value.next_step.startswith("uv pip install --python")


def test_metadata_of_two_releases_side_by_side_is_refused(venv, site, wheel):
    install(wheel, site)
    (site / "sglang-0.5.10.dist-info").mkdir()
    with pytest.raises(RefusedError, match="two installations overlap"):
        find_environment(str(venv))


def test_metadata_that_describes_another_package_than_is_imported_is_refused(venv, site, wheel, tmp_path, monkeypatch):
    install(wheel, site)
    (tmp_path / "other/sglang").mkdir(parents=True)
    (tmp_path / "other/sglang/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    with pytest.raises(RefusedError, match=r"imports .*/other/sglang"):
        find_environment(str(venv))


def test_a_kit_that_only_pythonpath_finds_is_refused(venv, site, wheel, monkeypatch):
    install(wheel, site)
    monkeypatch.setenv("PYTHONPATH", str(KIT_ROOT))
    with pytest.raises(RefusedError, match="through PYTHONPATH alone"):
        require_kit(find_environment(str(venv)))


def test_a_python_that_cannot_import_the_kit_is_told_how_to_install_it(venv, site, wheel):
    install(wheel, site)
    with pytest.raises(RefusedError, match="cannot import sglang_crashkit") as caught:
        require_kit(find_environment(str(venv)))
    assert caught.value.next_step.startswith(f"uv pip install --python {venv}/bin/python ")


@pytest.mark.parametrize("call", ["sglang_crashkit.no_such_module.function", "sglang_crashkit.errors.no_such_function"])
def test_a_function_that_patches_call_and_that_is_not_there_is_named(venv, site, wheel, call):
    install(wheel, site)
    add_kit(site)
    with pytest.raises(RefusedError, match=f"cannot import {call}"):
        require_kit(find_environment(str(venv), calls=[call]))


def test_an_interpreter_that_is_none_is_refused(tmp_path):
    for path in (tmp_path / "no", tmp_path):
        with pytest.raises(UsageError, match="is not a python interpreter"):
            find_python(str(path))
    assert find_python(None) == Path(sys.executable)


@pytest.mark.parametrize("script", ["exit 3", "echo '[]'", "echo '{'", "echo trouble >&2; exit 1"])
def test_an_interpreter_that_does_not_answer_is_named(tmp_path, script):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(CrashkitError, match=f"{python} did not say where its SGLang is"):
        find_environment(str(python))


def test_the_python_of_a_virtual_environment_is_not_resolved(venv):
    assert os.path.realpath(venv / "bin" / "python") != str(find_python(str(venv)))
