"""Every probe says no, upstream and kit, each of a tree that is so, and does not take a hook's look for its effect."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from featurelib import crash_probes, probes
from featurelib.finding import ABSENT, Finding, kit, upstream
from featurelib.probes import FEATURES
from featurelib.sglangsource import HOOK_FILE, SglangTree

MANAGER = "srt/managers/tokenizer_manager.py"
ROUTER = "srt/managers/multi_tokenizer_mixin.py"
CONTROLLER = "srt/managers/data_parallel_controller.py"
SCHEDULER = "srt/managers/scheduler.py"
ENGINE = "srt/entrypoints/engine.py"
DIAGNOSTICS = "srt/utils/cudacore_pyspy_dump_utils.py"
COMMON = "srt/utils/common.py"
WATCHDOG = "srt/utils/watchdog.py"
FIXTURE = "test/server_fixtures/disaggregation_fixture.py"
UTILITIES = "test/test_utils.py"

HANDLER = """
    import os

    def main():
        os.pidfd_open(1)
        write("incident.json", "summary.md")
"""
#: One function for each thing that a hook may come to; `idle` comes to nothing.
HOOKS = """
    import os
    import traceback

    def start(): run("-m", "sglang_crashkit.handler")
    def save(): os.open("file", 0o600)
    def extend(router): router.dump_requests_before_crash = save
    def core(): os.environ.get("CUDA_COREDUMP_PIPE")
    def flags(): return {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION",
    }
    def record(): traceback.format_exception_only(ValueError())
    def kill(): os.killpg(1, 9)
    def wake(): os.pidfd_open(1)
    def limit(settings): settings.startup_timeout_secs
    def wait(arguments): arguments.pop("wait_timeout")
    def tell(): notify("pair")
    def beat(scheduler, requests): os.memfd_create("beat")
    def idle(): ...

    def _resolve_cuda_coredump_pipe_path(): ...
    def _is_sglang_scheduler_process(): ...
    def collect_scheduler_processes(): ...
    def pyspy_dump_schedulers(): ...
    def trigger_cuda_user_coredump(): ...
"""
PLUGIN = '[project.entry-points.pytest11]\nsglang_crashkit = "sglang_crashkit.plugin"\n'
KIT = {"hooks.py": HOOKS, "handler/__main__.py": HANDLER}
IMPORT = "from sglang.srt.crashkit import {}\n"
NAMES = (
    *("beat", "core", "extend", "flags", "gone", "idle", "kill", "limit"),
    *("record", "save", "start", "tell", "wait", "wake"),
)
HOOK_TABLE = repr({"stand_in": ("few", None)} | dict.fromkeys(NAMES, ("hooks", None)))
STARTED = {ENGINE: IMPORT.format("start") + "def launch():\n    start()\n"}

ROUND = """
class Scheduler:
    def process_input_requests(self, recv_reqs):
        {}
"""
WAYS = """
class SignalHandler:
    def running_phase_sigquit_handler(self):
        self.manager.dump_requests_before_crash()

async def print_exception_wrapper(func):
    func.__self__.dump_requests_before_crash()
"""


def manager(body: str, *, decorator: str = "", watchdog: str = "self.dump_requests_before_crash()") -> str:
    hook = f"    @{decorator}\n" if decorator else ""
    return (
        f"{IMPORT.format(decorator) if decorator else ''}"
        f"class TokenizerManager:\n{hook}"
        f"    def dump_requests_before_crash(self):\n        {body}\n"
        f"    async def sigterm_watchdog(self):\n        {watchdog}\n{WAYS}"
    )


def hooked(name: str, text: str) -> str:
    return IMPORT.format(name) + textwrap.dedent(text)


def flagged(extra: str = "") -> str:
    return (
        "class Envs:\n"
        "    SGLANG_PYSPY_DUMP_BEFORE_CRASH = EnvBool(True)\n"
        "    SGLANG_CUDA_COREDUMP_BEFORE_CRASH = EnvBool(True)\n"
        "    SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS = EnvFloat(60.0)\n"
        f"    {extra}\n"
    )


DUMPS = "def pyspy_dump_schedulers(scheduler_only):\n    subprocess.run(command{})\n"
FUNCTIONS = "".join(f"def {name}(): ...\n" for name in sorted(crash_probes._DIAGNOSTIC_FUNCTIONS))
RAISES = """
    def run_scheduler_process():
        try:
            loop()
        except Exception:
            {}
            parent_process.send_signal(signal.SIGQUIT)
            {}
