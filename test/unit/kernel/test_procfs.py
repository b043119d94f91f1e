from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.procfs import key_of, own_namespace
from unit.support.targets import UNDUMPABLE, run_unprivileged
from unit.support.waiting import LONG, child, wait_until


def test_a_stat_line_with_parentheses_is_read_right(tmp_path: Path) -> None:
    program = tmp_path / "a) Z (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        try:
            stat = wait_until(
                lambda: (found := procfs.read_stat(process.pid)) and found.comm == "a) Z (b" and found, "it is executed"
            )
        finally:
            process.kill()
    assert stat
    assert (stat.pid, stat.ppid, stat.threads) == (process.pid, os.getpid(), 1)
    assert stat.state in "SRD"


@pytest.mark.parametrize(
    ("cmdline", "title"),
    [
        (["sglang::scheduler_TP0"], "sglang::scheduler_TP0"),
        (["sglang::scheduler_TP0   "], "sglang::scheduler_TP0"),
        (["/usr/bin/python3", "-m", "sglang.launch_server", "--api-key", "secret"], "python3 -m sglang.launch_server"),
        (["python3", "-u", "-m", "sglang.launch_server", "--api-key", "secret"], "python3 -m sglang.launch_server"),
        (["python", "/opt/app/serve.py", "secret"], "python serve.py"),
        (["python3.11", "/opt/bin/sglang", "serve", "secret"], "python3.11 sglang"),
        (["python", "-c", "print('secret')"], "python -c ..."),
        (
            ["python", "-c", "from multiprocessing.spawn import spawn_main; ...", "secret"],
            "python -c multiprocessing.spawn",
        ),
        (["python", "-X", "secret", "x.py"], "python x.py"),
        (["python", "token=secret"], "python"),
        (["python", "-m"], "python"),
        (["/usr/bin/curl", "https://user:secret@host/secret"], "curl"),
        (["login", "secret"], "login"),
        (["git", "commit", "-m", "secret"], "git"),
        (["tool", "-m", "secret"], "tool"),
        (
            ["python3 -m sglang.launch_server --crash-dump-folder /a/b --api-key secret"],
            "python3 -m sglang.launch_server",
        ),
        (["/opt/tool --key /secret"], "tool"),
        (["python -c from multiprocessing.spawn import spawn_main; spawn_main()"], "python -c multiprocessing.spawn"),
        (["python -c multiprocessing.spawn"], "python -c multiprocessing.spawn"),
        (["  "], "comm"),
        ([], "comm"),
        ([""], "comm"),
    ],
)
def test_a_title_keeps_no_argument_that_may_be_secret(cmdline: list[str], title: str) -> None:
    assert procfs.title_of(cmdline, "comm") == title


GRANDCHILD = """
import subprocess
import sys
import time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
ready(inner.pid)
sys.stdin.readline()
inner.kill(); inner.wait()
print("gone", flush=True)
sys.stdin.readline()
"""


def test_a_scan_finds_descendants_and_forgets_ended_ones() -> None:
    with child(GRANDCHILD) as process:
        inner = int(process.first_line)  # type: ignore[attr-defined]
        scanner = procfs.TreeScanner(process.pid)
        assert scanner.scan() == {process.pid, inner}
        assert scanner.scan() == {process.pid, inner}
        assert {process.pid, inner} <= procfs.TreeScanner(os.getpid()).scan()
        assert not {process.pid, inner} & procfs.TreeScanner(os.getpid(), without=process.pid).scan()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"gone\n"
        assert scanner.scan() == {process.pid}
    assert scanner.scan() == set()


def test_without_permission_python_is_known_but_not_inspected() -> None:
    code = "import sys; from sglang_crashkit.kernel import procfs\n"
    code += "print(*[(procfs.is_python(int(pid)), procfs.may_inspect(int(pid))) for pid in sys.argv[1:]])"
    with subprocess.Popen(["true"]) as dead:
        dead.wait(LONG)
    with (
        child(UNDUMPABLE + "ready(); pause()") as plain,
        child(UNDUMPABLE + "ready(); pause()", title="sglang::x") as own,
    ):
        said = run_unprivileged(code, str(plain.pid), str(own.pid), str(dead.pid))
    assert said == "(True, False) (True, False) (False, True)\n"
    assert procfs.may_inspect(os.getpid())


#: Tells the key that it gives itself.
OWN_KEY = """
from sglang_crashkit.kernel import procfs
stat = procfs.read_stat(os.getpid())
ready(procfs.server_key(stat.pid, stat.start_ticks))
pause()
"""


def test_a_process_has_the_same_key_from_inside_and_outside() -> None:
    with child(OWN_KEY) as process:
        stat = procfs.read_stat(process.pid)
        assert key_of(stat.pid, stat.start_ticks) == process.first_line  # type: ignore[attr-defined]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace")
def test_process_1_of_each_container_has_its_own_key() -> None:
    keys = []
    for _ in range(2):
        with child(OWN_KEY, wrapper=("unshare", "-pf", "--mount-proc", "--kill-child")) as process:
            key: str = process.first_line  # type: ignore[attr-defined]
            (inside,) = procfs.TreeScanner(process.pid).scan() - {process.pid}
            stat = procfs.read_stat(inside)
            assert key.startswith(f"1-{stat.start_ticks}-")
            assert not key.endswith(f"-{own_namespace()}")
            assert key_of(inside, stat.start_ticks) == key
            keys.append(key)
    assert keys[0] != keys[1]
