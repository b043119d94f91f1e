"""Tell Kubernetes why a container ended: its termination message.

The kubelet creates a file in the container (``terminationMessagePath``, ``/dev/termination-log`` unless the pod says
otherwise), reads at most 4,096 bytes of it when the container has ended, and shows them in the pod's status. Source:
"Determine the Reason for Pod Failure" in the Kubernetes documentation.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

VARIABLE = "SGLANG_CRASHKIT_TERMINATION_LOG"
_DEFAULT = "/dev/termination-log"
_MOST_BYTES = 4096
_OFF = {"", "0", "false", "no", "n"}


def write_termination_message(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Write `text` into the container's termination message, in place of what is there.

    The file is never created: outside a container there is none. ``SGLANG_CRASHKIT_TERMINATION_LOG`` names another
    one, and switches this off by ``0`` or an empty value.

    Args:
        text: the message; what is beyond 4,096 bytes is left away.
        environ: the environment.

    Returns:
        Whether it was written.
    """
    path = environ.get(VARIABLE, _DEFAULT).strip()
    if path.lower() in _OFF:
        return False
    data = _cut(text.encode(errors="backslashreplace"))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        os.ftruncate(descriptor, 0)
        return os.write(descriptor, data) == len(data)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _cut(data: bytes) -> bytes:
    if len(data) <= _MOST_BYTES:
        return data
    mark = b" ..."
    return data[: _MOST_BYTES - len(mark)].decode(errors="ignore").encode() + mark
