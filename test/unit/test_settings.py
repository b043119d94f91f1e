from __future__ import annotations

import os
import tempfile

import pytest

from sglang_crashkit import settings
from sglang_crashkit.settings import Settings, earlier_names_in, read_bool, read_seconds


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "Yes", "y", " 1 "])
def test_true_is_read_as_sglang_reads_it(text: str) -> None:
    assert read_bool({"X": text}, "X", False) is True


@pytest.mark.parametrize("text", ["0", "false", "False", "NO", "n"])
def test_false_is_read_as_sglang_reads_it(text: str) -> None:
    assert read_bool({"X": text}, "X", True) is False


@pytest.mark.parametrize("environ", [{}, {"X": ""}, {"X": "maybe"}, {"X": "2"}])
@pytest.mark.parametrize("default", [True, False])
def test_what_cannot_be_read_counts_as_unset(environ: dict[str, str], default: bool) -> None:
    assert read_bool(environ, "X", default) is default


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("2.5", 2.5), (" 3 ", 3.0), ("1e1", 10.0)])
def test_seconds_are_read(text: str, seconds: float) -> None:
    assert read_seconds({"X": text}, "X", 7.0) == seconds


@pytest.mark.parametrize("text", ["", "abc", "-1", "nan", "inf", "-inf", "1s"])
def test_seconds_that_are_none_count_as_unset(text: str) -> None:
    assert read_seconds({"X": text}, "X", 7.0) == 7.0


def test_the_defaults() -> None:
    assert Settings.from_environ({}) == Settings(
        enabled=True,
        diagnostics=True,
        stacks=True,
        cores=True,
        core_wait_secs=60.0,
        budget_secs=20.0,
        capture_secs=1.5,
    )


def test_either_of_upstreams_diagnostics_keeps_the_kit_awake() -> None:
    stacks, cores = "SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    assert Settings.from_environ({stacks: "0"}).diagnostics
    assert not Settings.from_environ({stacks: "0"}).stacks
    assert Settings.from_environ({cores: "0"}).diagnostics
    assert not Settings.from_environ({cores: "0"}).cores
    assert not Settings.from_environ({stacks: "0", cores: "0"}).diagnostics


def test_every_setting_has_its_variable() -> None:
    environ = {
        "SGLANG_CRASHKIT_ENABLED": "no",
        "SGLANG_CRASHKIT_PEER_WATCH": "no",
        "SGLANG_CRASHKIT_BUDGET_SECS": "3",
        "SGLANG_CRASHKIT_CAPTURE_SECS": "0.5",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "7",
        "SGLANG_CRASHKIT_HANG_SECS": "8.5",
        "SGLANG_CRASHKIT_EXIT_SECS": "9",
        "SGLANG_CRASHKIT_GPU_FACTS": "0",
        "SGLANG_CRASHKIT_HTML": "1",
    }
    read = Settings.from_environ(environ)
    assert (read.hang_secs, Settings.from_environ({}).hang_secs) == (8.5, 60.0)
    assert (read.peer_watch, Settings.from_environ({}).peer_watch) == (False, True)
    assert (read.enabled, read.budget_secs, read.capture_secs, read.core_wait_secs) == (False, 3.0, 0.5, 7.0)
    assert (read.gpu_facts, Settings.from_environ({}).gpu_facts) == (False, True)
    assert (read.html, Settings.from_environ({}).html) == (True, False)
    assert (read.exit_secs, Settings.from_environ({}).exit_secs) == (9.0, 60.0)


def test_a_variable_is_read_under_its_earlier_name_where_it_is_not_set() -> None:
    earlier, name = "SGLANG_CRASHKIT_PHOTOGRAPH_SECS", "SGLANG_CRASHKIT_CAPTURE_SECS"
    assert Settings.from_environ({earlier: "0.5"}).capture_secs == 0.5
    assert Settings.from_environ({earlier: "0.5", name: "4"}).capture_secs == 4.0
    assert earlier_names_in({earlier: "0.5"}) == {earlier: name}
    assert earlier_names_in({name: "0.5"}) == {}


def test_the_environment_is_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_BUDGET_SECS", "4")
    assert Settings.from_environ().budget_secs == 4.0


def test_the_socket_follows_from_pid_and_start_time_and_has_room_in_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    first, second = settings.socket_path(4194304, 2**40), settings.socket_path(4194304, 2**40 + 1)
    assert first != second
    assert first == settings.runtime_folder(4194304, 2**40) / "handler.sock"
    assert len(str(first)) <= 107


def test_a_temporary_folder_that_is_too_deep_for_a_socket_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    path = settings.socket_path(1, 2)
    assert path.parent == settings.runtime_folder(1, 2)
    assert str(path).startswith(f"/tmp/sglang-crashkit-{os.getuid()}/run/")


@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), ("", None), ("x", None), ("1", True), ("true", True), ("0", False)]
)
def test_native_stacks_are_wanted_or_not_or_left_to_the_case(value: str | None, expected: bool | None) -> None:
    environ = {} if value is None else {"SGLANG_CRASHKIT_NATIVE": value}
    assert Settings.from_environ(environ).native is expected


@pytest.mark.parametrize(
    ("value", "expected"), [("45", 45), ("0", 0), (" 50 ", 50), ("-1", 7), ("x", 7), ("", 7), ("²", 7), ("9" * 5000, 7)]
)
def test_a_number_is_read_or_the_default_is_taken(value: str, expected: int) -> None:
    assert settings.read_number({"N": value}, "N", 7) == expected
    assert settings.read_number({}, "N", 7) == 7


@pytest.mark.parametrize(
    ("text", "megabytes"), [("1", 1.0), ("2.5", 2.5), ("1024", 1024.0), ("0", 32.0), ("1025", 32.0), ("much", 32.0)]
)
def test_the_size_of_the_journal_is_read(text: str, megabytes: float) -> None:
    assert Settings.from_environ({"SGLANG_CRASHKIT_JOURNAL_MB": text}).journal_mb == megabytes


def test_the_journal_has_its_flag() -> None:
    assert Settings.from_environ({}).journal
    assert not Settings.from_environ({"SGLANG_CRASHKIT_JOURNAL": "0"}).journal


@pytest.mark.parametrize(
    ("text", "prompts"), [("", "full"), ("full", "full"), (" IDS ", "ids"), ("none", "none"), ("idz", "none")]
)
def test_what_is_kept_of_prompts_is_read_and_a_typing_error_keeps_back_all(text: str, prompts: str) -> None:
    assert Settings.from_environ({}).prompts == "full"
    assert Settings.from_environ({"SGLANG_CRASHKIT_PROMPTS": text}).prompts == prompts
