from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_crashkit.capture.gpu_facts import GpuFacts
from sglang_crashkit.doctor.facts import EndFacts, Facts, Installation, ServerFacts, SharedMemoryFacts, TracingFacts
from sglang_crashkit.doctor.folder_facts import FolderFacts
from sglang_crashkit.doctor.rules import (
    Finding,
    check_variables,
    has_problem,
    judge,
    policy_table,
)
from sglang_crashkit.policy import Event, Mode, decide
from sglang_crashkit.settings import Settings

GB = 1 << 30
FOLDER = FolderFacts("/crash", file_system="ext4", total=100 * GB, free=50 * GB, max_use=4 * GB, keep_free=GB)
SERVER = ServerFacts(7, ("python", "-m", "sglang.launch_server"), Mode.SERVER, 8)


def facts(environ: dict[str, str] | None = None, **changes: Any) -> Facts:
    """Return the facts, with some of them changed."""
    environ = environ or {}
    healthy = Facts(
        installation=Installation("patched", "SGLang 0.5.23", range="19 releases, 0.5.9 to 0.5.23"),
        servers=(SERVER,),
        environ=environ,
        arguments=("--crash-dump-folder", "/crash"),
        settings=Settings.from_environ(environ),
        tracing=TracingFacts("/bin/py-spy", "py-spy 0.4.2"),
        has_gpu=True,
        gpu=GpuFacts({"version": "580.1", "gpus": 8}),
        debugger="cuda-gdb",
        debugger_missing="",
        folder=FOLDER,
        has_own_folder=True,
        shared_memory=SharedMemoryFacts(64 * GB, 60 * GB, "tmpfs"),
        end=EndFacts(90.0, "systemd", "sglang.service"),
        place={},
    )
    return replace(healthy, **changes)


def findings_on(topic: str, its: Facts) -> list[Finding]:
    """Return what is found of one topic."""
    return [finding for finding in judge(its) if finding.topic == topic]


def test_a_warning_is_no_problem() -> None:
    assert not has_problem([Finding("warning", "a", "b")])
    assert has_problem([Finding("ok", "a", "b"), Finding("problem", "a", "b")])


KUBERNETES = {"kubernetes": {"pod_uid": "1"}}


def test_nothing_is_wrong_where_nothing_is() -> None:
    findings = judge(facts())
    assert {finding.level for finding in findings} <= {"ok", "note"}
    assert not has_problem(findings)


def test_whatever_is_wrong_says_why() -> None:
    spoilt = facts(
        installation=Installation("", "no SGLang", "name it"),
        servers=(replace(SERVER, handler=None, problem="it has ended"),),
        tracing=TracingFacts(None),
        gpu=GpuFacts(reason="it hangs"),
        has_own_folder=False,
        folder=replace(FOLDER, problem="it cannot be written to", exists=False),
        shared_memory=SharedMemoryFacts(),
        end=EndFacts(10.0, "Slurm"),
    )
    bad = [finding for finding in judge(spoilt) if finding.level in ("warning", "problem")]
    assert len(bad) == 9
    assert all(finding.why and finding.next for finding in bad)


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no SGLang": ("kit", "problem", {"installation": Installation("", "no SGLang")}),
    "not patched": ("kit", "problem", {"installation": Installation("pristine", "SGLang 0.5.23", "apply")}),
    "another kit": ("kit", "warning", {"installation": Installation("patched", "SGLang 0.5.23", "install")}),
    "unsupported": ("release", "problem", {"installation": Installation("unsupported", "SGLang 9", supported=False)}),
    "no handler": ("server 7", "problem", {"servers": (replace(SERVER, handler=None, problem="it has ended"),)}),
    "no py-spy": ("py-spy", "problem", {"tracing": TracingFacts(None)}),
    "py-spy forbidden": ("py-spy", "warning", {"tracing": TracingFacts("p", "1", "Permission denied", 2)}),
    "a driver that hangs": ("GPU", "warning", {"gpu": GpuFacts(reason="it did not answer")}),
    "no GPU": ("GPU", "note", {"has_gpu": False}),
    "gdb alone": ("debugger", "note", {"debugger": "gdb", "debugger_missing": "no cuda-gdb; next: install it"}),
    "no pipe": ("GPU cores", "warning", {"servers": (replace(SERVER, without_pipe={"TP0": "no pipe"}),)}),
    "cores without a folder": ("GPU cores", "warning", {"has_own_folder": False}),
    "a full disk": ("crash folder", "problem", {"folder": replace(FOLDER, free=1 << 20)}),
    "little is free": ("crash folder", "warning", {"folder": replace(FOLDER, free=GB)}),
    "read-only": ("crash folder", "problem", {"folder": replace(FOLDER, problem="it cannot be written to")}),
    "in memory": ("crash folder", "warning", {"folder": replace(FOLDER, file_system="tmpfs")}),
    "in the container": ("crash folder", "warning", {"folder": replace(FOLDER, file_system="overlay")}),
    "on a network": ("crash folder", "note", {"folder": replace(FOLDER, file_system="nfs4")}),
    "without locks": ("crash folder", "warning", {"folder": replace(FOLDER, has_locks=False)}),
    "Docker's shm": ("shared memory", "warning", {"shared_memory": SharedMemoryFacts(64 << 20, 60 << 20, "tmpfs")}),
    "leftovers": ("shared memory", "warning", {"shared_memory": SharedMemoryFacts(GB, GB, "tmpfs", ("torch_1",), 4)}),
    "a short grace": ("grace period", "warning", {"end": EndFacts(30.0, "systemd", "a.service")}),
    "an unknown grace": ("grace period", "note", {"end": EndFacts(None, "Kubernetes")}),
    "no message": ("termination log", "warning", {"place": KUBERNETES, "end": EndFacts(None, "Kubernetes")}),
    "another user": ("server 7", "note", {"servers": (replace(SERVER, is_others=True),)}),
    "another container": ("server 7", "note", {"servers": (replace(SERVER, is_elsewhere=True),)}),
}


