"""Who is notified of an incident, as the environment says."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from sglang_crashkit.settings import OTLP_ENDPOINT, read_bool, read_seconds

COMMAND, COMMAND_SECS = "SGLANG_CRASHKIT_ON_INCIDENT", "SGLANG_CRASHKIT_ON_INCIDENT_SECS"
WEBHOOK, WEBHOOK_KIND = "SGLANG_CRASHKIT_WEBHOOK", "SGLANG_CRASHKIT_WEBHOOK_KIND"
EVENT = "SGLANG_CRASHKIT_KUBERNETES_EVENT"
SECRET = "SGLANG_CRASHKIT_WEBHOOK_SECRET"  # noqa: S105 - the name of a variable
#: What the command is told the incident's folder by.
INCIDENT = "SGLANG_CRASHKIT_INCIDENT"
#: What came of it, in the incident's folder.
OUTCOME = "notifications.json"
#: Incidents that nobody is to be woken for: somebody asked for the stacks.
QUIET_KINDS = frozenset({"snapshot"})
_DEFAULT_COMMAND_SECS = 30.0

Kind = Literal["slack", "alertmanager", "json"]


@dataclass(frozen=True)
class Plan:
    """Who is told."""

    command: tuple[str, ...]  # the program and its arguments; empty for none
    command_secs: float  # how long it may take, in seconds
    url: str  # where the web hook is; empty for none
    kind: Kind  # what it takes
    makes_event: bool  # whether an Event of the pod is made
    otlp: str  # where an OpenTelemetry log record goes; empty for none
    problems: Mapping[str, str]  # what cannot be done, and why, by ``command`` and ``webhook``

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Plan:
        """Read it from `environ`."""
        problems: dict[str, str] = {}
        command: tuple[str, ...] = ()
        try:
            command = tuple(shlex.split(environ.get(COMMAND, "")))
        except ValueError as error:
            problems["command"] = f"{COMMAND} cannot be split into words: {error}"
        url = environ.get(WEBHOOK, "").strip()
        if url and not _is_http(url):
            # It may hold a token, so it is not repeated.
            problems["webhook"] = f"{WEBHOOK} is no http or https URL, or has a name and password in it"
            url = ""
        secs = read_seconds(environ, COMMAND_SECS, _DEFAULT_COMMAND_SECS)
        kind, makes_event = _kind_of(url, environ), read_bool(environ, EVENT, False)
        otlp = environ.get(OTLP_ENDPOINT, "").strip()
        return cls(command, secs, url, kind, makes_event, otlp, problems)


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether anybody is to be told."""
    return any(environ.get(name, "").strip() for name in (COMMAND, WEBHOOK, OTLP_ENDPOINT)) or read_bool(
        environ, EVENT, False
    )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # A name and password in it are not sent by urllib, and would stand in its errors.
        is_plain = "@" not in parts.netloc and url.isascii() and url.isprintable() and " " not in url
        return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _kind_of(url: str, environ: Mapping[str, str]) -> Kind:
    named = environ.get(WEBHOOK_KIND, "").strip().lower()
    parts = urlsplit(url)
    if named == "slack" or (not named and parts.hostname == "hooks.slack.com"):
        return "slack"
    if named == "alertmanager" or (not named and parts.path.endswith("/api/v2/alerts")):
        return "alertmanager"
    return "json"
