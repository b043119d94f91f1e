"""What ``collect --via ssh`` began on a host ends there where it is interrupted here."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_crashkit
from integration.commands.loopback_sshd import Sshd, why_not
from sglang_crashkit.kernel.procfs import is_running
from unit.support.targets import SLEEPER, TITLE, settle_in_sleep, state_of
from unit.support.waiting import LONG, child, wait_until

pytestmark = pytest.mark.wide

#: The kit on the host: it notes its pid, and collects one process. The last of two equal options counts.
KIT = """#!/bin/sh
echo $$ > {folder}/pid.new && mv {folder}/pid.new {folder}/pid
export PYTHONPATH={package}
exec {python} -m sglang_crashkit "$@" --pid={pid} --output-dir={folder}/there
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_collector_on_the_host_ends_with_the_one_here(tmp_path: Path, how: signal.Signals) -> None:
    if reason := why_not():
        pytest.skip(reason)
    kit = tmp_path / "kit"
    package = Path(sglang_crashkit.__file__).parents[1]
    with child(SLEEPER, title=TITLE) as rank, Sshd(tmp_path, ["h0"]) as sshd:
        settle_in_sleep(rank.pid)
        kit.write_text(KIT.format(folder=tmp_path, package=package, python=sys.executable, pid=rank.pid))
        kit.chmod(0o755)
        command = [sys.executable, "-m", "sglang_crashkit", "collect", "--interval=600", "--hosts=h0"]
        command += [
            f"--via={shlex.join([*sshd.command, '{host}'])}",
            f"--remote-command={kit}",
            f"-o{tmp_path / 'out'}",
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as here:
            wait_until(lambda: bool(list(tmp_path.glob("there/snapshot_*"))), "there is a snapshot on the host")
            there = int((tmp_path / "pid").read_text())
            assert is_running(there)
            here.send_signal(how)
            here.wait(LONG)
        wait_until(lambda: not is_running(there), "the collector on the host ended")
        assert state_of(rank.pid) == "S"
