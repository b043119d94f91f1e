"""What upstream's later releases offer is there by name and does what they say, in old and new releases alike."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lanelib.lanes import Lane

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("upstream_names.py")
VARIABLES = {
    "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
    "CUDA_COREDUMP_SHOW_PROGRESS",
    "CUDA_COREDUMP_GENERATION_FLAGS",
    "CUDA_COREDUMP_FILE",
    "CUDA_COREDUMP_PIPE",
}


@pytest.fixture(scope="module")
def seen(end_lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the program saw, and the folder that it worked in."""
    folder = tmp_path_factory.mktemp("names")
    done = subprocess.run(
        [end_lane.python, PROGRAM, end_lane.model_dir, folder],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env=end_lane.serve_env() | {"HOSTNAME": "what-the-shell-says"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # A watchdog prints empty lines at any time.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"module"')]
    return json.loads(line), folder


def test_the_module_has_its_functions_and_its_seams(seen: tuple[dict[str, Any], Path]) -> None:
    module = seen[0]["module"]
    assert len(module["functions"]) == 5
    assert module["seams"] == ["os", "subprocess", "time", "psutil"]
    assert module["scheduler_only"] is False
    assert module["logger"] == "sglang.srt.utils.cudacore_pyspy_dump_utils"
    # Once by its name, once by its old place.
    assert module["dumped"] == [True, True]
    assert (module["opened"], module["written"]) == (f"/pipes/{2**22 + 1}.5", "1")


def test_the_flags_have_their_defaults_and_are_read(seen: tuple[dict[str, Any], Path]) -> None:
    assert seen[0]["flags"] == {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": True,
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": True,
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": 60.0,
        "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION": False,
        "read": False,
    }


def test_a_watchdog_that_times_out_still_calls_what_it_called(seen: tuple[dict[str, Any], Path]) -> None:
    assert seen[0]["watchdog"] == {"dumped": True}


def test_without_a_crash_folder_no_variable_is_set(seen: tuple[dict[str, Any], Path]) -> None:
    assert seen[0]["arguments"]["without"] == {"set": {}, "by_name": {}, "log": []}


def test_resolving_arguments_sets_what_is_unset_and_says_so(seen: tuple[dict[str, Any], Path]) -> None:
    found, folder = seen[0]["arguments"]["with"], seen[1] / "crash"
    assert found["set"].keys() == VARIABLES
    assert found["set"] == found["by_name"]
    assert found["set"]["CUDA_COREDUMP_SHOW_PROGRESS"] == "0"
    assert found["set"]["CUDA_COREDUMP_FILE"] == f"{folder}/%h/core.cuda.%t.%p"
    said = [line for line in found["log"] if "Auto-set" in line]
    assert len(said) == 2 * (len(VARIABLES) - 1)
    assert not [line for line in said if "SHOW_PROGRESS" in line]


def test_resolving_them_waits_for_no_disk(seen: tuple[dict[str, Any], Path]) -> None:
    # The crash handler makes the folder of the cores, with a deadline, before the first process that uses CUDA starts.
    assert not (seen[1] / "crash" / socket.gethostname()).exists()


def test_a_folder_that_cannot_be_made_stops_nothing(seen: tuple[dict[str, Any], Path]) -> None:
    found = seen[0]["arguments"]["hopeless"]
    assert found["set"].keys() == VARIABLES
    assert [line for line in found["log"] if line.startswith("ERROR")] == []
