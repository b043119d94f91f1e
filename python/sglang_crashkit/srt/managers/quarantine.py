"""Keep requests that are known to kill a server from its ranks: checked where the tokenizer manager takes them in.

The file is read by a thread of its own, as a disk may stand still; a request costs a look at what that left. Where the
file cannot be believed nothing is refused.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.quarantine import FILE, Entry, Index, read_entries
from sglang_crashkit.settings import read_quarantine
from sglang_crashkit.srt.hooks import notify

logger = logging.getLogger(__name__)

#: How often the file is looked at, in seconds.
READ_SECS = 5.0
#: Of the requests that are recognised so many are logged each time the file is looked at.
_MAX_LOGGED = 10
#: So many requests of a batch are looked at: the event loop waits for it.
_MAX_OF_BATCH = 256
#: How the ids of SGLang's own health checks begin; a server that refused them would be taken for a dead one.
_HEALTH_CHECK = "HEALTH_CHECK"
_OTHER_INPUTS = ("image_data", "audio_data", "video_data", "input_embeds")


class QuarantinedError(ValueError):
    """The request is known to kill a server. SGLang answers a ValueError, some releases with this status."""

    status_code = HTTPStatus.UNPROCESSABLE_ENTITY


class Quarantine:
    """What is known to kill a server.

    Args:
        folder: the crash folder.
        refuses: a request that is recognised is refused, and not only logged.
    """

    def __init__(self, folder: Path, *, refuses: bool) -> None:
        self.refuses = refuses
        self.hits = 0
        self._folder = folder
        self._index = Index()
        self._problem = ""
        self._to_log = _MAX_LOGGED

    def watch(self) -> None:
        """Read the file now and again, in a thread that ends when nobody asks this any more."""
        threading.Thread(target=_follow, args=(weakref.ref(self),), name="crash kit quarantine", daemon=True).start()

    def read(self) -> None:
        """Read the file; where that fails nothing is in quarantine, and a warning says so once."""
        self._to_log = _MAX_LOGGED
        try:
            self._index = Index(read_entries(self._folder))
            self._problem = ""
        except (CrashkitError, OSError) as error:
            self._index = Index()
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("crash kit: no request is in quarantine: %s", error)

    def check(self, request: Any) -> Entry | None:
        """Return what recognises a request, or one of a batch; None where nothing does, or it is only to be logged.

        Args:
            request: SGLang's ``GenerateReqInput`` as it came.
        """
        index = self._index
        if not index or str(getattr(request, "rid", None)).startswith(_HEALTH_CHECK):
            return None
        for get in itertools.islice(_each(request), _MAX_OF_BATCH):
            entry = index.find(get)
            # What else a prompt is made of is not in an entry.
            if entry is not None and (entry.prompt == "any" or not any(map(get, _OTHER_INPUTS))):
                return self._note(entry)
        return None

    def _note(self, entry: Entry) -> Entry | None:
        self.hits += 1
        if self._to_log > 0:
            self._to_log -= 1
            done = "refused" if self.refuses else "let through"
            logger.warning(
                "crash kit: a request is %s that is known to kill a server (%s; incident %s; %s; %d so far)",
                *(done, entry.words, entry.incident, entry.reason, self.hits),
            )
        return entry if self.refuses else None


def _follow(its: weakref.ref[Quarantine]) -> None:
    told = 0
    while (quarantine := its()) is not None:
        quarantine.read()
        # Not with each request: there may be many.
        if quarantine.hits != told and notify("quarantine", hits=quarantine.hits):
            told = quarantine.hits
        del quarantine
        time.sleep(READ_SECS)


def _each(request: Any) -> Iterator[Callable[[str], Any]]:
    """Yield a getter of fields for each request of what may be a batch."""
    text, ids = getattr(request, "text", None), getattr(request, "input_ids", None)
    if isinstance(text, list):
        count: int | None = len(text)
    else:
        count = len(ids) if isinstance(ids, list) and ids and isinstance(ids[0], list) else None
    for number in range(count) if count is not None else (None,):
        yield functools.partial(_field, request, number)


def _field(request: Any, number: int | None, name: str) -> Any:
    parent, _, child = name.partition(".")
    value = getattr(request, parent, None)
    if number is not None and isinstance(value, (list, tuple)) and number < len(value):
        value = value[number]
    if child:
        return value.get(child) if isinstance(value, dict) else None
    return list(value) if isinstance(value, tuple) else value


def guard_requests(manager: Any) -> None:
    """Have a tokenizer manager refuse, or log, what is in quarantine; nothing happens where that is off.

    Args:
        manager: the ``TokenizerManager``, which has its crash folder.
    """
    wanted, folder = read_quarantine(os.environ), getattr(manager, "crash_dump_folder", None)
    if wanted == "off":
        return
    if not folder:
        logger.warning("crash kit: SGLANG_CRASHKIT_QUARANTINE needs --crash-dump-folder, where %s is", FILE)
        return
    quarantine = Quarantine(Path(folder), refuses=wanted == "refuse")
    quarantine.watch()
    generate = manager.generate_request

    @functools.wraps(generate)
    def generate_request(obj: Any, request: Any = None) -> Any:
        try:
            entry = quarantine.check(obj)
        except Exception:
            logger.warning("crash kit: a request could not be looked up in the quarantine", exc_info=True)
            entry = None
        # A program of its own is never failed, and a server that warms up would end.
        if entry is not None and request is not None and not _is_starting(manager):
            _refuse(entry, is_http=not getattr(obj, "stream", False) and not getattr(obj, "audio_data", None))
        return generate(obj, request)

    manager.generate_request = generate_request


def _is_starting(manager: Any) -> bool:
    return str(getattr(getattr(manager, "server_status", None), "name", "")) == "Starting"


def _refuse(entry: Entry, *, is_http: bool) -> None:
    """Raise what SGLang answers with status 422, which no router tries elsewhere.

    FastAPI has been imported by whoever brings a request of its own.

    Raises:
        Exception: always.
    """
    text = f"this request is known to kill a server: {entry.words}; incident {entry.incident}: {entry.reason}"
    if is_http:
        # In a stream the status is sent already, and SGLang writes the error of a ValueError into it.
        raise sys.modules["fastapi"].HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, text)
    raise QuarantinedError(text)
