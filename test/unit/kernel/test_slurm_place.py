from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.kernel.slurm_place import Place, other_place_of, place_of
from unit.waiting import child

HERE, ELSEWHERE = Place("7", "n1"), Place("7", "n2")
SLEEPER = "ready(os.getpid()); pause()"


@pytest.fixture
def of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started belongs to a step of a job on another node."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")


@pytest.mark.usefixtures("of_a_job")
def test_a_process_of_another_job_or_node_is_elsewhere() -> None:
    with child(SLEEPER) as process:
        assert place_of(process.pid) == ELSEWHERE
        assert other_place_of(process.pid, HERE) == ELSEWHERE
        assert other_place_of(process.pid, Place("8", "n2")) == ELSEWHERE
        assert other_place_of(process.pid, ELSEWHERE) is None


def test_a_process_that_no_job_started_may_belong_to_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    with child(SLEEPER) as process:
        assert place_of(process.pid) is None
        assert other_place_of(process.pid, HERE) is None


@pytest.mark.usefixtures("of_a_job")
def test_a_process_whose_title_has_overwritten_its_environment_is_where_its_launcher_is() -> None:
    # The launcher keeps its environment; its fork sets a title.
    titled = """
import ctypes, setproctitle
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    setproctitle.setproctitle("sglang::scheduler_TP0")
    ready(os.getpid())
pause()
"""
    with child(titled) as launcher:
        pid = int(launcher.first_line)  # type: ignore[attr-defined]
        assert b"SLURM_JOB_ID" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert other_place_of(pid, HERE) == ELSEWHERE