"""
WATCHES = """
    class WatchdogRaw:
        def _watchdog_once(self):
            {}
"""
CHILDREN = """
    class SubprocessWatchdog:
        def __init__(self, processes, process_names=None, interval: float = 1.0): ...
"""
WAIT = "def _wait_for_scheduler_ready(readers, procs):\n    {}\n"
GROUP = """
    class DataParallelController:
        def launch_tensor_parallel_group(self):
            {}
"""
REAP = "def _wait_for_reap_or_raise(procs, wait_timeout):\n    {}\n"
QUEUE = "class {}:\n    def __init__(self):\n        {}\n"
PEERS = (
    (probes.lost_prefill_told, "decode", "DecodePreallocQueue", "self._handle_node_failure(address)", "by heartbeat"),
    (probes.lost_decode_told, "prefill", "PrefillBootstrapQueue", "self.failed_sessions.add(session)", "when it sends"),
)
PAIR = """
    class PDDisaggregationServerBase:
        def setUpClass(cls):
            {}
        def launch_all(cls):
            cls.start_prefill()
            {}
            cls.launch_lb()
            {}
        def tearDownClass(cls):
            {}
"""
WATCHER = "start_subprocess_fail_fast_watcher([])"
COMMANDS = 'COMMANDS = ("apply", {})\n'


@dataclass(frozen=True)
class Case:
    """A tree, and what a probe says of it."""

    probe: Callable[[SglangTree], Finding]
    finding: Finding
    files: dict[str, str] = field(default_factory=dict)
    #: The kit's files beside `KIT`; without any where it is None.
    kit: dict[str, str] | None = None
    pyproject: str = ""
    entry_points: str = ""


CASES = [
    # Requests.
    Case(crash_probes.requests_saved, ABSENT),
    Case(crash_probes.requests_saved, upstream(), {MANAGER: manager("open(name)")}),
    Case(crash_probes.requests_saved, ABSENT, {MANAGER: manager("open(name)", watchdog="pass")}),
    Case(crash_probes.requests_saved, kit("mode 0600"), {MANAGER: hooked("save", manager("save()"))}, {}),
    Case(crash_probes.requests_saved, upstream(), {MANAGER: hooked("idle", manager("idle()"))}, {}),
    Case(crash_probes.requests_saved, upstream(), {MANAGER: manager("open(name)", decorator="save")}, {}),
    Case(crash_probes.requests_of_workers_saved, ABSENT, {ROUTER: "class MultiTokenizerRouter: ...\n"}),
    Case(
        crash_probes.requests_of_workers_saved,
        upstream(),
        {ROUTER: "class MultiTokenizerRouter:\n    def dump_requests_before_crash(self): ...\n"},
    ),
    Case(
        crash_probes.requests_of_workers_saved,
        kit(),
        {ROUTER: hooked("extend", "@extend\nclass MultiTokenizerRouter: ...\n")},
        {},
    ),
    Case(
        crash_probes.requests_of_workers_saved,
        ABSENT,
        {ROUTER: hooked("idle", "@idle\nclass MultiTokenizerRouter: ...\n")},
        {},
    ),
    # Stacks and cores.
    Case(crash_probes.stacks_at_crash, ABSENT, {MANAGER: manager("open(name)")}),
    Case(crash_probes.stacks_at_crash, ABSENT, {MANAGER: manager("pyspy_dump_schedulers()")}),
    Case(
        crash_probes.stacks_at_crash,
        upstream("no deadline"),
        {MANAGER: manager("pyspy_dump_schedulers(scheduler_only=True)"), DIAGNOSTICS: DUMPS.format("")},
    ),
    Case(
        crash_probes.stacks_at_crash,
        upstream(),
        {MANAGER: manager("pyspy_dump_schedulers(scheduler_only=True)"), DIAGNOSTICS: DUMPS.format(", timeout=5")},
    ),
    Case(
        crash_probes.stacks_at_crash,
        kit("side by side"),
        {MANAGER: manager("open(name)", decorator="idle"), **STARTED},
        {},
    ),
    Case(crash_probes.stacks_at_crash, ABSENT, {MANAGER: manager("open(name)", decorator="idle")}, {}),
    Case(crash_probes.gpu_cores_at_crash, ABSENT, {MANAGER: manager("open(name)")}),
    Case(crash_probes.gpu_cores_at_crash, upstream(), {MANAGER: manager("trigger_cuda_user_coredump()")}),
    Case(
        crash_probes.gpu_cores_at_crash,
        kit("only where no crash handler runs"),
        {MANAGER: manager("trigger_cuda_user_coredump()", decorator="core"), **STARTED},
        {},
    ),
    Case(
        crash_probes.gpu_cores_at_crash,
        kit(),
        {MANAGER: manager("open(name)", decorator="idle"), **STARTED},
        {"handler/__main__.py": 'def main():\n    ask("CUDA_COREDUMP_PIPE")\n'},
    ),
    Case(crash_probes.gpu_cores_at_crash, ABSENT, {MANAGER: manager("open(name)", decorator="idle"), **STARTED}, {}),
    # What `--crash-dump-folder` sets.
    Case(crash_probes.core_dump_variables_set, ABSENT, {"srt/server_args.py": "class ServerArgs: ...\n"}),
    Case(
        crash_probes.core_dump_variables_set,
        ABSENT,
        {"srt/server_args.py": "class ServerArgs:\n    def _handle_crash_dump_env(self): ...\n"},
    ),
    Case(
        crash_probes.core_dump_variables_set,
        upstream(),
        {
            "srt/server_args.py": "class ServerArgs:\n    def _handle_crash_dump_env(self): ...\n"
            "    def __post_init__(self):\n        self._handle_crash_dump_env()\n"
        },
    ),
    Case(
        crash_probes.core_dump_variables_set,
        kit(),
        {
            "srt/server_args.py": hooked("idle", "class ServerArgs:\n    _handle_crash_dump_env = idle\n")
            + "    def __post_init__(self):\n        self._handle_crash_dump_env()\n"
        },
        {},
    ),
    Case(
        crash_probes.core_dump_variables_set,
        upstream(),
        {
            "srt/arg_groups/serving_hook.py": "def handle_crash_dump_env(server_args): ...\n",
            "srt/arg_groups/pipeline.py": "def resolve():\n    run_hook(handle_crash_dump_env)\n",
        },
    ),
    Case(
        crash_probes.core_dump_variables_set,
        kit(),
        {
            "srt/arg_groups/serving_hook.py": hooked("idle", "@idle\ndef handle_crash_dump_env(server_args): ...\n"),
            "srt/arg_groups/pipeline.py": "def resolve():\n    handle_crash_dump_env(args)\n",
        },
        {},
    ),
    Case(
        crash_probes.core_dump_variables_set,
        ABSENT,
        {"srt/arg_groups/serving_hook.py": "def handle_crash_dump_env(server_args): ...\n"},
    ),
    Case(
        crash_probes.core_dump_variables_set,
        ABSENT,
        {"srt/arg_groups/pipeline.py": "def resolve():\n    handle_crash_dump_env(args)\n"},
    ),
    # Names.
    Case(crash_probes.diagnostics_importable, ABSENT),
    Case(crash_probes.diagnostics_importable, ABSENT, {DIAGNOSTICS: FUNCTIONS.replace("collect_", "gather_")}),
    Case(crash_probes.diagnostics_importable, upstream(), {DIAGNOSTICS: FUNCTIONS}),
    Case(crash_probes.diagnostics_importable, kit(), {DIAGNOSTICS: hooked("idle", "idle(__name__)\n")}, {}),
    Case(
        crash_probes.diagnostics_importable,
        ABSENT,
        {DIAGNOSTICS: "from sglang.srt.crashkit import stand_in\nstand_in(__name__)\n"},
        {"few.py": "def stand_in(): ...\ndef collect_scheduler_processes(): ...\n"},
    ),
    Case(crash_probes.flags_known, ABSENT, {"srt/environ.py": flagged()}),
    Case(
        crash_probes.flags_known,
        upstream(),
        {"srt/environ.py": flagged("SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION = EnvBool(False)")},
    ),
    Case(
        crash_probes.flags_known,
        kit(),
        {"srt/environ.py": hooked("flags", "class Envs:\n    vars().update(flags())\n")},
        {},
    ),
    Case(
        crash_probes.flags_known,
        ABSENT,
        {"srt/environ.py": hooked("idle", "class Envs:\n    vars().update(idle())\n")},
        {},
    ),
    # A scheduler's end.
    Case(crash_probes.exception_recorded, ABSENT, {SCHEDULER: textwrap.dedent(RAISES).format("pass", "")}),
    Case(
        crash_probes.exception_recorded,
        upstream("in the log"),
        {SCHEDULER: textwrap.dedent(RAISES).format("log(get_exception_traceback())", "")},
    ),
    Case(
        crash_probes.exception_recorded,
        kit("in the incident"),
        {SCHEDULER: hooked("record", RAISES.format("record()", ""))},
        {},
    ),
    Case(crash_probes.exception_recorded, ABSENT, {SCHEDULER: hooked("record", RAISES.format("pass", ""))}, {}),
    Case(crash_probes.group_killed, ABSENT, {SCHEDULER: textwrap.dedent(RAISES).format("pass", "")}),
    Case(
        crash_probes.group_killed,
        upstream("at once"),
        {SCHEDULER: textwrap.dedent(RAISES).format("pass", "os.killpg(os.getpgrp(), 9)")},
    ),
    Case(
        crash_probes.group_killed,
        kit("requests first"),
        {SCHEDULER: hooked("kill", RAISES.format("pass", "kill(); os.killpg(os.getpgrp(), 9)"))},
        {},
    ),
    Case(
        crash_probes.group_killed,
        upstream("at once"),
        {SCHEDULER: hooked("kill", RAISES.format("pass", "os.killpg(os.getpgrp(), 9); kill()"))},
        {},
    ),
    Case(crash_probes.group_killed, ABSENT, {SCHEDULER: hooked("idle", RAISES.format("idle()", "idle()"))}, {}),
    # What watches.
    Case(crash_probes.watchdog_evidence, ABSENT, {WATCHDOG: textwrap.dedent(WATCHES).format("pass")}),
    Case(
        crash_probes.watchdog_evidence,
        upstream("its own rank only"),
        {WATCHDOG: textwrap.dedent(WATCHES).format("pyspy_dump_schedulers()")},
    ),
    Case(
        crash_probes.watchdog_evidence,
        upstream("all ranks"),
        {WATCHDOG: textwrap.dedent(WATCHES).format("pyspy_dump_schedulers(scheduler_only=True)")},
    ),
    Case(
        crash_probes.watchdog_evidence,
        kit("all ranks"),
        {WATCHDOG: hooked("idle", WATCHES.format("idle(self)")), **STARTED},
        {},
    ),
    Case(crash_probes.watchdog_evidence, ABSENT, {WATCHDOG: hooked("idle", WATCHES.format("idle(self)"))}, {}),
    Case(crash_probes.death_noticed, ABSENT, {WATCHDOG: textwrap.dedent(CHILDREN)}),
    Case(
        crash_probes.death_noticed,
        upstream("every 1 s"),
        {WATCHDOG: textwrap.dedent(CHILDREN), ENGINE: "def launch():\n    SubprocessWatchdog([])\n"},
    ),
    Case(crash_probes.death_noticed, kit("at once"), STARTED, {}),
    Case(crash_probes.death_noticed, kit(), STARTED, {"handler/__main__.py": "def main(): ...\n"}),
    Case(crash_probes.incident_written, ABSENT),
    Case(crash_probes.incident_written, ABSENT, {}, {}),
    Case(crash_probes.incident_written, kit(), STARTED, {}),
    Case(crash_probes.incident_written, ABSENT, STARTED, {"handler/__main__.py": "def main(): ...\n"}),
    Case(crash_probes.incident_written, ABSENT, STARTED, {"handler/__main__.py": ""}),
    # The launch.
    Case(probes.launch_watched, ABSENT, {ENGINE: WAIT.format("readers[0].recv()")}),
    Case(probes.launch_watched, upstream("every 5 s"), {ENGINE: WAIT.format("readers[0].poll(timeout=5.0)")}),
    Case(probes.launch_watched, kit("at once"), {ENGINE: hooked("wake", "@wake\n" + WAIT.format("pass"))}, {}),
    Case(probes.launch_watched, kit("polling"), {ENGINE: hooked("idle", "@idle\n" + WAIT.format("pass"))}, {}),
    Case(probes.launch_watched, ABSENT, {ENGINE: hooked("wake", WAIT.format("pass"))}, {}),
    Case(probes.dp_launch_watched, ABSENT, {CONTROLLER: textwrap.dedent(GROUP).format("readers[0].recv()")}),
    Case(
        probes.dp_launch_watched,
        upstream("every 2.5 s"),
        {CONTROLLER: textwrap.dedent(GROUP).format("readers[0].poll(timeout=2.5)")},
    ),
    Case(probes.dp_launch_watched, kit("at once"), {CONTROLLER: hooked("wake", GROUP.format("wake()"))}, {}),
    Case(probes.dp_launch_watched, ABSENT, {CONTROLLER: hooked("wake", "wake()\n" + textwrap.dedent(GROUP))}, {}),
    Case(probes.launch_limited, ABSENT, {ENGINE: WAIT.format("readers[0].poll(timeout=5.0)")}),
    Case(probes.launch_limited, upstream(), {ENGINE: WAIT.format("deadline = time.monotonic() + 600")}),
    Case(probes.launch_limited, kit("off by default"), {ENGINE: hooked("limit", "@limit\n" + WAIT.format("pass"))}, {}),
    Case(probes.launch_limited, ABSENT, {ENGINE: hooked("idle", "@idle\n" + WAIT.format("pass"))}, {}),
    # The end of processes.
    Case(probes.kill_waits, ABSENT, {COMMON: "def kill_process_tree(parent_pid): ...\n"}),
    Case(probes.kill_waits, upstream(), {COMMON: "def kill_process_tree(parent_pid, wait_timeout=60): ...\n"}),
    Case(probes.kill_waits, kit(), {COMMON: hooked("wait", "@wait\ndef kill_process_tree(parent_pid): ...\n")}, {}),
    Case(probes.kill_waits, ABSENT, {COMMON: hooked("idle", "@idle\ndef kill_process_tree(parent_pid): ...\n")}, {}),
    Case(probes.reap_survives_einval, ABSENT),
    Case(probes.reap_survives_einval, ABSENT, {COMMON: REAP.format("psutil.wait_procs(procs)")}),
    Case(probes.reap_survives_einval, upstream("every 0.1 s"), {COMMON: REAP.format("time.sleep(0.1)")}),
    Case(
        probes.reap_survives_einval,
        kit("at once"),
        {COMMON: hooked("wake", "@wake\n" + REAP.format("time.sleep(0.1)"))},
        {},
    ),
    Case(probes.reap_survives_einval, kit("at once"), {COMMON: hooked("wake", "_wait_for_reap_or_raise = wake\n")}, {}),
    # Hangs.
    Case(probes.hang_noticed, ABSENT),
    Case(probes.hang_noticed, upstream("in a batch only"), {WATCHDOG: textwrap.dedent(WATCHES).format("pass")}),
    Case(
        probes.hang_noticed,
        kit("idle ones too"),
        {SCHEDULER: hooked("beat", ROUND.format("beat(self, recv_reqs)")), **STARTED},
        {},
    ),
    Case(probes.hang_noticed, ABSENT, {SCHEDULER: hooked("beat", ROUND.format("beat(self, recv_reqs)"))}, {}),
    Case(probes.hang_noticed, ABSENT, {SCHEDULER: hooked("idle", ROUND.format("idle()")), **STARTED}, {}),
    # Tests.
    Case(probes.watcher_there, ABSENT),
    Case(
        probes.watcher_there,
        upstream("every 0.1 s"),
        {UTILITIES: "def start_subprocess_fail_fast_watcher(named):\n    time.sleep(0.1)\n"},
    ),
    Case(
        probes.watcher_there,
        upstream(),
        {UTILITIES: "def start_subprocess_fail_fast_watcher(named):\n    time.sleep(interval)\n"},
    ),
    Case(
        probes.watcher_there,
        kit("at once"),
        {UTILITIES: hooked("wake", "start_subprocess_fail_fast_watcher = wake()\n")},
        {},
    ),
    Case(
        probes.watcher_there,
        ABSENT,
        {UTILITIES: "from sglang.srt.crashkit import gone\nstart_subprocess_fail_fast_watcher = gone()\n"},
        {},
    ),
    Case(probes.pd_fixture_watched, ABSENT, {FIXTURE: textwrap.dedent(PAIR).format("pass", "", "", "pass")}),
    Case(probes.pd_fixture_watched, ABSENT, {FIXTURE: textwrap.dedent(PAIR).format("pass", "", WATCHER, "pass")}),
    Case(
        probes.pd_fixture_watched,
        upstream("once all serve"),
        {FIXTURE: textwrap.dedent(PAIR).format("pass", "", WATCHER, "stop.set()")},
    ),
    Case(
        probes.pd_fixture_watched,
        upstream(),
        {FIXTURE: textwrap.dedent(PAIR).format("pass", WATCHER, "", "stop.set()")},
    ),
    Case(
        probes.pd_fixture_watched,
        kit("from their start"),
        {FIXTURE: hooked("wake, idle", PAIR.format("wake(cls)", "", WATCHER, "idle(cls); stop.set()"))},
        {},
    ),
    Case(
        probes.pd_fixture_watched,
        ABSENT,
        {FIXTURE: hooked("wake", PAIR.format("wake(cls)", "", "", "pass"))},
        {},
    ),
    Case(probes.pytest_fails_by_name, ABSENT, entry_points="[console_scripts]\n"),
    Case(probes.pytest_fails_by_name, upstream(), entry_points="[pytest11]\nsglang = sglang.plugin\n"),
    Case(probes.pytest_fails_by_name, kit(), {}, {"plugin.py": "def pytest_configure(config): ...\n"}, PLUGIN),
    Case(probes.pytest_fails_by_name, ABSENT, {}, {"plugin.py": "def pytest_configure(config): ...\n"}),
    Case(probes.pytest_fails_by_name, ABSENT, {}, {"plugin.py": ""}, PLUGIN),
    # Prefill and decode.
    *(
        case
        for probe, side, queue, upstreams, when in PEERS
        for case in (
            Case(probe, ABSENT, {f"srt/disaggregation/{side}.py": QUEUE.format(queue, "pass")}),
            Case(probe, upstream(when), {"srt/disaggregation/mooncake/conn.py": f"def f(self):\n    {upstreams}\n"}),
            Case(
                probe,
                kit("within seconds"),
                {f"srt/disaggregation/{side}.py": hooked("tell", QUEUE.format(queue, "tell()"))},
                {},
            ),
            Case(probe, ABSENT, {f"srt/disaggregation/{side}.py": hooked("idle", QUEUE.format(queue, "idle()"))}, {}),
            Case(probe, ABSENT, {f"srt/disaggregation/{side}.py": hooked("tell", QUEUE.format("X", "tell()"))}, {}),
        )
    ),
    # Hangs.
    Case(probes.hang_collected, ABSENT),
    Case(probes.hang_collected, ABSENT, {}, {"cli/main.py": COMMANDS.format('"revert"')}),
    Case(probes.hang_collected, ABSENT, {}, {"cli/main.py": COMMANDS.format('"collect"')}),
    Case(
        probes.hang_collected,
        kit(),
        {},
        {"cli/main.py": COMMANDS.format('"collect"'), "cli/collect.py": "def run(args): ...\n"},
    ),
]


def files_of(case: Case) -> dict[str, bytes]:
    files = {HOOK_FILE: f"_HOOKS = {HOOK_TABLE}\n", **case.files}
    return {path: text.encode() for path, text in files.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.probe.__name__}-{case.finding.owner.value}")
def test_a_probe_finds_what_is_there(case: Case, make_kit) -> None:
    source = None if case.kit is None else make_kit(KIT | case.kit, case.pyproject)
    files = files_of(case)
    assert case.probe(SglangTree(files.get, source, case.entry_points)) == case.finding


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.probe.__name__)
def test_every_probe_is_seen_to_say_yes_and_no(feature) -> None:
    said = {case.finding.owner.value for case in CASES if case.probe is feature.probe}
    assert {"no", "kit"} <= said


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.probe.__name__)
def test_an_empty_tree_has_no_feature(feature, make_kit) -> None:
    assert feature.probe(SglangTree({}.get)) == ABSENT
    assert feature.probe(SglangTree({}.get, make_kit({}))) == ABSENT


def test_without_the_kit_no_hook_counts() -> None:
    """A tree that is patched but lacks the kit's package is not taken for the kit's version of anything."""
    for case in CASES:
        files = files_of(case)
        assert case.probe(SglangTree(files.get, None, case.entry_points)).owner.value != "kit", case
