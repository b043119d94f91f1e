from __future__ import annotations

import os
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


def test_a_crash_folder_that_was_given_by_nobody_is_the_temporary_one() -> None:
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


def test_a_server_has_the_handler_that_one_of_its_workers_knows() -> None:
    workers = [process(9, "sglang::scheduler_TP0"), process(10, "sglang::scheduler_TP1")]
    (watched,) = server_facts(workers, {10: (12, "")})
    (alone,) = server_facts(workers, {99: (12, "")})
    assert (watched.handler, watched.problem) == (12, "")
    assert alone.handler is None
    assert "without the kit" in alone.problem


def test_a_python_without_sglang_is_no_installation() -> None:
    found = read_installation(None)
    assert (found.state, "no SGLang" in found.words) == ("", True)
    assert found.next
