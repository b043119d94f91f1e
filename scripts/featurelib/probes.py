"""Probes of the launch, of the end of processes, of the tests' fixtures and of hangs; and the list of all features."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from featurelib import crash_probes
from featurelib.crash_probes import handler_is_started, polls
from featurelib.finding import ABSENT, Finding, kit, upstream
from featurelib.kitsource import KitSource
from featurelib.sglangsource import SglangTree, arguments_of, called, calls_in, keyword

_COMMON = "srt/utils/common.py"
_CONN = "srt/disaggregation/{}/conn.py"
#: By these the kernel tells of a death; what does without them polls.
_WAKING = frozenset({"os.pidfd_open", "multiprocessing.connection.wait"})


def launch_watched(tree: SglangTree) -> Finding:
    """While the server starts, the death of any rank ends the wait for all."""
    engine = tree.file("srt/entrypoints/engine.py")
    hooks = engine.taken_over_by("_wait_for_scheduler_ready")
    if hooks:
        return kit(_promptness(tree.kit, hooks))
    looks = calls_in(engine.find("_wait_for_scheduler_ready"), "poll")
    # Without a look at the others a rank is waited for in recv(), whoever dies meanwhile.
    return upstream(polls(keyword(looks[0], "timeout"))) if looks else ABSENT


def dp_launch_watched(tree: SglangTree) -> Finding:
    """The same for the schedulers that the data-parallel controller starts."""
    controller = tree.file("srt/managers/data_parallel_controller.py")
    start = controller.find("DataParallelController.launch_tensor_parallel_group")
    hooks = controller.kit_calls(start)
    if hooks:
        return kit(_promptness(tree.kit, hooks))
    looks = calls_in(start, "poll")
    return upstream(polls(keyword(looks[0], "timeout"))) if looks else ABSENT


def launch_limited(tree: SglangTree) -> Finding:
    """The launch has a limit of time."""
    engine = tree.file("srt/entrypoints/engine.py")
    hooks = engine.taken_over_by("_wait_for_scheduler_ready")
    if hooks and tree.kit and "startup_timeout_secs" in tree.kit.reach(*hooks).attributes:
        return kit("off by default")
    wait = engine.find("_wait_for_scheduler_ready")
    clocks = [*calls_in(wait, "monotonic"), *calls_in(wait, "perf_counter"), *calls_in(wait, "time")]
    return upstream() if clocks else ABSENT


def kill_waits(tree: SglangTree) -> Finding:
    """``kill_process_tree`` takes ``wait_timeout`` and returns when all that it killed are gone."""
    common = tree.file(_COMMON)
    if "wait_timeout" in arguments_of(common.definition("kill_process_tree")):
        return upstream()
    hooks = common.taken_over_by("kill_process_tree")
    return kit() if hooks and tree.kit and "wait_timeout" in tree.kit.reach(*hooks).constants else ABSENT


def reap_survives_einval(tree: SglangTree) -> Finding:
    """The wait for the deaths goes on where the kernel refuses a pidfd of a process just killed."""
    common = tree.file(_COMMON)
    hooks = common.taken_over_by("_wait_for_reap_or_raise")
    if hooks:
        return kit(_promptness(tree.kit, hooks))
    wait = common.find("_wait_for_reap_or_raise")
    # psutil lets the error of pidfd_open out.
    if wait is None or calls_in(wait, "wait_procs"):
        return ABSENT
    return upstream(_sleeps(wait))


def lost_prefill_told(tree: SglangTree) -> Finding:
    """A decode server tells of a prefill server that is gone, and of the requests that wait for it."""
    if _tells_of_peer(tree, "srt/disaggregation/decode.py", "DecodePreallocQueue"):
        return kit("within seconds")
    files = [tree.file(_CONN.format(part)) for part in ("common", "mooncake")]
    return upstream("by heartbeat") if any(file.mentions("self._handle_node_failure(") for file in files) else ABSENT


def lost_decode_told(tree: SglangTree) -> Finding:
    """A prefill server tells of a decode server that is gone, and of the requests that wait for it."""
    if _tells_of_peer(tree, "srt/disaggregation/prefill.py", "PrefillBootstrapQueue"):
        return kit("within seconds")
    return upstream("when it sends") if tree.file(_CONN.format("mooncake")).mentions("failed_sessions.add(") else ABSENT


def _tells_of_peer(tree: SglangTree, path: str, queue: str) -> bool:
    file = tree.file(path)
    hooks = file.kit_calls(file.find(f"{queue}.__init__"))
    # The crash handler watches those that a scheduler says it works with.
    return bool(hooks and tree.kit and "pair" in tree.kit.reach(*hooks).constants)


def watcher_there(tree: SglangTree) -> Finding:
    """``start_subprocess_fail_fast_watcher`` ends a test run when a server has ended."""
    utilities = tree.file("test/test_utils.py")
    hooks = utilities.taken_over_by("start_subprocess_fail_fast_watcher")
    if hooks:
        return kit(_promptness(tree.kit, hooks))
    start = utilities.find("start_subprocess_fail_fast_watcher")
    return upstream(_sleeps(start)) if start else ABSENT


def pd_fixture_watched(tree: SglangTree) -> Finding:
    """``PDDisaggregationServerBase`` watches prefill, decode and router, and not their teardown."""
    fixture = tree.file("test/server_fixtures/disaggregation_fixture.py")
    base = "PDDisaggregationServerBase"
    set_up, tear_down = fixture.find(f"{base}.setUpClass"), fixture.find(f"{base}.tearDownClass")
    if fixture.kit_calls(set_up) and fixture.kit_calls(tear_down):
        return kit("from their start")
    names = [called(call) for call in calls_in(fixture.find(f"{base}.launch_all"))]
    if "start_subprocess_fail_fast_watcher" not in names or not calls_in(tear_down, "set"):
        return ABSENT
    starts = [at for at, name in enumerate(names) if name.startswith(("start_prefill", "start_decode", "launch_lb"))]
    is_last = names.index("start_subprocess_fail_fast_watcher") > max(starts, default=-1)
    return upstream("once all serve" if is_last else "")


def pytest_fails_by_name(tree: SglangTree) -> Finding:
    """A plugin makes pytest fail the running test, and not the whole run."""
    if tree.kit is not None:
        plugin = tree.kit.pytest_plugin()
        if plugin and "pytest_configure" in tree.kit.functions(plugin):
            return kit()
    return upstream() if "[pytest11]" in tree.entry_points else ABSENT


def hang_noticed(tree: SglangTree) -> Finding:
    """A scheduler that stands still in its event loop is noticed."""
    scheduler = tree.file("srt/managers/scheduler.py")
    hooks = scheduler.kit_calls(scheduler.find("Scheduler.process_input_requests"))
    if hooks and tree.kit and "os.memfd_create" in tree.kit.reach(*hooks).names and handler_is_started(tree):
        return kit("idle ones too")
    # Upstream's watchdog looks at a scheduler that has a batch, and ends the server.
    return upstream("in a batch only") if tree.file("srt/utils/watchdog.py").find("WatchdogRaw") else ABSENT


def hang_collected(tree: SglangTree) -> Finding:
    """A command takes the stacks of a server that hangs."""
    if tree.kit is None:
        return ABSENT
    has_command = "collect" in tree.kit.strings("sglang_crashkit.cli.main.COMMANDS")
    return kit() if has_command and tree.kit.has("sglang_crashkit.cli.collect.run") else ABSENT


def _promptness(source: KitSource | None, hooks: frozenset[str]) -> str:
    return "at once" if source and source.reach(*hooks).names & _WAKING else "polling"


def _sleeps(node: ast.stmt) -> str:
    sleeps = [call.args[0] for call in calls_in(node, "sleep") if call.args]
    return polls(sleeps[0].value if sleeps and isinstance(sleeps[0], ast.Constant) else None)


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        text: what the feature is, in Markdown.
        probe: finds it in a tree.
    """

    text: str
    probe: Callable[[SglangTree], Finding]


