from __future__ import annotations

import ctypes
import itertools
import json
import re
import shutil
import threading
from pathlib import Path

import pytest

from lanelib import lanes
from lanelib.commands import LaneError
from lanelib.paths import RECIPES
from unit.support.waiting import LONG


class FakeInstaller:
    """Stands in for uv and the lane's python: makes the files they would, and notes the steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.fails_at: str | None = None
        self.state: Path | None = None

    def run(self, argv, **_options) -> str:
        words = [str(word) for word in argv]
        if words[1:] == ["cache", "dir"]:
            return "/\n"
        step = next(
            name for name in ("venv", "sync", "model.py", "install", "apply") if any(w.endswith(name) for w in words)
        )
        self.steps.append(step)
        if step == self.fails_at:
            raise LaneError(f"{step} failed")
        if step == "venv":
            python = Path(words[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()
        if step == "apply":
            state = (
                Path(words[0]).parents[1] / "lib/python3.11/site-packages/sglang-0.5.23.dist-info/sglang-crashkit.json"
            )
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_text("applied")
            self.state = state
        if step == "model.py":
            Path(words[-1]).mkdir()
        return ""


@pytest.fixture
def installer(tmp_path, monkeypatch) -> FakeInstaller:
    fake = FakeInstaller()
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "releases.lock.json").write_text('{"releases": {"0.5.9": {}, "0.5.23": {}}}')
    (tmp_path / "versions").write_text("sglang==0.5.23\n")
    monkeypatch.setattr(lanes, "LANES", tmp_path / "lanes")
    monkeypatch.setattr(lanes, "PATCHES", tmp_path / "patches")
    monkeypatch.setattr(lanes, "run_command", fake.run)
    monkeypatch.setattr(lanes, "versions_of", lambda release: tmp_path / "versions")
    monkeypatch.setattr(lanes, "hash_files", _hash)
    monkeypatch.setattr(lanes, "has_driver", lambda: True)
    monkeypatch.setattr(lanes, "ensure_stub", lambda: tmp_path / "stub")
    monkeypatch.setattr(lanes, "tool", Path)
    return fake


def _hash(files, **_options) -> str:
    return repr([path.read_text() for path in sorted(files)])


ALL_STEPS = ["venv", "sync", "model.py", "install", "apply"]


@pytest.mark.parametrize("pristine", [False, True])
def test_a_lane_is_made_in_steps_and_only_once(installer, pristine):
    lane = lanes.ensure_lane("0.5.23", pristine)

    assert installer.steps == (ALL_STEPS[:3] if pristine else ALL_STEPS)
    assert lane.root.name == ("0.5.23-pristine" if pristine else "0.5.23")
    assert lane.python.is_file()
    assert lane.model_dir.is_dir()

    installer.steps.clear()
    lanes.ensure_lane("0.5.23", pristine)
    assert installer.steps == []


@pytest.mark.parametrize(
    ("step", "redone"),
    [("sync", ALL_STEPS), ("model.py", ALL_STEPS[2:]), ("install", ALL_STEPS[3:]), ("apply", ALL_STEPS[3:])],
)
def test_an_interrupted_step_is_redone(installer, step, redone):
    installer.fails_at = step
    with pytest.raises(LaneError, match=f"{step} failed"):
        lanes.ensure_lane("0.5.23")
    installer.steps.clear()
    installer.fails_at = None

    lanes.ensure_lane("0.5.23")

    assert installer.steps == redone


def test_two_calls_at_once_install_once(installer):
    threads = [threading.Thread(target=lanes.ensure_lane, args=("0.5.23",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LONG)

    assert installer.steps == ALL_STEPS


@pytest.mark.parametrize(("folder", "path"), [("stub", "/outer"), ("stub", None), (None, "/outer")])
def test_the_stub_is_found_before_what_is_there(installer, tmp_path, monkeypatch, folder, path):
    monkeypatch.setattr(lanes, "ensure_stub", lambda: folder and tmp_path / folder)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    if path:
        monkeypatch.setenv("LD_LIBRARY_PATH", path)

    found = lanes.ensure_lane("0.5.23").serve_env().get("LD_LIBRARY_PATH")

    assert found == (":".join(str(part) for part in (folder and tmp_path / folder, path) if part) or None)


def test_a_server_imports_no_other_model_than_its_own(tmp_path):
    models = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for name in ("__init__", "llama", "llama4", "qwen3"):
        (models / f"{name}.py").touch()

    assert lanes.Lane("0.5.23", False, tmp_path, None).serve_env()["SGLANG_DISABLED_MODEL_ARCHS"] == "llama4,qwen3"


def test_knows_option_reads_it_from_the_source(tmp_path):
    srt = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang" / "srt"
    (srt / "arg_groups" / "fields").mkdir(parents=True)
    (srt / "server_args.py").write_text("class ServerArgs:\n    tp_size: int = 1\n")
    (srt / "arg_groups" / "fields" / "disagg.py").write_text("    backup_kind: str | None = None\n")
    lane = lanes.Lane("0.5.23", False, tmp_path, None)

    assert lane.knows_option("--tp-size")
    assert lane.knows_option("--backup-kind")
    assert not lane.knows_option("--pp-size")
    assert not lane.binds_replicas_alike()


@pytest.mark.parametrize(
    ("path", "redone"),
    [("patches/more.patch", ALL_STEPS[3:]), ("versions", ALL_STEPS), (None, ALL_STEPS[3:])],
)
def test_what_a_change_concerns_is_redone(installer, tmp_path, path, redone):
    lanes.ensure_lane("0.5.23")
    installer.steps.clear()
    if path is None:  # somebody reverted the patches by hand
        installer.state.unlink()
    else:
        (tmp_path / path).write_text("changed")
    lanes.ensure_lane("0.5.23")
    assert installer.steps == redone


@pytest.mark.parametrize(
    ("missing", "release", "why"),
    [
        ("a compiler", "0.5.23", "no C compiler"),
        ("room", "0.5.23", r"3\.0 GB are free at .*, and up to 10 GB are needed"),
        ("patches", "0.5.99", r"no patches for SGLang 0\.5\.99; it has for 0\.5\.9, 0\.5\.23"),
    ],
)
def test_what_is_missing_is_told_before_the_download(installer, programs, monkeypatch, missing, release, why):
    if missing == "a compiler":
        monkeypatch.setattr(lanes, "has_driver", lambda: False)
    if missing == "room":
        usage = shutil.disk_usage("/")._replace(free=3 * 10**9)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LaneError, match=why):
        lanes.ensure_lane(release)
    assert installer.steps == []
    assert missing != "patches" or lanes.ensure_lane(release, pristine=True).release == release


LOCKS = sorted(RECIPES.glob("*.lock"))
PIN = re.compile(r"[a-z0-9][a-z0-9._-]*==[\w.+!]+( ; [\w.' <>=!]+)?")

#: Stands in for uv: notes its arguments, and answers as the registry would.
FAKE_UV = """
import json, sys
with open({notes!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if "--no-deps" in sys.argv:
    print({facts!r})
else:
    print("sglang==9.9.9")
"""


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_holds_exact_versions_and_no_addresses(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if not PIN.fullmatch(line)] == []


@pytest.mark.parametrize("release", ["0.5.9", "0.5.12.post1", "0.5.23"])
def test_a_lane_lock_names_its_release_and_the_extras(release):
    lines = lanes.lock_path(release).read_text().splitlines()

    assert f"sglang=={release}" in lines
    assert {line.split("==")[0] for line in lines} >= {*lanes.EXTRAS, "psutil", "py-spy", "setproctitle"}


@pytest.mark.parametrize("text", ["", "latest", "0.5", "../0.5.9", "0.5.9 ", "v0.5.9"])
def test_check_release_refuses_what_is_no_release(text):
    with pytest.raises(LaneError, match="is not an SGLang release") as caught:
        lanes.check_release(text)

    assert caught.value.exit_code == 2


@pytest.fixture
def registry(tmp_path, monkeypatch, programs):
    """A uv that answers with given facts; returns a function that gives its calls."""
    notes = tmp_path / "calls"
    monkeypatch.setattr(lanes, "LANES", tmp_path)
    monkeypatch.setattr(lanes, "RECIPES", tmp_path / "recipes")

    def answer(facts):
        source = FAKE_UV.format(notes=str(notes), facts=facts)
        monkeypatch.setattr(lanes, "tool", lambda name: programs.add(name, source))
        return lambda: [json.loads(line) for line in notes.read_text().splitlines()]

    return answer


def test_an_unknown_release_is_named(registry, monkeypatch, programs):
    monkeypatch.setattr(lanes, "tool", lambda name: programs.add(name, "import sys; sys.exit('no version')"))

    with pytest.raises(LaneError, match=r"SGLang 9\.9\.9 cannot be found") as caught:
        lanes.versions_of("9.9.9")

    assert "no version" in caught.value.message


@pytest.mark.parametrize(
    ("facts", "newest"),
    [
        ('[[packages]]\nname = "sglang"\nwheels = [{ upload-time = 2026-07-25T00:12:07Z }]', ["2026-07-26T00:12:07Z"]),
        ('[[packages]]\nname = "sglang"\nversion = "9.9.9"', []),
    ],
)
def test_resolve_goes_back_to_the_day_after_the_release(registry, facts, newest):
    calls = registry(facts)
    limits = {option: lanes.RECIPES / f"9.9.9.{option}s" for option in ("constraint", "override")}
    lanes.RECIPES.mkdir()
    for path in limits.values():
        path.write_text("kernels==0.13.0\n")
    assert lanes.resolve("9.9.9").endswith("sglang==9.9.9\n")
    options = calls()[-1]
    assert [after for option, after in itertools.pairwise(options) if option == "--exclude-newer"] == newest
    assert {option: options[options.index(f"--{option}") + 1] for option in limits} == {
        option: str(path) for option, path in limits.items()
    }


def test_write_lock_keeps_what_was_used_and_replaces_no_lock(registry):
    registry('name = "sglang"')
    resolved = lanes.versions_of("9.9.9")
    path = lanes.write_lock("9.9.9")
    assert path.read_text() == resolved.read_text()
    assert (lanes.versions_of("9.9.9"), lanes.locked_releases()) == (path, ["9.9.9"])
    with pytest.raises(LaneError, match=r"9\.9\.9 is locked already"):
        lanes.write_lock("9.9.9")


@pytest.fixture
def stub_dir(tmp_path, monkeypatch):
    folder = tmp_path / "stub"
    monkeypatch.setattr(lanes, "LANES", tmp_path)
    monkeypatch.setattr(lanes, "STUB", folder)
    monkeypatch.setattr(lanes, "has_driver", lambda: False)
    return folder


def test_stub_names_a_compiler_that_fails(stub_dir, programs):
    programs.add("cc", "import sys; sys.exit('stdlib.h: No such file')")

    with pytest.raises(LaneError, match=r"cannot make the driver stub: .*") as caught:
        lanes.ensure_stub()

    assert "stdlib.h: No such file" in caught.value.message
    assert "set CC" in str(caught.value.next_step)


def test_has_driver_is_not_misled_by_the_stub(stub_dir, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: type("Stub", (), {lanes.MARKER: 0}))

    assert not lanes.has_driver()


@pytest.mark.parametrize(
    ("there", "chosen", "found"),
    [
        (["gcc", "clang"], None, ["gcc"]),
        (["gcc", "wrapper"], "wrapper gcc", ["wrapper", "gcc"]),
        ([], None, r"no C compiler \(cc, gcc, clang\) on PATH"),
        (["gcc"], "icc", r"no C compiler \(icc\) on PATH"),
    ],
)
def test_the_compiler_is_ccs_or_the_first_on_path(programs, monkeypatch, there, chosen, found):
    for name in there:
        programs.add(name, "")
    if chosen:
        monkeypatch.setenv("CC", chosen)

    if isinstance(found, list):
        assert lanes.find_compiler() == found
    else:
        with pytest.raises(LaneError, match=found) as caught:
            lanes.find_compiler()
        assert "apt-get install gcc libc6-dev" in str(caught.value.next_step)


def test_the_stub_reports_no_device_and_is_rebuilt_when_changed(stub_dir, monkeypatch, tmp_path):
    assert lanes.ensure_stub() == stub_dir
    library = ctypes.CDLL(str(stub_dir / "libcuda.so.1"))
    assert (library.cuInit(0), library.cuMemGetAddressRange_v2(), hasattr(library, lanes.MARKER)) == (100, 100, True)
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "run_command", None)
        assert lanes.ensure_stub() == stub_dir
        patch.setattr(lanes, "has_driver", lambda: True)
        assert lanes.ensure_stub() is None
    source = tmp_path / "stub.c"
    source.write_text(lanes.SOURCE.read_text() + "NO_DEVICE(cuNew)\n")
    monkeypatch.setattr(lanes, "SOURCE", source)
    monkeypatch.setattr(lanes, "hash_files", lambda files: "changed")
    lanes.ensure_stub()
    assert b"cuNew" in (stub_dir / "libcuda.so.1").read_bytes()
