"""Tell the crash handler what only the launching process knows: its resolved arguments, and the versions it runs."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from typing import Any

from sglang_crashkit.capture.environment import read_versions
from sglang_crashkit.memory.ring import write_blob
from sglang_crashkit.settings import SOCKET_VARIABLE
from sglang_crashkit.srt.hooks import never_raises, notify
from sglang_crashkit.srt.redaction import fields_of, redact, redacted_fields

_MAX_WORDS = 1000
#: Each is looked for on the whole of Python's path.
_versions = functools.cache(read_versions)

_server_args: Any = None


@never_raises
def tell_surroundings(server_args: Any) -> None:
    """Tell the crash handler with which arguments this process launches a server; without the secrets in them.

    Args:
        server_args: SGLang's ``ServerArgs``.
    """
    global _server_args
    _server_args = server_args
    _tell(ready=False)


@never_raises
def tell_ready() -> None:
    """Tell the crash handler that the ranks are ready, and the arguments again: some are resolved only meanwhile."""
    if _server_args is not None:
        _tell(ready=True)


def _tell(*, ready: bool) -> None:
    if not os.environ.get(SOCKET_VARIABLE):
        return
    facts = {
        "command_line": redact(shlex.join(sys.orig_argv), _server_args),
        "arguments": redacted_fields(_resolved(_server_args)),
        "versions": _versions(),
    }
    descriptor = write_blob(json.dumps(facts, default=_in_words).encode())
    try:
        notify("surroundings", descriptor=descriptor, ready=ready)
    finally:
        os.close(descriptor)


def _resolved(server_args: Any) -> dict[str, Any]:
    # Where it is not there the fields themselves are resolved.
    resolve = getattr(server_args, "resolved_dict", None)
    return resolve() if callable(resolve) else fields_of(server_args)


def _in_words(value: object) -> str:
    return redact(str(value), _server_args)[:_MAX_WORDS]
