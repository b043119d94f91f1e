"""A real pair loses prefill, decode or router: the running test fails by name within seconds, with the evidence."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inner_pytest import Run, run_pytest
from lanelib.paths import ROOT
from pd.pairs import NEEDED
from sglang_crashkit.kernel import procfs

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), NEEDED]

SESSION = Path(__file__).parent / "session" / "pair_session.py"
#: A process of the pair, or a process of its tree by title.
VICTIMS = {"prefill": "prefill", "decode": "decode/sglang::scheduler", "router": "router"}
#: A client waits for minutes; it takes 0.5 to 1.5 s, and on two busy cores the death itself takes seconds.
MAX_S = 20.0
TIMEOUT_S = 800


@dataclass(frozen=True)
class Loss:
    victim: str
    run: Run
    killed: float
    reports: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module", params=VICTIMS)
def loss(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pd_release, pd_device) -> Loss:
    folder = tmp_path_factory.mktemp(request.param)
    environ = {
        "CRASHKIT_PD_RELEASE": pd_release,
        "CRASHKIT_PD_DEVICE": pd_device,
        "CRASHKIT_PD_VICTIM": VICTIMS[request.param],
        "CRASHKIT_PD_CRASH_FOLDER": str(folder / "crash"),
        "CRASHKIT_PD_REPORTS": str(folder / "reports"),
        "CRASHKIT_PD_KILLED": str(folder / "killed"),
    }
    run = run_pytest(
        [f"--rootdir={ROOT}", "-c", ROOT / "pyproject.toml", "--crashkit-evidence", folder / "evidence", SESSION],
        report=folder / "junit.xml",
        cwd=ROOT,
        environ=os.environ | environ,
        timeout_secs=TIMEOUT_S,
    )
    assert (folder / "killed").exists(), run.output[-8000:]
    reports = [json.loads(line) for line in (folder / "reports").read_text().splitlines()]
    return Loss(request.param, run, float((folder / "killed").read_text()), reports, folder)


def test_the_running_test_fails_by_name_within_seconds(loss: Loss, capsys: pytest.CaptureFixture[str]) -> None:
    failed = [one for one in loss.reports if one["outcome"] == "failed"]
    (report,) = [one for one in failed if one["name"] == "test_that_is_cut_short"]
    seconds = report["time"] - loss.killed
    with capsys.disabled():
        line = f"{loss.victim}: from its death to the failed test {seconds:.2f} s, evidence included"
        print(f"\n{line}", flush=True)  # noqa: T201 - the figure that this test is for
    assert seconds < MAX_S, loss.run.output[-8000:]


def test_the_report_says_who_ended_and_what_others_did(loss: Loss) -> None:
    message = loss.run.messages["test_that_is_cut_short"]
    assert f"{loss.victim} (pid=" in message
    for survivor in set(VICTIMS) - {loss.victim}:
        assert f"meanwhile: {survivor}: " in message
    assert list((loss.folder / "evidence").glob("*/*.txt"))
    if loss.victim == "decode":
        assert "incident: " in message
        assert "sglang::scheduler" in message


def test_only_what_depends_on_the_pair_fails(loss: Loss) -> None:
    assert loss.run.status == 1
    assert loss.run.outcomes == {
        "test_answers_come_through_the_router": ["passed"],
        "test_that_is_cut_short": ["failure"],
        "test_that_would_come_next": ["error"],
        "test_that_needs_no_pair": ["passed"],
    }


def test_nothing_of_the_pair_is_left(loss: Loss) -> None:
    folder = str(loss.folder)
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    assert [pid for pid in pids if folder in " ".join(procfs.read_cmdline(pid))] == []
