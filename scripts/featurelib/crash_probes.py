"""Probes of what happens to a server that serves: its requests, its diagnostics, its end."""

from __future__ import annotations

import functools

from featurelib.finding import ABSENT, Finding, kit, upstream
from featurelib.sglangsource import SglangTree, calls_in, default_of, keyword, refers_to

_DUMP = "dump_requests_before_crash"
_MANAGER = "srt/managers/tokenizer_manager.py"
_ROUTER = "srt/managers/multi_tokenizer_mixin.py"
_DIAGNOSTICS = "srt/utils/cudacore_pyspy_dump_utils.py"
_DIAGNOSTIC_FUNCTIONS = frozenset(
    {
        "_resolve_cuda_coredump_pipe_path",
        "_is_sglang_scheduler_process",
        "collect_scheduler_processes",
        "pyspy_dump_schedulers",
        "trigger_cuda_user_coredump",
    }
)
_FLAGS = frozenset(
    {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS",
        "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION",
    }
)
_WAYS_TO_A_DUMP = (
    "SignalHandler.running_phase_sigquit_handler",
    "TokenizerManager.sigterm_watchdog",
    "print_exception_wrapper",
)
_HANDLER = "sglang_crashkit.handler"
_PRIVATE = 0o600


def requests_saved(tree: SglangTree) -> Finding:
    """A child's failure, an exception and SIGTERM to an unhealthy server save the requests of the last minutes."""
    manager = tree.file(_MANAGER)
    dump = manager.definition(f"TokenizerManager.{_DUMP}")
    if dump is None or not all(calls_in(manager.find(way), _DUMP) for way in _WAYS_TO_A_DUMP):
        return ABSENT
    openers = manager.kit_calls(dump) - manager.taken_over_by(f"TokenizerManager.{_DUMP}")
    if openers and tree.kit and _PRIVATE in tree.kit.reach(*openers).constants:
        return kit("mode 0600")
    return upstream()


def requests_of_workers_saved(tree: SglangTree) -> Finding:
    """The same where several tokenizer workers hold the requests."""
    mixin = tree.file(_ROUTER)
    router = "MultiTokenizerRouter"
    hooks = mixin.taken_over_by(router)
    if hooks and tree.kit and _DUMP in tree.kit.reach(*hooks).attributes:
        return kit()
    # Upstream calls it on the router after an exception, which is of no use where the router has no such method.
    return upstream() if mixin.find(f"{router}.{_DUMP}") else ABSENT


def stacks_at_crash(tree: SglangTree) -> Finding:
    """A crash leaves the Python stacks of all schedulers."""
    manager = tree.file(_MANAGER)
    hooks = manager.taken_over_by(f"TokenizerManager.{_DUMP}")
    if hooks and handler_is_started(tree):
        return kit("side by side")
    dumps = calls_in(manager.find(f"TokenizerManager.{_DUMP}"), "pyspy_dump_schedulers")
    if not any(keyword(call, "scheduler_only") for call in dumps):
        return ABSENT
    runs = calls_in(tree.file(_DIAGNOSTICS).find("pyspy_dump_schedulers"), "run")
    has_deadline = any(each.arg == "timeout" for call in runs for each in call.keywords)
    return upstream("" if has_deadline else "no deadline")


def gpu_cores_at_crash(tree: SglangTree) -> Finding:
    """A crash asks the CUDA driver for a core of each scheduler.

    With a crash handler upstream's diagnostics are switched off, so that the handler has to ask.
    """
    manager = tree.file(_MANAGER)
    hooks = manager.taken_over_by(f"TokenizerManager.{_DUMP}")
    if hooks and tree.kit:
        pipe = "CUDA_COREDUMP_PIPE"
        if handler_is_started(tree) and pipe in tree.kit.reach(f"{_HANDLER}.__main__.main").constants:
            return kit()
        if pipe in tree.kit.reach(*hooks).constants:
            return kit("only where no crash handler runs")
    dump = manager.find(f"TokenizerManager.{_DUMP}")
    return upstream() if calls_in(dump, "trigger_cuda_user_coredump") else ABSENT


def core_dump_variables_set(tree: SglangTree) -> Finding:
    """``--crash-dump-folder`` sets the CUDA driver's variables and makes the folder of the cores."""
    file, path = tree.file("srt/server_args.py"), "ServerArgs._handle_crash_dump_env"
    if not (file.mentions("_handle_crash_dump_env(") and calls_in(file.find("ServerArgs"), "_handle_crash_dump_env")):
        file, path = tree.file("srt/arg_groups/serving_hook.py"), "handle_crash_dump_env"
        if not refers_to(tree.file("srt/arg_groups/pipeline.py").whole(), path):
            return ABSENT
    if file.taken_over_by(path):
        return kit()
    return upstream() if file.find(path) else ABSENT


