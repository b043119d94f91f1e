"""What the exit status says after a crash: of a program with an Engine, and of a server where upstream's is wanted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.faults import send
from integration.no_harm.programs import Program
from integration.scenario import SCHEDULER, break_one, journaled_rids
from lanelib.lanes import ensure_lane
from sglang_crashkit.incident.store import find_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

#: Beside other servers an engine takes minutes to begin.
BEGUN_S = 400.0


def test_an_engines_program_ends_as_upstreams_after_its_incident(tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    with Program(ensure_lane("0.5.23"), tmp_path / "program", folder) as program:
        program.do("engine = launch()")
        asked = {"max_new_tokens": 4000, "ignore_eos": True}
        program.tell(f"engine.generate('Once upon a time', {asked!r}); print('answered', flush=True)")
        wait_until(lambda: journaled_rids(program.popen.pid), "the engine has the request", BEGUN_S)
        scheduler = program.pid_of(SCHEDULER)
        os.kill(scheduler, signal.SIGKILL)
        assert program.popen.wait(60) == -signal.SIGKILL
    (stored,) = find_incidents(folder)
    assert stored.document is not None
    assert stored.finished
    assert stored.document["verdict"]["first_failure"]["pid"] == scheduler
    assert "answered" not in program.log.read_text()


@pytest.mark.matrix
def test_whoever_wants_upstreams_status_gets_it_with_the_incident(tmp_path: Path) -> None:
    env = {"SGLANG_CRASHKIT_EXIT_STATUS": "upstream"}
    left = break_one("0.5.23", tmp_path, send(SCHEDULER), requests=1, env=env)
    assert left.status == -signal.SIGKILL
    assert left.left == []
    assert left.incident["complete"] is True
    assert left.incident["verdict"]["first_failure"]["title"] == SCHEDULER
