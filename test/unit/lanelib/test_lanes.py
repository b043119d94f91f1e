from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from lanelib import lanes
from lanelib.errors import LaneError
from unit.waiting import LONG


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
def test_a_lane_is_made_in_steps_and_a_second_call_runs_nothing(installer, pristine):
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
