"""Ask a server for its health, and for something else, one question at a time.

``/health_generate`` sends a request through the schedulers and answers 200 after a second or more, 503 after
``SGLANG_HEALTH_CHECK_TIMEOUT`` (20 s) without a sign of them, and 503 at once while the server starts or ends. A server
that stands still may answer nothing at all; whoever then asks again and again only piles up connections in it, so there
is never a second question while one waits. ``/server_info`` is answered by the schedulers' event loops, of a paused
server too, which does not take in health checks; what they answer is also the sign of life that a health check waits
for, which succeeds then. Of neither answer more than the status is read. Health checks need no key; where
``/server_info`` needs one, nothing is known.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_crashkit.errors import UsageError

#: The last answer of the health check: ``starting`` is a 503 at once, as of a server that starts or ends; ``failed`` a
#: 503 after it tried; ``silent`` none in time; ``waiting`` none yet; ``none`` where there is nothing to ask.
Health = Literal["ok", "starting", "failed", "silent", "refused", "waiting", "none"]

HEALTH_PATH, INFO_PATH = "/health_generate", "/server_info"

#: The server waits for `SGLANG_HEALTH_CHECK_TIMEOUT` seconds before it says 503; one that comes sooner tells of its
#: start or end, for which a busy machine takes its time.
_AT_ONCE_SECS = 2.0
#: One that is well answers in little more than that; who has not by then, in seconds, may not be.
_LATE_SECS = 2.0
#: Of a file with an API key.
_MAX_KEY_BYTES = 4096
_SCHEMES = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """Where a server answers HTTP."""

    scheme: str  # ``http`` or ``https``
    host: str  # name or number, without brackets
    port: int
    prefix: str = ""  # what stands before the paths, empty where it is not behind a proxy

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read an address from a URL.

        Raises:
            UsageError: it is none.
        """
        hint = "give it as http://HOST:PORT"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{url} is no URL: {error}", next_step=hint) from None
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise UsageError(f"{url} is no URL of a server", next_step=hint)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UsageError("the URL of a server has neither user, query nor fragment", next_step=hint)
        return cls(parts.scheme, parts.hostname, port or _SCHEMES[parts.scheme], parts.path.rstrip("/"))

    def connect(self, timeout_secs: float) -> http.client.HTTPConnection:
        """Return a connection to it, which is not made yet."""
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_secs)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


class Question:
    """One request, under way in a thread of its own."""

    def __init__(self, address: Address, path: str, timeout_secs: float, api_key: str = "") -> None:
        self._address, self._path, self._timeout_secs = address, path, timeout_secs
        self._headers = {"Connection": "close"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self.began = time.monotonic()
        self.status: int | None = None  # HTTP status of the answer, None where there is none
        self.secs = 0.0  # how long the answer took
        self.problem = ""  # why there is no answer: ``refused``, ``silent`` or a sentence
        self._over = threading.Event()
        # Not waited for at the end: whatever the server does, the watcher ends.
        threading.Thread(target=self._ask, name=f"ask {path}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or will be none."""
        return self._over.is_set()

    def _ask(self) -> None:
        address = self._address
        connection = address.connect(self._timeout_secs)
        try:
            connection.request("GET", address.prefix + self._path, headers=self._headers)
            self.status = connection.getresponse().status
        except TimeoutError:
            self.problem = "silent"
        except ConnectionError:
            self.problem = "refused"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.problem = f"{address} cannot be asked: {error}"
        finally:
            self.secs = time.monotonic() - self.began
            connection.close()
            self._over.set()


class HealthProbe:
    """Asks one server for its health again and again; `interval_secs` after an answer it asks the next question.

    A server may be silent for `timeout_secs`. The key goes with each question, and is shown nowhere.
    """

    def __init__(self, address: Address, interval_secs: float, timeout_secs: float, api_key: str = "") -> None:
        self.address = address
        self.asked = 0  # how often it was asked for its health
        self.problem = ""  # why it cannot be asked, empty where it can
        self._interval_secs, self._timeout_secs, self._api_key = interval_secs, timeout_secs, api_key
        self._question: Question | None = None
        self._last: Health = "waiting"
        self._due = 0.0
        self._other: Question | None = None

    def look(self) -> Health:
        """Return the health, and ask for it where it is time to."""
        question = self._question
        if question is None:
            if time.monotonic() >= self._due:
                self.asked += 1
                self._question = Question(self.address, HEALTH_PATH, self._timeout_secs, self._api_key)
        elif question.is_over:
            self._question = None
            self._last = self._read(question)
            self._due = time.monotonic() + self._interval_secs
        waiting = self._question
        if waiting is None or (self._last == "ok" and time.monotonic() < waiting.began + _LATE_SECS):
            return self._last
        return "waiting"

    def answers(self) -> bool | None:
        """Ask the schedulers something else, and say whether they answered; None where that is not known (yet).

        They are asked once, until `forget_answer`.
        """
        if self._other is None:
            self._other = Question(self.address, INFO_PATH, self._timeout_secs, self._api_key)
        if not self._other.is_over:
            return None
        if self._other.status is None:
            return False
        if self._other.status in (401, 403):
            self.problem = (
                f"{self.address}{INFO_PATH} is answered with {self._other.status}, so a server that is paused may be"
                " taken for one that hangs; next: give its key with --api-key-file"
            )
        return True if self._other.status == 200 else None

    @property
    def is_asking(self) -> bool:
        """Whether the schedulers were asked something else and have not answered yet."""
        return self._other is not None and not self._other.is_over

    def forget_answer(self, *, is_well: bool) -> None:
        """Let the schedulers be asked again.

        Where the server is not well, they may not have got the question yet that they did not answer, and are not asked
        another one.
        """
        if self._other is not None and self._other.is_over and (is_well or self._other.status is not None):
            self._other = None

    def _read(self, question: Question) -> Health:
        self.problem = "" if question.problem in ("refused", "silent") else question.problem
        if question.status is None:
            return "silent" if question.problem == "silent" else "refused"
        if question.status == 200:
            return "ok"
        if question.status == 503 and question.secs < _AT_ONCE_SECS:
            return "starting"
        if question.status >= 500:
            return "failed"
        self.problem = f"{self.address}{HEALTH_PATH} is answered with {question.status}"
        return "none"


def read_api_key(path: Path) -> str:
    """Return the API key that is the only line of the file, which may be a pipe.

    On a command line every user of the machine would see it.

    Raises:
        UsageError: the file cannot be read or holds no such line. What it holds is not shown.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", next_step="name another file") from None
    key = content.decode(errors="replace").strip()
    if not key or len(content) > _MAX_KEY_BYTES or not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"{path} holds no API key of one line of ASCII and at most {_MAX_KEY_BYTES} bytes",
            next_step="put nothing but the key into it",
        )
    return key
