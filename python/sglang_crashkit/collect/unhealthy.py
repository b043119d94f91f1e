"""Wait until a server is unhealthy: its health check fails, or is not answered.

``/health_generate`` sends a request through the schedulers. It answers 200 after a second or more, 503 after
``SGLANG_HEALTH_CHECK_TIMEOUT`` (20 s) without a response of theirs, and 503 at once while the server starts or ends. A
server that hangs may answer nothing at all; checks would pile up in it, so only one is sent at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from sglang_crashkit.errors import UsageError
from sglang_crashkit.kernel.server_address import Address, holders_of, listening_at

_PATH = "/health_generate"
#: In seconds: the timeout of a check, longer than the server takes to give up; the pause from an answer to the next
#: check; and the time within which a failing answer means that the server starts or ends.
ASK_SECS, PAUSE_SECS, AT_ONCE_SECS = 30.0, 5.0, 2.0
#: Failures in a row that make a server unhealthy: a single connection may fail.
_FAILURES = 2


def wait_until_unhealthy(address: Address, most_secs: float, say: Callable[[str], object]) -> str:
    """Return a sentence why a server is unhealthy; empty where it does not become so within `most_secs` seconds.

    A server that refuses before it was ever healthy is taken to start. `say` is called with a line for each change.

    Raises:
        UsageError: there is no health check at the address.
    """
    deadline, is_ready, failures, said = time.monotonic() + most_secs, False, 0, ""
    while time.monotonic() < deadline:
        began = time.monotonic()
        try:
            status = address.ask(_PATH, ASK_SECS)
            problem = f"its health check is answered with status {status}" if status != 200 else ""
            is_start = status >= 500 and time.monotonic() < began + AT_ONCE_SECS
        except TimeoutError:
            # The timeout is longer than the server takes to fail a check.
            return f"its health check is not answered within {ASK_SECS:g} s"
        except OSError as error:
            status, problem, is_start = 0, f"its health check cannot be asked: {error}", True
        if 400 <= status < 500:
            raise UsageError(f"{address}{_PATH}: {problem}", next_step="name an SGLang server, as http://HOST:PORT")
        is_ready = is_ready or not problem
        failures = failures + 1 if problem and (is_ready or not is_start) else 0
        if failures >= _FAILURES:
            return problem
        state = problem or "it is healthy"
        if state != said:
            say(f"{address}: {state}{'' if is_ready or failures else '; waiting until it is ready'}")
            said = state
        time.sleep(max(0.0, min(PAUSE_SECS, deadline - time.monotonic())))
    return ""


def process_at(address: Address) -> int | None:
    """Return the pid that listens at an address of this host; None where it cannot be seen, such as another user's."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - a process is no path
    return next(iter(holders_of(listening_at(address.port), pids).values()), None)