@pytest.mark.parametrize(("topic", "level", "changes"), CASES.values(), ids=CASES)
def test_one_thing_that_is_wrong_is_found(topic: str, level: str, changes: dict[str, Any]) -> None:
    found = findings_on(topic, facts(**changes))
    assert level in {finding.level for finding in found}
    # Each says why it matters, and what mends it.
    wrong = [finding for finding in found if finding.level in ("warning", "problem")]
    assert [finding for finding in wrong if not (finding.why and finding.next)] == []


def test_a_server_without_a_handler_has_no_policy() -> None:
    servers = (replace(SERVER, handler=None, problem="it has ended"),)
    (finding,) = findings_on("server 7", facts(servers=servers))
    assert finding.next == ("restart the server",)
    unpatched = Installation("pristine", "SGLang 0.5.23", "sglang-crashkit apply --python /venv/bin/python")
    (finding,) = findings_on("server 7", facts(servers=servers, installation=unpatched))
    assert finding.next == (unpatched.next, "restart the server")


def test_a_server_that_starts_is_no_problem() -> None:
    starting = replace(SERVER, handler=None, problem="it was started without the kit", is_starting=True)
    (finding,) = findings_on("server 7", facts(servers=(starting,)))
    assert finding.level == "note"
    assert "still starting" in finding.what


def test_the_supported_releases_are_counted() -> None:
    (finding,) = findings_on("release", facts())
    assert finding.what == "supported: 19 releases, 0.5.9 to 0.5.23"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (TracingFacts("p", "1", "no", 3), "cannot be changed before"),
        (TracingFacts("p", "1", "no", 2), "sysctl kernel.yama.ptrace_scope=1"),
        (TracingFacts("p", "1", "no", 1, has_seccomp=True), "seccompProfile"),
        (TracingFacts("p", "1", "no"), "--cap-add=SYS_PTRACE"),
        (TracingFacts("p", "1", "no"), 'add: ["SYS_PTRACE"]'),
        (TracingFacts("p", "1", "no"), "srun --container-remap-root"),
    ],
)
def test_the_line_that_lets_pyspy_attach_is_given(found: TracingFacts, words: str) -> None:
    (finding,) = findings_on("py-spy", facts(tracing=found))
    assert any(words in step for step in finding.next)


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (EndFacts(30.0, "systemd", "a.service"), "systemctl edit a.service: [Service] TimeoutStopSec=75"),
        (EndFacts(30.0, "Slurm"), "slurm.conf: KillWait=75"),
        (EndFacts(30.0, "--grace-secs"), "docker stop -t 75; terminationGracePeriodSeconds: 75"),
    ],
)
def test_a_short_grace_period_has_its_line(end: EndFacts, line: str) -> None:
    (finding,) = findings_on("grace period", facts(end=end))
    assert finding.next == (line, "SGLANG_CRASHKIT_EXIT_SECS=15")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "0"),
        ("CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION", "1"),
        ("CUDA_COREDUMP_PIPE", "/tmp/pipe.%t"),
    ],
)
def test_core_variables_that_somebody_set_are_found(name: str, value: str) -> None:
    found = findings_on("GPU cores", facts({name: value}))
    assert [finding.level for finding in found if name in finding.what] == ["warning"]


