"""Send requests to a server, as many at once as were under way."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.incident.requests import StoredRequest
from sglang_crashkit.kernel.server_address import Address

#: No more requests are under way at once.
_MAX_AT_ONCE = 512
_LOOK_SECS = 0.05


@dataclass
class Answer:
    """What came of a request."""

    rid: str  # its id
    status: int | None = None  # the HTTP status; None where there was no answer
    problem: str = ""  # why there was no answer, or what the server has against it; empty otherwise
    secs: float = 0.0  # how long it took, in seconds

    @property
    def is_refused(self) -> bool:
        """Whether the server did not take the request."""
        return self.status is not None and 400 <= self.status < 500


def send(
    address: Address,
    body: Mapping[str, Any],
    timeout_secs: float,
    api_key: str = "",
    path: str = "/generate",
    is_meant: Callable[[], bool] = lambda: True,
) -> Answer:
    """Send one request and read its answer, which is thrown away, to the end.

    The server may be silent for `timeout_secs`. Nothing is sent unless, once the connection is made, the server that
    listens at the address `is_meant`.
    """
    answer, began = Answer(str(body.get("rid"))), time.monotonic()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    connection = address.connect(timeout_secs)
    try:
        connection.connect()
        if not is_meant():
            raise ConnectionError(f"what listens at {address} is not the server that was started: nothing was sent")
        connection.request("POST", f"{address.prefix}{path}", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        text = response.read()
        answer.status = response.status
        if response.status >= 400:
            answer.problem = text[:500].decode(errors="replace")
    except TimeoutError:
        answer.problem = f"no answer within {timeout_secs:g} s"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.problem = str(error) or type(error).__name__
    finally:
        connection.close()
    answer.secs = time.monotonic() - began
    return answer


def send_all(
    address: Address,
    requests: Sequence[StoredRequest],
    timeout_secs: float,
    *,
    api_key: str = "",
    max_gap_secs: float = 0.0,
    is_over: Callable[[], bool] = lambda: False,
    is_meant: Callable[[], bool] = lambda: True,
) -> list[Answer]:
    """Send requests in their order, without waiting for the answers of those before, and return what was answered.

    They are sent as far apart as they arrived, but no further than `max_gap_secs`. Nothing is waited for once
    `is_over`, as the server has ended; for `is_meant` see `send`.
    """
    answers: list[Answer] = []
    free = threading.Semaphore(_MAX_AT_ONCE)

    def ask(request: StoredRequest) -> None:
        answers.append(send(address, request.body, timeout_secs, api_key, request.path, is_meant))
        free.release()

    threads: list[threading.Thread] = []
    for before, request in zip([None, *requests], requests, strict=False):
        if before is not None and max_gap_secs:
            time.sleep(min(max_gap_secs, max(0.0, request.arrived - before.arrived)))
        while not free.acquire(timeout=_LOOK_SECS):
            if is_over():
                return [*answers]
        # A request that is stuck must not keep this process.
        threads.append(threading.Thread(target=ask, args=(request,), daemon=True))
        threads[-1].start()
    for thread in threads:
        while thread.is_alive() and not is_over():
            thread.join(_LOOK_SECS)
    return [*answers]
