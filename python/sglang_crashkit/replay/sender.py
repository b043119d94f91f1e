"""Send requests to a server, as many at once as were under way."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.replay.requests import StoredRequest
from sglang_crashkit.watch.health import Address

#: No more requests are under way at once.
MAX_AT_ONCE = 512
_LOOK_SECS = 0.05


@dataclass
class Answer:
    """What came of a request."""

    rid: str  # its id
    status: int | None = None  # the HTTP status; None where there was no answer
    problem: str = ""  # why there was none, or what the server has against it; empty otherwise
    secs: float = 0.0  # how long it took, in seconds

    @property
    def is_refused(self) -> bool:
        """Whether the server did not take the request."""
        return self.status is not None and 400 <= self.status < 500

    @property
    def is_lost(self) -> bool:
        """Whether no answer came."""
        return self.status is None


def send(
    address: Address, body: Mapping[str, Any], timeout_secs: float, api_key: str = "", path: str = "/generate"
) -> Answer:
    """Send one request and read its answer, which is thrown away, to the end.

    The server may be silent for `timeout_secs`.
    """
    answer, began = Answer(str(body.get("rid"))), time.monotonic()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    connection = address.connect(timeout_secs)
    try:
        connection.request("POST", f"{address.prefix}{path}", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        text = response.read()
        answer.status = response.status
        if response.status >= 400:
            answer.problem = text[:500].decode(errors="replace")
    except TimeoutError:
        answer.problem = f"no answer within {timeout_secs:g} s"
    except (OSError, http.client.HTTPException) as error:
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
    at_once: int = MAX_AT_ONCE,
    is_over: Callable[[], bool] = lambda: False,
    on_answer: Callable[[Answer], object] = lambda _answer: None,
) -> list[Answer]:
    """Send requests in their order, as long as it may without waiting for the answers of those before.

    They are sent as far apart as they arrived, but no further than `max_gap_secs`. Nothing is waited for once
    `is_over`, as the server has ended. `on_answer` is called with each answer that is returned.

    Returns:
        The answers that came, in no order.
    """
    came: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    answers: list[Answer] = []
    free = threading.Semaphore(at_once)

    def ask(request: StoredRequest) -> None:
        with contextlib.suppress(Exception):
            came.put(send(address, request.body, timeout_secs, api_key, request.path))
        free.release()

    def take() -> list[Answer]:
        while not came.empty():
            answers.append(came.get())
            on_answer(answers[-1])
        return answers

    threads, before = [], None
    for request in requests:
        if before is not None and max_gap_secs:
            time.sleep(min(max_gap_secs, max(0.0, request.arrived - before.arrived)))
        while not free.acquire(timeout=_LOOK_SECS):
            take()
            if is_over():
                return answers
        # A request that is stuck must not keep this process.
        threads.append(threading.Thread(target=ask, args=(request,), daemon=True))
        threads[-1].start()
        take()
        before = request
    for thread in threads:
        while thread.is_alive() and not is_over():
            thread.join(_LOOK_SECS)
            take()
    return take()