def test_a_hostile_file_name_is_quoted_in_the_command() -> None:
    left = SharedMemoryFacts(GB, GB, "tmpfs", ("a; rm -rf ~",), 4)
    found = findings_on("shared memory", facts(shared_memory=left))
    assert found[-1].next == ("rm '/dev/shm/a; rm -rf ~'",)


@pytest.mark.parametrize("mode", Mode)
def test_the_rule_table_is_that_of_the_policy(mode: Mode) -> None:
    table = policy_table(mode)
    assert {event: row["ends"] for event, row in table.items()} == {
        event.value: decide(mode, event).ends for event in Event
    }


@pytest.mark.parametrize(
    ("mode", "words"),
    [(Mode.SERVER, "when a rank dies or raises: an incident; the server ends"), (Mode.LIBRARY, "SGLang decides")],
)
def test_what_the_mode_does_at_a_crash_is_told(mode: Mode, words: str) -> None:
    told = findings_on("server 7", facts(servers=(replace(SERVER, mode=mode),)))
    assert words in told[-1].what


OPTION = ["--crash-dump-folder", "/crash"]


def levels(environ: dict[str, str], arguments: list[str] = OPTION) -> list[str]:
    return [finding.level for finding in check_variables(environ, arguments)]


def test_all_is_well_without_any() -> None:
    assert levels({}) == ["ok"]


@pytest.mark.parametrize(
    "environ",
    [
        {"SGLANG_CRASHKIT_ENABLED": "Yes", "SGLANG_CRASHKIT_EXIT_SECS": "60.5", "SGLANG_CRASHKIT_PROMPTS": "IDS"},
        {"SGLANG_CRASHKIT_HANG_SECS": " 30 ", "SGLANG_CRASHKIT_TERMINATION_LOG": "0", "SGLANG_CRASHKIT_SOCKET": "/x"},
    ],
)
def test_what_can_be_read_is_well(environ: dict[str, str]) -> None:
    assert levels(environ) == ["ok"]


def test_a_misspelt_variable_is_named_right() -> None:
    (finding,) = check_variables({"SGLANG_CRASHKIT_HANG_SEC": "5"}, OPTION)
    assert (finding.level, finding.next) == ("warning", ("SGLANG_CRASHKIT_HANG_SECS=5",))


@pytest.mark.parametrize(
    ("environ", "arguments", "level"),
    [
        ({"SGLANG_CRASHKIT_STEPS": "on"}, OPTION, "warning"),
        ({"SGLANG_CRASHKIT_EXIT_SECS": "1m"}, OPTION, "warning"),
        ({"SGLANG_CRASHKIT_ENABLED": "0"}, OPTION, "problem"),
        ({"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}, [], "problem"),
        ({"SGLANG_CRASHKIT_BUDGET_SECS": "120"}, OPTION, "warning"),
        ({"SGLANG_CRASHKIT_HANG_SECS": "0"}, OPTION, "note"),
        ({"SGLANG_CRASHKIT_HANG_SECS": "30"}, [*OPTION, "--watchdog-timeout=20"], "warning"),
        ({"SGLANG_CRASHKIT_MAX_USE_MB": "100"}, OPTION, "warning"),
        ({"SGLANG_CRASHKIT_QUARANTINE": "refuse"}, [], "warning"),
    ],
)
def test_settings_against_each_other_are_found(environ: dict[str, str], arguments: list[str], level: str) -> None:
    assert levels(environ, arguments) == [level]


def test_no_default_is_warned_of() -> None:
    assert levels({"SGLANG_CRASHKIT_EXIT_SECS": "15"}) == ["ok"]
    (finding,) = check_variables({}, [*OPTION, "--watchdog-timeout=20"])
    assert (finding.level, finding.next) == ("note", ("SGLANG_CRASHKIT_HANG_SECS=10",))


@pytest.mark.parametrize("name", ["SGLANG_CRASHKIT_WEBHOOK", "SGLANG_CRASHKIT_WEBHOOK_SECRT"])
def test_what_may_be_a_key_is_not_shown(name: str) -> None:
    (finding,) = check_variables({name: "hunter2"}, OPTION)
    assert finding.level == "warning"
    assert "hunter2" not in repr(finding)
