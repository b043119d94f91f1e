"""The kit is uninstalled before SGLang's files are given back, or SGLang is installed anew over the patched one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.no_harm.lane_pip import pip, status_of
from integration.scenario import EXIT_TIMEOUT_S, answers_of, handlers_of, serving
from lanelib.lanes import Lane, copied, ensure_lane
from sglang_crashkit.installer.patches import load_lock
from sglang_crashkit.installer.wheel import build_kit_wheel, find_wheel

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

RELEASE = "0.5.23"
#: What a server program imports, which takes longer than its start-up.
IMPORT = "import sglang.srt.entrypoints.http_server, sys; print('sglang_crashkit.srt' in sys.modules)"


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    with copied(ensure_lane(RELEASE)) as lane:
        yield lane


def log_of_server(lane: Lane, folder: Path, *, crashkit: bool) -> list[str]:
    """Serve, answer and end in order; return the server's log."""
    with serving(lane, folder) as server:
        assert answers_of(server)
        assert len(handlers_of(server)) == crashkit
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(EXIT_TIMEOUT_S) == 0
        log = server.log_path.read_text()
    return log.splitlines()


def before_the_log_has_its_form(log: list[str]) -> list[str]:
    """Return what is said of the kit as SGLang is imported."""
    return [line for line in log if line.startswith("crash kit:")]


def test_without_the_kit_a_patched_sglang_serves_and_warns_once(lane: Lane, tmp_path: Path) -> None:
    pip(lane, "uninstall", "--yes", "sglang-crashkit")
    argv = [str(lane.python), "-c", IMPORT]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=600, env=lane.serve_env())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    (said,) = before_the_log_has_its_form(done.stderr.splitlines())
    assert said.startswith("crash kit: sglang-crashkit is not installed")
    assert said.endswith(f"pip install --force-reinstall --no-deps sglang=={RELEASE}")
    assert before_the_log_has_its_form(log_of_server(lane, tmp_path, crashkit=False)) == [said]
    assert status_of(lane)["kit_version_there"] is None

    pip(lane, "install", "--no-index", "--no-deps", build_kit_wheel(tmp_path))
    assert status_of(lane)["state"] == "patched"
    assert before_the_log_has_its_form(log_of_server(lane, tmp_path, crashkit=True)) == []


@pytest.mark.matrix
def test_a_kit_that_is_installed_but_not_applied_says_so(lane: Lane, tmp_path: Path) -> None:
    pip(lane, "install", "--no-index", "--no-deps", "--force-reinstall", build_kit_wheel(tmp_path))
    upstream = find_wheel(RELEASE, load_lock().releases[RELEASE].wheels, download=True)
    pip(lane, "install", "--no-index", "--no-deps", "--force-reinstall", upstream)
    status = status_of(lane)
    assert status["state"] == "pristine"
    assert str(status["next"]).startswith("sglang-crashkit apply")
    said = [line for line in log_of_server(lane, tmp_path, crashkit=False) if "crash kit:" in line]
    assert ["this SGLang is not patched" in line for line in said] == [True]
