from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.identity_key import key_of, own_namespace, server_key
from unit.support.waiting import LONG, child

_CONTAINER = ["unshare", "-pf", "--mount-proc", "--kill-child"]
_OWN_KEY = """
import os
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.identity_key import server_key
stat = procfs.read_stat(os.getpid())
"""


def test_a_key_names_pid_start_time_and_namespace() -> None:
    assert server_key(7, 1234) == f"7-1234-{Path('/proc/self/ns/pid').stat().st_ino}"


def test_a_process_has_the_same_key_from_inside_and_outside() -> None:
    code = _OWN_KEY + "ready(server_key(stat.pid, stat.start_ticks)); pause()"
    with child(code) as process:
        stat = procfs.read_stat(process.pid)
        assert key_of(stat.pid, stat.start_ticks) == process.first_line  # type: ignore[attr-defined]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace")
def test_process_1_of_each_container_has_its_own_key() -> None:
    code = _OWN_KEY + "print(server_key(stat.pid, stat.start_ticks), flush=True); import sys; sys.stdin.read()"
    keys = []
    for _ in range(2):
        with subprocess.Popen(
            [*_CONTAINER, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            key = process.stdout.readline().strip()
            (inside,) = procfs.TreeScanner(process.pid).scan() - {process.pid}
            stat = procfs.read_stat(inside)
            assert key.startswith(f"1-{stat.start_ticks}-")
            assert not key.endswith(f"-{own_namespace()}")
            assert key_of(inside, stat.start_ticks) == key
            process.stdin.close()
            process.wait(LONG)
            keys.append(key)
    assert keys[0] != keys[1]
