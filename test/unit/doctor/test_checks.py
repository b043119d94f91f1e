from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.doctor import checks
from sglang_crashkit.doctor.checks import CHECKS, Result, Target, check_cores, look_at_folder
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.kernel.shared_memory import OrphanedSegment
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.settings import DiskLimits
from unit.support.command import Cli

SERVE = ("python", "-m", "sglang.launch_server")
RANK = FoundProcess(9, 1, "sglang::scheduler_TP0", "scheduler", {}, os.getpid(), SERVE, os.geteuid(), "title")


def target(environ: dict[str, str] | None = None, **changes: Any) -> Target:
    healthy = Target(os.getpid(), {}, {}, environ or {}, SERVE, Path("/crash"))
    return replace(healthy, **changes)


def found(topic: str, of: Target) -> list[Result]:
    return list(CHECKS[topic](of))


def test_the_machine_is_checked(tmp_path: Path, cli: Cli) -> None:
    said = cli("doctor", "--crash-dump-folder", tmp_path, "--json", status=None)
    told = said.json
    by_topic = {one["topic"]: one for one in told["findings"]}
    assert by_topic.keys() >= {"kit", "server", "py-spy", "GPU", "crash folder", "shared memory", "end", "settings"}
    assert (by_topic["py-spy"]["level"], by_topic["crash folder"]["level"], by_topic["end"]["level"]) == ("ok",) * 3
    assert (said.status, told["healthy"]) == (
        (1, False) if "problem" in {one["level"] for one in told["findings"]} else (0, True)
    )


def test_a_problem_is_the_exit_status_with_its_path_escaped(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "a\x1b[2J").write_text("")
    text = cli("doctor", "--crash-dump-folder", tmp_path / "a\x1b[2J", status=1).out
    assert re.search(r"problem  crash folder: .*\n +next: df -h ", text)
    assert re.search(r"result   \d problem\(s\), \d warning\(s\)", text)
    assert "\x1b" not in text


def test_a_process_of_no_server_is_nothing_to_look_at(cli: Cli) -> None:
    assert "belongs to no server" in cli("doctor", "--pid", os.getpid(), status=3).err


@pytest.mark.parametrize(
    ("handlers", "changes", "ok", "words"),
    [
        ({9: (12, "")}, {}, True, "is watched by crash handler 12"),
        ({9: (12, "its crash handler has ended")}, {}, False, "its crash handler has ended"),
        ({}, {}, False, "without the kit"),
        ({}, {"way": "command line"}, True, "is still starting"),
    ],
)
def test_each_server_is_told_with_its_crash_handler(
    handlers: dict[int, tuple[int | None, str]], changes: dict[str, Any], ok: bool, words: str
) -> None:
    told = found("server", target(servers={os.getpid(): [replace(RANK, **changes)]}, handlers=handlers))
    assert [one.ok for one in told if words in one.words] == [ok]
    assert all(one.command for one in told if one.ok is not True)


def test_without_pyspy_there_may_be_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_pyspy", lambda: None)
    assert found("py-spy", target())[0][::2] == (False, "pip install py-spy")
    assert found("py-spy", target({"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}))[0].ok


def test_the_lines_that_let_pyspy_attach_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = Sample(pid=1, problem="Permission denied")
    monkeypatch.setattr(checks, "sample_all", lambda *_args: [denied])
    (told,) = found("py-spy", target())
    assert (told.ok, "Permission denied" in told.words) == (None, True)
    for words in ("sysctl kernel.yama", "--cap-add=SYS_PTRACE", "seccompProfile", "--container-remap-root"):
        assert words in told.command


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "0"),
        ("CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION", "1"),
    ],
)
def test_core_variables_that_somebody_set_are_found(name: str, value: str) -> None:
    (told,) = check_cores(target({name: value}))
    assert told[::2] == (None, f"unset {name}")


def test_a_crash_folder_in_memory_or_without_room_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_memory = list(look_at_folder(Path("/dev/shm/absent/folder"), DiskLimits()))
    assert [one.ok for one in in_memory if "it is on tmpfs" in one.words] == [None]
    assert not list(Path("/dev/shm").glob(".doctor-*"))
    monkeypatch.setattr(checks, "limits_on", lambda *_args: (1 << 60, 1 << 60))
    (few, *_rest) = look_at_folder(tmp_path, DiskLimits(max_incident=1 << 20))
    assert (few.ok, "KEEP_FREE" in few.words) == (None, True)
    (full, *_rest) = look_at_folder(tmp_path, DiskLimits(max_incident=1 << 59))
    assert (full.ok, "has no room" in full.words) == (False, True)


def test_a_disk_that_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "FOLDER_SECS", 0.05)
    monkeypatch.setattr(checks, "look_at_folder", lambda *_args: os.read(os.pipe()[0], 1))
    (told,) = found("crash folder", target(crash_folder=tmp_path))
    assert (told.ok, "did not answer within 0.05 s" in told.words) == (False, True)


def test_only_what_is_certainly_gone_has_a_command_that_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [OrphanedSegment("a; rm -rf ~", 4, ""), OrphanedSegment("torch_7_1_1", 4, "another container may use it")]
    monkeypatch.setattr(checks.shared_memory, "of_gone", lambda: left)
    gone, unknown = found("shared memory", target())[1:]
    assert gone[::2] == (None, "rm '/dev/shm/a; rm -rf ~'")
    assert (unknown.ok, unknown.command) == (True, "")
    assert "cannot be told from here: another container may use it" in unknown.words


@pytest.mark.parametrize(
    ("environ", "changes", "ok", "command"),
    [
        ({}, {}, True, ""),
        ({"SGLANG_CRASHKIT_ENABLED": "Yes", "SGLANG_CRASHKIT_HANG_SECS": " 30 "}, {}, True, ""),
        ({"SGLANG_CRASHKIT_HANG_SEC": "5"}, {}, None, "SGLANG_CRASHKIT_HANG_SECS=..."),
        ({"SGLANG_CRASHKIT_STEPS": "on"}, {}, None, "unset SGLANG_CRASHKIT_STEPS"),
        ({"SGLANG_CRASHKIT_ENABLED": "0"}, {}, False, "unset SGLANG_CRASHKIT_ENABLED"),
        (
            {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"},
            {"crash_folder": None},
            False,
            "unset SGLANG_PYSPY_DUMP_BEFORE_CRASH\n--crash-dump-folder FOLDER",
        ),
        ({}, {"arguments": (*SERVE, "--watchdog-timeout=20")}, None, "SGLANG_CRASHKIT_HANG_SECS=10"),
        ({"SGLANG_CRASHKIT_HANG_SECS": "0"}, {}, True, ""),
    ],
)
def test_settings_that_cannot_work_are_found(
    environ: dict[str, str], changes: dict[str, Any], ok: bool | None, command: str
) -> None:
    (told,) = found("settings", target(environ, **changes))
    assert told[::2] == (ok, command)
