"""Real virtual environments with a small SGLang in them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import sglang_crashkit
from sglang_crashkit.errors import CrashkitError, NothingToDoError, RefusedError, UsageError
from sglang_crashkit.installer.apply import apply
from sglang_crashkit.installer.environment import Kit, find_environment, require_kit
from sglang_crashkit.installer.status import State
from unit.installer.fake_sglang import overall
from unit.support.targets import make_tool

KIT_ROOT = Path(sglang_crashkit.__file__).parents[1]


def test_an_installation_is_found_without_importing_it(venv, site, tmp_path, monkeypatch):
    (site / "sglang/__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "noise.pth").write_text("import sys; print('noise'); print('more', file=sys.stderr)\n")
    (tmp_path / "here/sglang").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    found = find_environment(str(venv), calls=["sglang_crashkit.errors.ExitCode"])
    # The link, as the python that it leads to does not know of the environment.
    assert found.python == venv / "bin" / "python"
    assert os.path.realpath(found.python) != str(found.python)
    assert (found.version, found.has_pip) == ("0.5.9", False)
    assert found.package == (site / "sglang").resolve()
    assert found.dist_info == (site / "sglang-0.5.9.dist-info").resolve()
    assert found.kit == Kit(sglang_crashkit.__version__, KIT_ROOT, {})
    require_kit(found)


@pytest.mark.parametrize(
    ("version", "missing", "why"),
    [
        ("0.0.1", {}, "imports sglang_crashkit 0.0.1, but this is"),
        (sglang_crashkit.__version__, {"a.b": "No module"}, "cannot import a.b: No module"),
    ],
)
def test_a_python_with_another_kit_is_refused(environment, kit, version, missing, why):
    other = replace(environment, kit=Kit(version, Path("/x"), missing))
    with pytest.raises(RefusedError, match=why) as caught:
        apply(other, kit.patches, kit.lock)
    assert "install" in caught.value.next_step
    assert overall(environment, kit) is State.PRISTINE


def test_a_python_without_the_kit_is_told_the_install_command(venv, site, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (site / "kit.pth").unlink()
    (site / "sglang_crashkit").mkdir()  # as an uninstalled kit leaves it
    with pytest.raises(RefusedError, match="cannot import sglang_crashkit") as caught:
        require_kit(find_environment(str(venv)))
    assert caught.value.next_step.startswith(f"uv pip install --python {venv}/bin/python ")
    monkeypatch.setenv("PYTHONPATH", str(KIT_ROOT))
    with pytest.raises(RefusedError, match="through PYTHONPATH alone"):
        require_kit(find_environment(str(venv)))


def test_a_python_without_sglang_is_named(venv, bare_site):
    with pytest.raises(NothingToDoError, match=f"{venv}/bin/python has no SGLang installed") as caught:
        find_environment(str(venv))
    assert "--python PATH" in str(caught.value)
    (bare_site / "sglang").mkdir()
    (bare_site / "sglang/__init__.py").touch()
    with pytest.raises(NothingToDoError, match=r"but .*/sglang is importable"):
        find_environment(str(venv))


def test_an_editable_install_is_refused(venv, site):
    url = {"url": "file:///src/sglang", "dir_info": {"editable": True}}
    (site / "sglang-0.5.9.dist-info/direct_url.json").write_text(json.dumps(url))
    with pytest.raises(RefusedError, match="an editable install of file:///src/sglang") as caught:
        find_environment(str(venv))
    assert caught.value.next_step.startswith("uv pip install --python")


@pytest.mark.usefixtures("site")
def test_an_installation_behind_another_is_refused(venv, tmp_path, monkeypatch):
    (tmp_path / "other/sglang").mkdir(parents=True)
    (tmp_path / "other/sglang/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    with pytest.raises(RefusedError, match=r"imports .*/other/sglang"):
        find_environment(str(venv))


def test_an_interpreter_that_is_none_is_refused(tmp_path):
    for path in (tmp_path / "no", tmp_path):
        with pytest.raises(UsageError, match="is not a python interpreter"):
            find_environment(str(path))


@pytest.mark.parametrize("script", ["exit 3", "echo '[]'", "echo '{'", "echo trouble >&2; exit 1"])
def test_an_interpreter_that_does_not_answer_is_named(tmp_path, script):
    python = make_tool(tmp_path, script, "python")
    with pytest.raises(CrashkitError, match=f"{python} did not say where its SGLang is"):
        find_environment(python)
