"""The kit's environment variables, as somebody set them: misspelt, unreadable, or against each other."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from sglang_crashkit.capture.server_arguments import value_of
from sglang_crashkit.doctor.findings import Finding
from sglang_crashkit.settings import Settings, earlier_names_in

_PREFIX = "SGLANG_CRASHKIT_"
_MAY_BE_SECRET = re.compile(r"WEBHOOK|OTLP|SECR|TOKEN|KEY|PASS")
_TRUTH = r"(?i)1|true|yes|y|0|false|no|n"
_NUMBER = r"\d{1,9}"
_SECONDS = r"\d+(\.\d*)?|\.\d+"
_ANY = r".*"
#: What each variable that a user sets may hold; the tests compare it with docs/configuration.md.
VALUES = {
    "SGLANG_CRASHKIT_ENABLED": _TRUTH,
    "SGLANG_CRASHKIT_EXIT_STATUS": r"(?i)kit|upstream",
    "SGLANG_CRASHKIT_LOG_RECORDS": _NUMBER,
    "SGLANG_CRASHKIT_PEER_WATCH": _TRUTH,
    "SGLANG_CRASHKIT_GPU_FACTS": _TRUTH,
    "SGLANG_CRASHKIT_TERMINATION_LOG": _ANY,
    "SGLANG_CRASHKIT_HANG_SECS": _SECONDS,
    "SGLANG_CRASHKIT_NATIVE": _TRUTH,
    "SGLANG_CRASHKIT_PYSPY": _ANY,
    "SGLANG_CRASHKIT_STACK_SIGNAL": _NUMBER,
    "SGLANG_CRASHKIT_EXIT_SECS": _SECONDS,
    "SGLANG_CRASHKIT_BUDGET_SECS": _SECONDS,
    "SGLANG_CRASHKIT_CAPTURE_SECS": _SECONDS,
    "SGLANG_CRASHKIT_PHOTOGRAPH_SECS": _SECONDS,
    "SGLANG_CRASHKIT_END_SECS": _SECONDS,
    "SGLANG_CRASHKIT_STARTUP_TIMEOUT_SECS": _SECONDS,
    "SGLANG_CRASHKIT_MAX_USE_MB": _SECONDS,
    "SGLANG_CRASHKIT_KEEP_FREE_MB": _SECONDS,
    "SGLANG_CRASHKIT_MAX_INCIDENT_MB": _SECONDS,
    "SGLANG_CRASHKIT_MAX_CORE_MB": _SECONDS,
    "SGLANG_CRASHKIT_FULL_PER_FAULT": _NUMBER,
    "SGLANG_CRASHKIT_JOURNAL": _TRUTH,
    "SGLANG_CRASHKIT_JOURNAL_MB": _SECONDS,
    "SGLANG_CRASHKIT_STEPS": _TRUTH,
    "SGLANG_CRASHKIT_PROMPTS": r"(?i)full|ids|none",
    "SGLANG_CRASHKIT_METRICS_FILE": _ANY,
    "SGLANG_CRASHKIT_ON_INCIDENT": _ANY,
    "SGLANG_CRASHKIT_ON_INCIDENT_SECS": _SECONDS,
    "SGLANG_CRASHKIT_WEBHOOK": r"https?://.+",
    "SGLANG_CRASHKIT_WEBHOOK_KIND": r"(?i)slack|alertmanager|json",
    "SGLANG_CRASHKIT_WEBHOOK_SECRET": _ANY,
    "SGLANG_CRASHKIT_KUBERNETES_EVENT": _TRUTH,
    "SGLANG_CRASHKIT_OTLP_ENDPOINT": _ANY,
    "SGLANG_CRASHKIT_HTML": _TRUTH,
    "SGLANG_CRASHKIT_QUARANTINE": r"(?i)off|observe|refuse",
}
#: The kit sets them for its own processes.
OWN = frozenset(
    {"SGLANG_CRASHKIT_SOCKET", "SGLANG_CRASHKIT_SPOOL", "SGLANG_CRASHKIT_LAUNCHED", "SGLANG_CRASHKIT_MEMBERS"}
    | {
        "SGLANG_CRASHKIT_MODE",
        "SGLANG_CRASHKIT_INCIDENT",
        "SGLANG_CRASHKIT_FLIGHT_FOLDER",
        "SGLANG_CRASHKIT_NOT_APPLIED",
    }
)
#: SGLang's own default of ``--watchdog-timeout``, in seconds.
_WATCHDOG_SECS = 300.0
#: The least that SGLANG_CRASHKIT_HANG_SECS may be, in seconds.
_SHORTEST_HANG_SECS = 2.0
_TOPIC = "settings"


def check_variables(environ: Mapping[str, str], arguments: list[str]) -> Iterator[Finding]:
    """Yield what is wrong with the settings, or one finding that nothing is.

    Args:
        environ: the server's environment.
        arguments: its command line.
    """
    found = [*_misspelt(environ), *_in_conflict(environ, arguments)]
    yield from found or [Finding("ok", _TOPIC, "every variable of the kit is known and can be read")]


def _misspelt(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in sorted(environ.items()):
        if not name.startswith(_PREFIX) or name in OWN:
            continue
        if name not in VALUES:
            close = difflib.get_close_matches(name, VALUES, 1)
            next_step = (_shown(close[0], value),) if close else (f"unset {name}",)
            yield Finding("warning", _TOPIC, f"{name} is no variable of the kit", "it has no effect", next_step)
        elif value.strip() and not re.fullmatch(VALUES[name], value.strip(), re.DOTALL):
            yield Finding(
                "warning", _TOPIC, f"{_shown(name, value)} cannot be read", "it counts as not set", (f"unset {name}",)
            )
    for earlier, name in earlier_names_in(environ).items():
        yield Finding("note", _TOPIC, f"{earlier} is called {name} now", next=(f"{name}={environ[earlier]}",))


def _shown(name: str, value: str) -> str:
    """Return a setting as it is written, without what may be a key."""
    return f"{name}=..." if _MAY_BE_SECRET.search(name) else f"{name}={value}"


def _in_conflict(environ: Mapping[str, str], arguments: list[str]) -> Iterator[Finding]:
    settings = Settings.from_environ(environ)
    folder = value_of(arguments, ("--crash-dump-folder",))
    if not settings.enabled:
        yield Finding(
            "problem",
            _TOPIC,
            "SGLANG_CRASHKIT_ENABLED switches the kit off",
            "a crash leaves no incident",
            ("unset SGLANG_CRASHKIT_ENABLED",),
        )
    elif not settings.diagnostics and not folder:
        yield Finding(
            "problem",
            _TOPIC,
            "both of upstream's diagnostics are off, and there is no --crash-dump-folder",
            "no crash handler is started",
            ("unset SGLANG_PYSPY_DUMP_BEFORE_CRASH", "--crash-dump-folder FOLDER"),
        )
    # Whoever lowers SGLANG_CRASHKIT_EXIT_SECS alone wants what is left at its default to have less time.
    is_longer = settings.budget_secs + settings.end_secs > settings.exit_secs
    if is_longer and not environ.keys().isdisjoint(("SGLANG_CRASHKIT_BUDGET_SECS", "SGLANG_CRASHKIT_END_SECS")):
        needed = f"{settings.budget_secs + settings.end_secs:g}"
        yield Finding(
            "warning",
            _TOPIC,
            f"an incident and the end after it may take {needed} s, and SGLANG_CRASHKIT_EXIT_SECS allows "
            f"{settings.exit_secs:g} s",
            "a slow incident is cut short",
            (f"SGLANG_CRASHKIT_EXIT_SECS={needed}",),
        )
    watchdog = _seconds(value_of(arguments, ("--watchdog-timeout",)), _WATCHDOG_SECS)
    if settings.hang_secs == 0:
        yield Finding("note", _TOPIC, "SGLANG_CRASHKIT_HANG_SECS=0: hangs are not looked for")
    elif settings.hang_secs >= watchdog > 0:
        # What was not set is no mistake of the user's.
        yield Finding(
            "warning" if "SGLANG_CRASHKIT_HANG_SECS" in environ else "note",
            _TOPIC,
            f"SGLANG_CRASHKIT_HANG_SECS ({settings.hang_secs:g} s) is no shorter than SGLang's --watchdog-timeout "
            f"({watchdog:g} s)",
            "SGLang ends a server that hangs before the kit has looked at it",
            (f"SGLANG_CRASHKIT_HANG_SECS={max(_SHORTEST_HANG_SECS, watchdog / 2):g}",),
        )
    use, incident = settings.disk.max_use, settings.disk.max_incident
    if use is not None and use < incident:
        yield Finding(
            "warning",
            _TOPIC,
            "SGLANG_CRASHKIT_MAX_USE_MB is less than what one incident may take",
            "an incident is cut short, and no earlier one is kept",
            (f"SGLANG_CRASHKIT_MAX_USE_MB={4 * incident >> 20}",),
        )
    if environ.get("SGLANG_CRASHKIT_QUARANTINE", "off").strip().lower() in ("observe", "refuse") and not folder:
        yield Finding(
            "warning",
            _TOPIC,
            "SGLANG_CRASHKIT_QUARANTINE is set, and there is no --crash-dump-folder",
            "the list of requests is in that folder",
            ("--crash-dump-folder FOLDER",),
        )


def _seconds(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default
