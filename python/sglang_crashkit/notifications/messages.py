"""What is sent of an incident to a web hook, or as an Event of its pod: in a few words, and never a prompt."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.first_screen import counts_of
from sglang_crashkit.incident.summary import headline
from sglang_crashkit.model.checked_json import mapping_of
from sglang_crashkit.notifications.plan import Kind

_MAX_WORDS = 500
#: Kinds of incidents of servers that went on.
_OBSERVED = frozenset({"hang", "peer_lost"})


def short_of(document: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return what is sent of an incident that lies in `folder`."""
    server, verdict = mapping_of(document.get("server")), mapping_of(document.get("verdict"))
    cause, fault = mapping_of(document.get("cause")), mapping_of(document.get("fault"))
    title = mapping_of(verdict.get("first_failure")).get("title")
    requests, environment = mapping_of(document.get("requests")), mapping_of(document.get("environment"))
    counts = counts_of(requests)
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
        # Without SGLang's prefix, such as ``scheduler_TP1``.
        "rank": str(title).removeprefix("sglang::") if title else None,
        "cause": cause.get("class"),
        "cause_words": cause.get("words"),
        "requests_unfinished": counts.unfinished if counts is not None else requests.get("unfinished"),
        "fault": fault.get("key"),
        "seen": fault.get("count"),
        "path": folder,
    }


def is_observed(short: Mapping[str, Any]) -> bool:
    """Say whether the server went on; see `short_of`."""
    return short["kind"] in _OBSERVED


def body_of(short: Mapping[str, Any], kind: Kind) -> bytes:
    """Return the body of a request to a web hook that takes `kind`; see `short_of`."""
    if kind == "slack":
        return json.dumps({"text": _for_slack(short)}).encode()
    if kind == "alertmanager":
        return json.dumps([_alert(short)]).encode()
    return json.dumps(short).encode()


def signature_of(secret: str, timestamp: str, body: bytes) -> str:
    """Return the HMAC-SHA256 of the time, a dot and the body, in hexadecimal."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _for_slack(short: Mapping[str, Any]) -> str:
    who = str(short["headline"]).removeprefix(f"{short['kind']}: ")
    lines = [f"*SGLang {short['kind']} on {short['host']}*: {who}"]
    lines += [short["text"]] if short["text"] else []
    lines += [f"cause: {short['cause_words']}"] if short["cause_words"] else []
    seen = f", seen {short['seen']} times" if (short["seen"] or 0) > 1 else ""
    count = short["requests_unfinished"]
    requests = f", {count} request{'s' if count > 1 else ''} in flight" if count else ""
    lines.append(f"SGLang {short['release']}{requests}{seen}; {short['path']}")
    # As Slack asks for: these three are its own marks.
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
        "annotations": {
            "summary": short["headline"],
            "description": short["cause_words"] or short["text"],
            "path": short["path"],
        },
        "startsAt": short["time"],
    }


_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: What the API takes as a message.
_MAX_MESSAGE = 1024


@dataclass(frozen=True)
class Cluster:
    """How Kubernetes' API is reached from a pod; see "Accessing the Kubernetes API from a Pod" in its documents."""

    url: str  # where events are made
    token: Path  # the file of the service account's token
    authority: Path  # the file of the certificate that the API's is signed by
    namespace: str  # the pod's
    pod: str  # its name


def find_cluster(environ: Mapping[str, str], account: Path = _ACCOUNT) -> Cluster | str:
    """Return how the API is reached; why it cannot be where this is no pod, or one without a service account."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    pod = environ.get("POD_NAME") or environ.get("HOSTNAME")
    if not host or not pod:
        return "this is no pod: KUBERNETES_SERVICE_HOST or HOSTNAME is not set"
    try:
        namespace = (account / "namespace").read_text().strip()
    except OSError as error:
        return f"there is no service account: {error}"
    where = f"[{host}]" if ":" in host else host
    url = f"https://{where}:{port}/api/v1/namespaces/{namespace}/events"
    return Cluster(url, account / "token", account / "ca.crt", namespace, pod)


def event_of(short: Mapping[str, Any], cluster: Cluster) -> bytes:
    """Return the Event of an incident, which a role with the verb ``create`` on ``events`` may make; see `short_of`."""
    seconds, place = f"{str(short['time'])[:19]}Z", {"namespace": cluster.namespace}
    message = "; ".join(filter(None, (str(short["headline"]), short["text"], str(short["path"]))))
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "sglang-incident-", **place},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "name": cluster.pod, **place},
            "type": "Warning",
            "reason": "SGLangIncident",
            "message": message[:_MAX_MESSAGE],
            "source": {"component": "sglang-crashkit"},
            "firstTimestamp": seconds,
            "lastTimestamp": seconds,
            "count": 1,
        }
    ).encode()