#: What a person wants to know who decides whether to install the kit, in this order.
FEATURES = (
    Feature("an incident folder: who failed first, of what, what the others did", crash_probes.incident_written),
    Feature("the server's processes are watched while it serves", crash_probes.death_noticed),
    Feature("stacks of all ranks at a crash", crash_probes.stacks_at_crash),
    Feature("a rank that raises: its traceback, threads and batch", crash_probes.exception_recorded),
    Feature("stacks when a scheduler's watchdog times out", crash_probes.watchdog_evidence),
    Feature("GPU cores at a crash", crash_probes.gpu_cores_at_crash),
    Feature("CUDA's core variables set by `--crash-dump-folder`", crash_probes.core_dump_variables_set),
    Feature("requests saved at a crash, with `--crash-dump-folder`", crash_probes.requests_saved),
    Feature("the same with `--tokenizer-worker-num`", crash_probes.requests_of_workers_saved),
    Feature("process group killed on an exception, if asked for", crash_probes.group_killed),
    Feature("`cudacore_pyspy_dump_utils` importable", crash_probes.diagnostics_importable),
    Feature("its flags, and that of the killed group, in `envs`", crash_probes.flags_known),
    Feature("any rank's death ends the launch", launch_watched),
    Feature("the same with `--dp`", dp_launch_watched),
    Feature("a limit of time for the launch", launch_limited),
    Feature("`kill_process_tree(wait_timeout=...)`", kill_waits),
    Feature("its wait survives a `pidfd_open` that fails", reap_survives_einval),
    Feature("a decode server tells of a lost prefill server", lost_prefill_told),
    Feature("a prefill server tells of a lost decode server", lost_decode_told),
    Feature("tests: `start_subprocess_fail_fast_watcher`", watcher_there),
    Feature("tests: prefill, decode and router are watched", pd_fixture_watched),
    Feature("tests: pytest fails the running test by name", pytest_fails_by_name),
    Feature("a scheduler that hangs is noticed", hang_noticed),
    Feature("stacks of a hung server on demand", hang_collected),
)
