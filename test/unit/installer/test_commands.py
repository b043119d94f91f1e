"""The commands end to end, on real virtual environments with a small SGLang in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_crashkit
from sglang_crashkit.cli import main as cli
from sglang_crashkit.installer import session
from unit.installer.fake_sglang import PATCHES, install, make_kit, snapshot, write_wheel

KIT_ROOT = Path(sglang_crashkit.__file__).parents[1]


@pytest.fixture
def venv(tmp_path) -> Path:
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture
def site(venv, wheel) -> Path:
    folder = next((venv / "lib").glob("python*/site-packages"))
    install(wheel, folder)
    (folder / "kit.pth").write_text(f"{KIT_ROOT}\n")
    return folder


@pytest.fixture
def run(venv, tmp_path, kit, monkeypatch, capsys):
    monkeypatch.setattr(session, "find_patch_root", lambda: kit.patches.root)

    def run_command(name: str, *options: str) -> tuple[int, str, str]:
        code = cli.main([name, "--python", str(venv), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def state(run) -> str:
    code, out, _ = run("status", "--json")
    assert code == 0
    return json.loads(out)["state"]


def test_apply_status_and_revert_say_what_they_did(site, run):
    pristine = snapshot(site)
    code, out, _ = run("status")
    assert code == 0
    assert "state    pristine\n" in out
    assert "next     sglang-crashkit apply --python " in out
    code, out, _ = run("apply", "--dry-run")
    assert (code, out.splitlines()[0].endswith("would be patched (it is pristine):")) == (0, True)
    assert state(run) == "pristine"
    code, out, _ = run("apply")
    assert code == 0
    assert out.splitlines()[0].endswith("/sglang is patched:")
    assert out.splitlines()[1:] == ["  srt/deep/second.py", "  srt/first.py", "  srt/new/third.py"]
    assert run("apply")[:2] == (0, f"SGLang 0.5.9 in {site.resolve()}/sglang is already patched\n")
    code, out, _ = run("status")
    assert "state    patched\n" in out
    assert "next     sglang-crashkit" not in out
    assert run("revert")[1].splitlines()[0].endswith("has upstream's bytes again:")
    assert run("revert")[:2] == (0, f"SGLang 0.5.9 in {site.resolve()}/sglang is not patched\n")
    assert snapshot(site) == pristine


def test_the_patched_installation_runs_as_patched(site, venv, run):
    run("apply")
    text = (
        "import sglang.srt.first as first, sglang.srt.new.third as third; print(first.ExitCode.__name__, third.THIRD)"
    )
    done = subprocess.run([venv / "bin/python", "-c", text], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ExitCode 3\n"
    run("revert")
    text = "import sglang.srt.first as first; print(hasattr(first, 'ExitCode'))"
    done = subprocess.run([venv / "bin/python", "-c", text], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


def test_a_foreign_file_ends_apply_with_exit_code_4_and_status_names_it(site, run):
    (site / "sglang/srt/first.py").write_text("mine\n")
    code, _, err = run("apply")
    assert code == 4
    assert "srt/first.py (foreign)" in err
    assert "next: keep your edit elsewhere, then uv pip install" in err
    code, out, _ = run("status")
    assert code == 0
    assert "foreign  srt/first.py" in out


def test_a_missing_sglang_ends_with_exit_code_3(venv, run):
    for name in ("apply", "revert", "status"):
        code, _, err = run(name)
        assert code == 3
        assert "has no SGLang installed" in err


def test_an_unsupported_release_ends_with_exit_code_4_and_the_range(venv, site, run, tmp_path):
    for path in site.glob("sglang*"):
        subprocess.run(["rm", "-r", path], check=True, timeout=10)
    install(write_wheel(tmp_path / "new", "0.5.99"), site)
    code, _, err = run("apply")
    assert code == 4
    assert "SGLang 0.5.99 is not supported; supported are 0.5.9 to 0.5.9 (1 releases)" in err
    assert "scripts/port_release 0.5.99" in err
    code, out, _ = run("status", "--json")
    found = json.loads(out)
    assert (code, found["state"], found["supported"]) == (0, "unsupported", False)


def test_status_tells_each_state_apart(site, run, kit, other_kit, monkeypatch):
    run("apply")
    monkeypatch.setattr(session, "find_patch_root", lambda: other_kit.patches.root)
    assert state(run) == "outdated"
    assert "patched with other patches, by kit" in run("status")[1]
    state_file = site / "sglang-0.5.9.dist-info/sglang-crashkit.json"
    state_file.write_text(state_file.read_text().replace('"applied"', '"applying"'))
    assert state(run) == "interrupted"
    assert "cut off while applying; apply or revert finishes it" in run("status")[1]
    assert run("apply")[1].splitlines()[0].endswith("is patched; a change that was cut off is finished:")
    assert state(run) == "patched"
    (site / "sglang/srt/deep/second.py").unlink()
    assert state(run) == "patched"  # the other kit does not touch that file
    (site / "sglang/srt/first.py").unlink()
    assert state(run) == "missing"


def test_pip_uninstalls_a_patched_sglang_without_leaving_anything(site, venv, run):
    ensurepip = pytest.importorskip("ensurepip")
    assert run("apply")[0] == 0
    before = {path.name for path in site.iterdir()}
    wheels = list(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
    if not wheels:
        pytest.skip("this python comes without the bundled pip")
    command = [venv / "bin/python", f"{wheels[0]}/pip", "uninstall", "--yes", "--disable-pip-version-check", "sglang"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in site.iterdir()} == before - {"sglang", "sglang-0.5.9.dist-info"}


def test_wheel_builds_both_wheels_and_says_how_to_install_them(tmp_path, capsys, monkeypatch):

    made = write_wheel(tmp_path / "in")
    kit = make_kit(tmp_path / "kit-patches", made, PATCHES)
    monkeypatch.setattr("sglang_crashkit.installer.resolver.find_patch_root", lambda: kit.patches.root)
    out = tmp_path / "out"
    assert cli.main(["wheel", str(made), "--out", str(out)]) == 0
    version = sglang_crashkit.__version__
    names = sorted(path.name for path in out.iterdir())
    assert names == [f"sglang-0.5.9+crashkit.{version}-py3-none-any.whl", f"sglang_crashkit-{version}-py3-none-any.whl"]
    command = f"pip install --find-links {out} sglang==0.5.9+crashkit.{version} && sglang-crashkit status"
    assert f"install  {command}\n" in capsys.readouterr().out
    assert cli.main(["wheel", str(tmp_path / "no.whl"), "--out", str(out)]) == 2
    assert "neither a release of SGLang nor a wheel" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert cli.main(["wheel", "0.5.9", "--out", str(out)]) == 3
    assert "--download" in capsys.readouterr().err
    assert cli.main(["wheel", "0.5.98", "--out", str(out)]) == 4