def diagnostics_importable(tree: SglangTree) -> Finding:
    """The module ``sglang.srt.utils.cudacore_pyspy_dump_utils`` with all its functions."""
    module = tree.file(_DIAGNOSTICS)
    if all(module.find(name) for name in _DIAGNOSTIC_FUNCTIONS):
        return upstream()
    stands_in = {hook.rpartition(".")[0] for hook in module.kit_calls(module.whole())}
    found = set().union(*(tree.kit.functions(name) for name in stands_in)) if tree.kit else set()
    return kit() if found >= _DIAGNOSTIC_FUNCTIONS else ABSENT


def flags_known(tree: SglangTree) -> Finding:
    """The flags of the diagnostics and of the kill of the group are fields of ``envs``."""
    file = tree.file("srt/environ.py")
    if all(file.find(f"Envs.{flag}") for flag in _FLAGS):
        return upstream()
    hooks = file.kit_calls(file.find("Envs"))
    return kit() if hooks and tree.kit and tree.kit.reach(*hooks).constants >= _FLAGS else ABSENT


def exception_recorded(tree: SglangTree) -> Finding:
    """A rank that raises an exception says so itself: its traceback, its threads, its batch."""
    scheduler = tree.file("srt/managers/scheduler.py")
    run = scheduler.find("run_scheduler_process")
    hooks = scheduler.kit_calls(run)
    if hooks and tree.kit and "traceback.format_exception_only" in tree.kit.reach(*hooks).names:
        return kit("in the incident")
    return upstream("in the log") if calls_in(run, "get_exception_traceback") else ABSENT


def group_killed(tree: SglangTree) -> Finding:
    """``SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION`` kills the process group after a scheduler's exception."""
    scheduler = tree.file("srt/managers/scheduler.py")
    run = scheduler.find("run_scheduler_process")
    # Whoever is called first kills.
    for call in calls_in(run):
        hooks = scheduler.kit_calls(call)
        if hooks and tree.kit and "os.killpg" in tree.kit.reach(*hooks).names:
            return kit("requests first")
        if call in calls_in(run, "killpg"):
            return upstream("at once")
    return ABSENT


def watchdog_evidence(tree: SglangTree) -> Finding:
    """A scheduler whose watchdog times out leaves stacks."""
    file = tree.file("srt/utils/watchdog.py")
    once = file.find("WatchdogRaw._watchdog_once")
    if file.kit_calls(once) and handler_is_started(tree):
        return kit("all ranks")
    dumps = calls_in(once, "pyspy_dump_schedulers")
    if not dumps:
        return ABSENT
    return upstream("all ranks" if any(keyword(call, "scheduler_only") for call in dumps) else "its own rank only")


def death_noticed(tree: SglangTree) -> Finding:
    """A process of the server that dies while it serves ends the server."""
    if handler_is_started(tree) and tree.kit:
        if "os.pidfd_open" in tree.kit.reach(f"{_HANDLER}.__main__.main").names:
            return kit("at once")
        return kit()
    watchdog = tree.file("srt/utils/watchdog.py").find("SubprocessWatchdog")
    if watchdog is None or not calls_in(tree.file("srt/entrypoints/engine.py").whole(), "SubprocessWatchdog"):
        return ABSENT
    seconds = default_of(tree.file("srt/utils/watchdog.py").definition("SubprocessWatchdog.__init__"), "interval")
    return upstream(polls(seconds))


def incident_written(tree: SglangTree) -> Finding:
    """A crash leaves an incident folder."""
    if not handler_is_started(tree) or tree.kit is None:
        return ABSENT
    reached = tree.kit.reach(f"{_HANDLER}.__main__.main").constants
    return kit() if {"incident.json", "summary.md"} <= reached else ABSENT


@functools.lru_cache(maxsize=2)
def handler_is_started(tree: SglangTree) -> bool:
    """Return whether the engine calls what starts the crash handler."""
    if tree.kit is None or not tree.kit.has(f"{_HANDLER}.__main__.main"):
        return False
    engine = tree.file("srt/entrypoints/engine.py")
    launched = engine.kit_calls(engine.whole())
    return bool(launched) and _HANDLER in tree.kit.reach(*launched).constants


def polls(seconds: object) -> str:
    """Return a note of how often something is looked at."""
    return f"every {seconds:g} s" if isinstance(seconds, int | float) else ""
