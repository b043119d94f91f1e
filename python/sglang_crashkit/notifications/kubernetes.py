"""An Event of the pod that an incident happened in, where its service account may make one.

Sources: "Accessing the Kubernetes API from a Pod" and ``Event v1`` of Kubernetes' API reference. A role needs the verb
``create`` on ``events``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENT = "SGLANG_CRASHKIT_KUBERNETES_EVENT"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: What the API takes as a message.
_MAX_MESSAGE = 1024


@dataclass(frozen=True)
class Cluster:
    """How the API is reached.

    Attributes:
        url: where events are made.
        token: the file of the service account's token.
        authority: the file of the certificate that the API's is signed by.
        namespace: the pod's.
        pod: its name.
    """

    url: str
    token: Path
    authority: Path
    namespace: str
    pod: str


def find_cluster(environ: Mapping[str, str], account: Path = _ACCOUNT) -> Cluster | str:
    """Return how the API is reached; why it cannot be where this is no pod, or one without a service account.

    Args:
        environ: as the kubelet sets it.
        account: where it mounts the service account.
    """
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
    """Return the Event of an incident; see `messages.short_of`."""
    seconds = f"{str(short['time'])[:19]}Z"
    message = "; ".join(filter(None, (str(short["headline"]), short["text"], str(short["path"]))))
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "sglang-incident-", "namespace": cluster.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": cluster.pod,
                "namespace": cluster.namespace,
            },
            "type": "Warning",
            "reason": "SGLangIncident",
            "message": message[:_MAX_MESSAGE],
            "source": {"component": "sglang-crashkit"},
            "firstTimestamp": seconds,
            "lastTimestamp": seconds,
            "count": 1,
        }
    ).encode()
