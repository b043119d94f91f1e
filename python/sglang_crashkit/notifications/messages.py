"""What a web hook is sent of an incident: in a few words, and never a prompt."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from sglang_crashkit.incident.summary import headline, mapping_of
from sglang_crashkit.notifications.plan import Kind

_MAX_WORDS = 500
#: Kinds of incidents of servers that went on.
_OBSERVED = frozenset({"hang", "peer_lost"})


def short_of(document: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return what is sent of an incident.

    Args:
        document: see `Incident.to_json`.
        folder: where it is.
    """
    server, verdict = mapping_of(document.get("server")), mapping_of(document.get("verdict"))
    cause, fault = mapping_of(document.get("cause")), mapping_of(document.get("fault"))
    requests, environment = mapping_of(document.get("requests")), mapping_of(document.get("environment"))
    return {
        "schema_version": 1,
        "id": document.get("id"),
        "kind": document.get("kind"),
        "time": mapping_of(document.get("trigger")).get("time"),
        "host": server.get("hostname"),
        "pid": server.get("pid"),
        "release": server.get("sglang_version"),
        "model": environment.get("model"),
        "headline": headline(dict(document))[:_MAX_WORDS],
        "text": str(verdict.get("text") or "")[:_MAX_WORDS],
        "level": verdict.get("level"),
        "rank": _rank_in(verdict),
        "cause": cause.get("class"),
        "cause_words": cause.get("words"),
        "requests_unfinished": requests.get("unfinished"),
        "fault": fault.get("key"),
        "seen": fault.get("count"),
        "path": folder,
    }


def is_observed(short: Mapping[str, Any]) -> bool:
    """Say whether the server went on; see `short_of`."""
    return short["kind"] in _OBSERVED


def _rank_in(verdict: Mapping[str, Any]) -> str | None:
    """Return the title of what failed first without SGLang's prefix, such as ``scheduler_TP1``; None if unknown."""
    title = mapping_of(verdict.get("first_failure")).get("title")
    return str(title).removeprefix("sglang::") if title else None


def body_of(short: Mapping[str, Any], kind: Kind) -> bytes:
    """Return the body of a request to a web hook.

    Args:
        short: see `short_of`.
        kind: what the hook takes.
    """
    if kind == "slack":
        return json.dumps({"text": _for_slack(short)}).encode()
    if kind == "alertmanager":
        return json.dumps([_alert(short)]).encode()
    return json.dumps(short).encode()


def signature_of(secret: str, timestamp: str, body: bytes) -> str:
    """Return the HMAC-SHA256 of the time, a dot and the body, in hexadecimal."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _for_slack(short: Mapping[str, Any]) -> str:
    # As Slack asks for: these three are its own marks.
    lines = [f"*SGLang {short['kind']} on {short['host']}*: {short['headline']}"]
    lines += [short["text"]] if short["text"] else []
    lines += [f"cause: {short['cause_words']}"] if short["cause_words"] else []
    seen = f", seen {short['seen']} times" if (short["seen"] or 0) > 1 else ""
    lines.append(f"SGLang {short['release']}{seen}; {short['path']}")
    text = "\n".join(lines).replace("&", "&amp;")
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _alert(short: Mapping[str, Any]) -> dict[str, Any]:
    labels = {
        "alertname": "SGLangIncident",
        "severity": "warning" if is_observed(short) else "critical",
        "instance": short["host"],
        "kind": short["kind"],
        "cause": short["cause"],
        "fault": short["fault"],
        "release": short["release"],
    }
    return {
        # A label without a value is none.
        "labels": {name: str(value) for name, value in labels.items() if value},
        "annotations": {"summary": short["headline"], "description": str(short["cause_words"]), "path": short["path"]},
        "startsAt": short["time"],
    }
