"""The commands end to end, on real virtual environments with a small SGLang in them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import sglang_crashkit
from sglang_crashkit.cli.commands.status import RunningServer
from sglang_crashkit.installer import environment as environment_module
from sglang_crashkit.installer.apply import apply
from sglang_crashkit.installer.environment import Kit
from sglang_crashkit.installer.status import read_tree
from unit.installer.fake_sglang import install, snapshot, write_wheel


@pytest.fixture
def run(venv, kit, monkeypatch, cli):
    """Run a command on the virtual environment; see `cli`."""
    monkeypatch.setattr(environment_module, "find_patch_root", lambda: kit.patches.root)
    return lambda name, *options, status=0: cli(name, "--python", venv, *options, status=status)


def state(run) -> str:
    return run("status", "--json").json["state"]


def test_apply_status_and_revert_say_what_they_did(site, run):
    pristine = snapshot(site)
    out = run("status").out
    assert "state    pristine\n" in out
    assert "next     sglang-crashkit apply --python " in out
    assert run("apply", "--dry-run").out.splitlines()[0].endswith("would be patched (it is pristine):")
    assert state(run) == "pristine"
    head, *files = run("apply").out.splitlines()
    assert head.endswith("/sglang is patched:")
    assert files == ["  srt/deep/second.py", "  srt/first.py", "  srt/new/third.py"]
    assert run("apply").out == f"SGLang 0.5.9 in {site.resolve()}/sglang is already patched\n"
    out = run("status").out
    assert "state    patched\n" in out
    assert "next     sglang-crashkit" not in out
    assert run("revert").out.splitlines()[0].endswith("has upstream's bytes again:")
    assert run("revert").out == f"SGLang 0.5.9 in {site.resolve()}/sglang is not patched\n"
    assert snapshot(site) == pristine


def test_a_program_reads_what_was_done_and_checks_it(site, run, monkeypatch):
    monkeypatch.setattr("sglang_crashkit.cli.commands.status.find_running_servers", list)
    run("status", "--check", status=1)
    told = {"release": "0.5.9", "package": f"{site.resolve()}/sglang"}
    files = ["srt/deep/second.py", "srt/first.py", "srt/new/third.py"]
    for command, dry_run, before, changed in (
        ("apply", True, "pristine", files),
        ("apply", False, "pristine", files),
        ("apply", False, "patched", []),
        ("revert", False, "patched", files),
        ("revert", False, "pristine", []),
    ):
        said = run(command, "--json", *(["--dry-run"] if dry_run else []))
        assert said.json == told | {"before": before, "changed": changed, "dry_run": dry_run}
        run("status", "--check", status=0 if (command, dry_run) == ("apply", False) else 1)
    run("apply")
    unwatched = RunningServer(7, "sglang::scheduler", "/run", None, "its crash handler has ended")
    monkeypatch.setattr("sglang_crashkit.cli.commands.status.find_running_servers", lambda: [unwatched])
    run("status", "--check", status=1)
    run("status")


def test_the_exit_codes(site, run, tmp_path):
    (site / "sglang/srt/first.py").write_text("mine\n")
    err = run("apply", status=4).err
    assert "srt/first.py (foreign)" in err
    assert "next: keep your edit elsewhere, then uv pip install" in err
    assert "foreign  srt/first.py" in run("status").out
    for path in site.glob("sglang*"):
        shutil.rmtree(path)
    for name in ("apply", "revert", "status"):
        assert "has no SGLang installed" in run(name, status=3).err
    install(write_wheel(tmp_path / "next", "0.5.99"), site)
    err = run("apply", status=4).err
    assert "SGLang 0.5.99 is not supported; supported are 1 releases, 0.5.9 to 0.5.9" in err
    assert "scripts/port_release 0.5.99" in err
    found = run("status", "--json").json
    assert (found["state"], found["supported"]) == ("unsupported", False)
    assert found["next"].startswith("scripts/port_release 0.5.99")
    assert "(not supported; supported are 1 releases, 0.5.9 to 0.5.9)" in run("status").out


def test_status_tells_each_state_apart(site, run, kit, other_kit, monkeypatch):
    run("apply")
    monkeypatch.setattr(environment_module, "find_patch_root", lambda: other_kit.patches.root)
    assert state(run) == "outdated"
    assert "patched with other patches, by kit" in run("status").out
    manifest = site / "sglang-0.5.9.dist-info/sglang-crashkit.json"
    manifest.write_text(manifest.read_text().replace('"applied"', '"applying"'))
    assert state(run) == "interrupted"
    assert "cut off while applying; apply or revert finishes it" in run("status").out
    assert run("apply").out.splitlines()[0].endswith("is patched; a change that was cut off is finished:")
    assert state(run) == "patched"
    (site / "sglang/srt/deep/second.py").unlink()
    assert state(run) == "patched"  # the other kit does not touch that file
    (site / "sglang/srt/first.py").unlink()
    assert state(run) == "missing"


def test_the_next_command_fits_the_state(environment, kit, other_kit):
    def tree_of(lock=kit.lock, **changes):
        return read_tree(replace(environment, **changes), lock.find(environment.version))

    def next_step(lock=kit.lock, **changes):
        return tree_of(lock, **changes).next_step

    assert next_step() == f"sglang-crashkit apply --python {environment.python}"
    assert next_step(kit=None) == environment.install_kit
    other = Kit("9.9", environment.site, {})
    assert next_step(kit=other) == environment.install_kit
    assert "kit      9.9 in" in (text := "\n".join(tree_of(kit=other).lines(kit.lock)))
    assert ", another one" in text
    apply(environment, kit.patches, kit.lock)
    assert next_step() is None
    assert next_step(other_kit.lock).startswith("sglang-crashkit apply")
    assert next_step(replace(kit.lock, releases={})).startswith("sglang-crashkit revert")
    (environment.package / "srt/first.py").write_text("mine\n")
    assert next_step() == environment.reinstall
    assert "state    foreign: 1 neither upstream's nor the kit's" in "\n".join(tree_of().lines(kit.lock))
    fields = {"python", "sglang_version", "state", "files", "next", "supported_range", "schema_version", "phase"}
    assert (
        fields | {"patched_by", "patched_with_kit", "kit_version", "kit_version_there"}
        <= tree_of().to_json(kit.lock).keys()
    )


@pytest.mark.wide
def test_pip_uninstalls_a_patched_sglang_without_leaving_anything(site, venv, run):
    ensurepip = pytest.importorskip("ensurepip")
    run("apply")
    before = {path.name for path in site.iterdir()}
    wheels = list(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
    if not wheels:
        pytest.skip("this python comes without the bundled pip")
    command = [venv / "bin/python", f"{wheels[0]}/pip", "uninstall", "--yes", "--disable-pip-version-check", "sglang"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in site.iterdir()} == before - {"sglang", "sglang-0.5.9.dist-info"}


def test_wheel_builds_both_wheels_and_says_how_to_install_them(tmp_path, wheel, kit, cli, monkeypatch):
    monkeypatch.setattr("sglang_crashkit.installer.patches.find_patch_root", lambda: kit.patches.root)
    out = tmp_path / "out"
    said = cli("wheel", wheel, "--out", out)
    version = sglang_crashkit.__version__
    names = sorted(path.name for path in out.iterdir())
    assert names == [f"sglang-0.5.9+crashkit.{version}-py3-none-any.whl", f"sglang_crashkit-{version}-py3-none-any.whl"]
    command = f"pip install --find-links {out} sglang==0.5.9+crashkit.{version} && sglang-crashkit status"
    assert f"install  {command}\n" in said.out
    told = cli("wheel", wheel, "-o", out, "--json").json
    assert told == {"release": "0.5.9", "install": command, "locked": told["locked"]} | {
        "wheel": str(out / names[0]),
        "kit": str(out / names[1]),
    }
    assert "neither a release of SGLang nor a wheel" in cli("wheel", tmp_path / "no.whl", "--out", out, status=2).err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert "--download" in cli("wheel", "0.5.9", "--out", out, status=3).err
    cli("wheel", "0.5.98", "--out", out, status=4)
