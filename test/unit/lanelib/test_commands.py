from __future__ import annotations

import os
import re
import sys

import pytest

from lanelib import commands, procs
from lanelib.commands import NO_END, LaneError, run_command, run_in_terminal
from lanelib.paths import RECIPES
from unit.support.waiting import LONG, wait_until


def test_children_are_killed_at_the_deadline(tmp_path):
    source = "sleep 600 & echo $! > $0; exec sleep 600"
    with pytest.raises(LaneError, match="no end after 1 s"):
        run_command(["sh", "-c", source, tmp_path / "pid"], timeout_s=1)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: procs.alive(one for one in [procs.read_process(pid)] if one) == [], "the child is gone")


def test_uv_trusts_what_the_system_trusts():
    # Behind a proxy whose authority is in the system's store alone, uv by itself knows no issuer.
    source = "import os; print(os.environ['UV_SYSTEM_CERTS'])"
    assert run_command([sys.executable, "-c", source], timeout_s=LONG).strip() == "true"


@pytest.mark.parametrize("ignored", ["", "import signal; signal.signal(2, signal.SIG_IGN); "])
def test_a_check_is_interrupted_at_its_end_and_then_killed(monkeypatch, capsys, ignored):
    monkeypatch.setattr(commands, "END_S", 1)
    source = f"{ignored}import time; time.sleep(600)"
    assert run_in_terminal([sys.executable, "-c", source], timeout_s=1, env=os.environ) == NO_END
    assert "no end after 1 s" in capsys.readouterr().err
    assert run_in_terminal([sys.executable, "-c", "raise SystemExit(5)"], timeout_s=LONG, env=os.environ) == 5


#: A pinned requirement, without an address.
PIN = re.compile(r"[a-z0-9][a-z0-9._-]*==[\w.+!]+( ; [\w.' <>=!]+)?")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.lock")), ids=lambda path: path.name)
def test_a_lock_holds_exact_versions_and_no_addresses(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if not PIN.fullmatch(line)] == []
