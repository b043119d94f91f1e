from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_crashkit.doctor.facts import Installation, gather, read_installation, seconds_of, server_facts
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.policy import Mode

SERVE = ("python", "-m", "sglang.launch_server")


def process(pid: int, title: str, arguments: tuple[str, ...] = SERVE) -> FoundProcess:
    return FoundProcess(pid, 1, title, "scheduler", {}, 7, arguments, 0, "title")


@pytest.mark.parametrize(
    ("text", "secs"), [("1min 30s", 90.0), ("5s", 5.0), ("500ms", 0.5), ("2h", 7200.0), ("infinity", None), ("", None)]
)
def test_a_time_span_of_systemd_is_read(text: str, secs: float | None) -> None:
    assert seconds_of(text) == secs


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    facts = gather(Installation("patched", "x"), [], crash_folder=tmp_path / "crash", grace_secs=5.0, environ={})
    assert facts.tracing.problem == ""
    assert facts.tracing.version.startswith("py-spy")
    assert (facts.folder.problem, facts.folder.path) == ("", str(tmp_path / "crash"))
    assert facts.end.grace_secs == 5.0
    assert facts.shared_memory.total > 0
    assert "--crash-dump-folder" in facts.arguments


def test_the_default_crash_folder_is_the_temporary_one() -> None:
    facts = gather(Installation("patched", "x"), [], environ={})
    assert not facts.has_own_folder
    assert facts.folder.path.endswith(f"sglang-crashkit-{os.getuid()}")


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        (SERVE, Mode.SERVER),
        ((*SERVE, "--elastic-ep-backend", "mooncake"), Mode.ELASTIC),
        ((*SERVE, "--elastic-ep-backend", "none"), Mode.SERVER),
        (("python", "train.py"), Mode.LIBRARY),
    ],
)
def test_the_mode_follows_from_the_command_line(arguments: tuple[str, ...], mode: Mode) -> None:
    (server,) = server_facts([process(9, "sglang::scheduler_TP0", arguments)], {})
    assert server.mode is mode


def test_a_server_has_the_handler_that_its_worker_knows() -> None:
    workers = [process(9, "sglang::scheduler_TP0"), process(10, "sglang::scheduler_TP1")]
    (watched,) = server_facts(workers, {10: (12, "")})
    (alone,) = server_facts(workers, {99: (12, "")})
    assert (watched.handler, watched.problem) == (12, "")
    assert alone.handler is None
    assert "without the kit" in alone.problem


def test_a_server_whose_ranks_have_no_title_yet_is_starting() -> None:
    launched = replace(process(7, "python -m sglang.launch_server"), role="server", way="command line")
    spawned = replace(process(9, "python -c multiprocessing.spawn"), way="command line")
    (server,) = server_facts([launched, spawned], {})
    assert server.is_starting
    (server,) = server_facts([launched, process(9, "sglang::scheduler_TP0")], {})
    assert not server.is_starting


def test_a_python_without_sglang_is_no_installation() -> None:
    found = read_installation(None)
    assert (found.state, "no SGLang" in found.words) == ("", True)
    assert found.next


#: Has the kernel deny this process, and its children, one system call with EPERM; see seccomp(2).
DENY = """
import ctypes, json, struct, sys
code = b"".join(struct.pack("HBBI", *one) for one in (
    (0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)))
kept = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", 4, ctypes.addressof(kept))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0, ctypes.get_errno()
from dataclasses import asdict
from sglang_crashkit.doctor.facts import _read_tracing
print(json.dumps(asdict(_read_tracing())))
"""
PROCESS_VM_READV = 310


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the system call has another number on other machines")
def test_pyspy_reads_proc_where_seccomp_denies_the_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DENY, str(PROCESS_VM_READV)], capture_output=True, text=True, timeout=60, check=True
    )
    told = json.loads(done.stdout)
    assert told["has_seccomp"] is True
    assert told["problem"] == ""


def test_a_pyspy_that_may_not_look_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "py-spy"
    script.write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("SGLANG_CRASHKIT_PYSPY", str(script))
    tracing = gather(Installation("patched", "x"), [], environ={}).tracing
    assert "Permission Denied" in tracing.problem
