"""Keep requests that kill a server from its ranks, where the tokenizer manager takes them in, and send suspects alone.

The file is read by a thread of its own, as a disk may stand still; a request costs a look at what that left. Where the
file cannot be believed nothing is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.quarantine import FILE, MAX_ENTRIES, Entry, Index, clear_suspects, note_seen, read_entries
from sglang_crashkit.incident.request_fingerprint import OTHER_INPUTS, PARAMETERS, rest_of
from sglang_crashkit.memory.journal import to_json
from sglang_crashkit.settings import read_quarantine
from sglang_crashkit.srt.hooks import notify

logger = logging.getLogger(__name__)

#: How often the file is looked at, in seconds.
READ_SECS = 5.0
#: How often it is told which of them still come, and how long it counts without a look, in seconds: some expire.
_TELL_SECS, _ANEW_SECS = 60.0, 60.0
#: A suspect is sent alone so often for an incident, whatever becomes of it: others are held for it each time.
MAX_SENT = 3
#: Of the requests that are recognised so many are logged each time the file is looked at.
_MAX_LOGGED = 10
#: So many requests of a batch are looked at: the event loop waits for it.
_MAX_OF_BATCH = 256
#: How the ids of SGLang's own health checks begin; a server that refused them would be taken for a dead one.
_HEALTH_CHECK = "HEALTH_CHECK"


class QuarantinedError(ValueError):
    """The request is known to kill a server. SGLang answers a ValueError, some releases with this status."""

    status_code = HTTPStatus.UNPROCESSABLE_ENTITY


class Quarantine:
    """What the crash folder has of what is known, or suspected, to kill a server of that model and SGLang's release."""

    def __init__(self, folder: Path, model: str, release: str) -> None:
        self.hits = 0
        self._folder, self._model, self._release = folder, model, release
        self._index = Index()
        self._innocent: set[str] = set()
        #: How often one was sent alone, by suspect and incident that it is suspected of.
        self._sent: Counter[tuple[str, str]] = Counter()
        self._problem = ""
        self._to_log = _MAX_LOGGED
        #: When each of the proven came last, by its key, where the file is not told yet; and when it was told.
        self._seen: dict[str, float] = {}
        self._told = -math.inf
        #: What the file was as it was read, and when that was.
        self._stamp: tuple[int, ...] = ()
        self._read = -math.inf

    def watch(self) -> None:
        """Read the file now and again, in a thread that ends when nobody asks this any more."""
        threading.Thread(target=_follow, args=(weakref.ref(self),), name="crash kit quarantine", daemon=True).start()

    def read(self) -> None:
        """Read the file; where that fails nothing is in quarantine, and a warning says so once."""
        self._to_log = _MAX_LOGGED
        self._tell_seen()
        entries: list[Entry] = []
        cleared: set[str] = set()
        if innocent := set(self._innocent):
            # Where that cannot be written, this process knows it all the same.
            with contextlib.suppress(CrashkitError, OSError):
                clear_suspects(self._folder, innocent)
                cleared = innocent
        stamp, now = _stamp_of(self._folder / FILE), time.monotonic()
        if stamp == self._stamp and not (cleared or self._problem) and now < self._read + _ANEW_SECS:
            return
        self._stamp, self._read = stamp, now
        try:
            entries = [one for one in read_entries(self._folder) if one.counts_for(self._model, self._release)]
            self._problem = ""
        except (CrashkitError, OSError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("crash kit: no request is in quarantine: %s", error)
        self._index = Index(entries)
        # Not before: until now the index had them.
        self._innocent -= cleared

    def _tell_seen(self) -> None:
        if not self._seen or time.monotonic() < self._told + _TELL_SECS:
            return
        self._told = time.monotonic()
        seen, self._seen = self._seen, {}
        try:
            note_seen(self._folder, seen)
        except (CrashkitError, OSError):
            self._seen = seen | self._seen

    def find(self, request: Any) -> Entry | None:
        """Return what recognises a ``GenerateReqInput`` as it came, or one of a batch, the proven first; else None."""
        index, suspected = self._index, None
        if not index:
            return None
        for get in itertools.islice(_each(request), _MAX_OF_BATCH):
            entry = index.find(get, functools.partial(_rest_of, get))
            if entry is not None and self._counts(entry, request, get):
                if entry.level == "proven":
                    return entry
                suspected = entry
        return suspected

    def _counts(self, entry: Entry, request: Any, get: Callable[[str], Any]) -> bool:
        # What else a prompt is made of is not in an entry.
        is_whole = entry.prompt == "any" or not any(map(get, OTHER_INPUTS))
        return is_whole and entry.key not in self._innocent and not is_health_check(request)

    def note(self, entry: Entry, done: str) -> None:
        """Count and log a request that was recognised, and what is done about it."""
        self.hits += 1
        if entry.level == "proven":
            # As long as it comes it is kept out.
            self._seen[entry.key] = time.time()
        if self._to_log > 0:
            self._to_log -= 1
            logger.warning(
                "crash kit: a request is %s that is %s to kill a server (%s; incident %s; %s; %d so far)",
                *(done, "known" if entry.level == "proven" else "suspected", entry.words),
                *(entry.origin.incident, entry.origin.reason, self.hits),
            )

    def clear_suspicion(self, entry: Entry) -> None:
        """Have a suspect not be isolated again, as the server has answered it."""
        self._innocent.add(entry.key)

    def may_isolate(self, entry: Entry) -> bool:
        """Count that a suspect is to be sent alone, and say whether it may."""
        if len(self._sent) >= MAX_ENTRIES:
            self._sent.clear()
        self._sent[entry.key, entry.origin.incident] += 1
        return self._sent[entry.key, entry.origin.incident] <= MAX_SENT


def _stamp_of(path: Path) -> tuple[int, ...]:
    """Return what changes where a file does; empty where there is none.

    A network file system asks its server as a file is opened, and not as its name is looked up.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        about = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


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
    fields = getattr(request, "__dict__", {})
    text = fields.get("text")
    prompts = fields.get("input_ids") if text is None else text
    if isinstance(prompts, list) and prompts and (text is not None or isinstance(prompts[0], list)):
        for number in range(len(prompts)):
            yield functools.partial(_field, fields, number)
    else:
        yield fields.get


def _field(fields: dict[str, Any], number: int, name: str) -> Any:
    """Return a field of one request of a batch."""
    value = fields.get(name)
    if not isinstance(value, (list, tuple)) or number >= len(value):
        return value
    # Token ids are of each request where they are one list.
    return value[number] if name != "token_ids_logprob" or isinstance(value[0], list) else value


def _rest_of(get: Callable[[str], Any]) -> str | None:
    """Return the hash of all that a request asks for, of the form in which an incident has it."""
    try:
        return rest_of(json.loads(to_json({name: get(name) for name in PARAMETERS}), parse_constant=str))
    except (ValueError, TypeError, RecursionError):
        return None


def guard_requests(manager: Any) -> None:
    """Have a ``TokenizerManager`` refuse, or log, what is in quarantine, and send suspects alone, where that is on.

    It has its crash folder by then.
    """
    wanted, folder = read_quarantine(os.environ), getattr(manager, "crash_dump_folder", None)
    if wanted == "off":
        return
    if not folder:
        logger.warning("crash kit: SGLANG_CRASHKIT_QUARANTINE needs --crash-dump-folder, where %s is", FILE)
        return
    # To import it takes a while, and most servers have no quarantine.
    from sglang_crashkit.srt.managers.isolation import Isolation

    model = str(getattr(getattr(manager, "server_args", None), "model_path", ""))
    quarantine = Quarantine(Path(folder), model, _release())
    quarantine.watch()
    isolation = Isolation(functools.partial(_is_busy, manager), lambda: bool(getattr(manager, "gracefully_exit", 0)))
    generate, abort = manager.generate_request, getattr(manager, "abort_request", None)

    @functools.wraps(generate)
    def generate_request(obj: Any, request: Any = None) -> Any:
        try:
            entry = quarantine.find(obj)
        except Exception:
            logger.warning("crash kit: a request could not be looked up in the quarantine", exc_info=True)
            entry = None
        if entry is None and not isolation.is_holding:
            return generate(obj, request)
        # A program of its own is never failed, and a server that warms up would end.
        if request is None or _is_starting(manager) or is_health_check(obj):
            return generate(obj, request)
        if entry is not None and entry.level == "proven":
            quarantine.note(entry, "refused" if wanted == "refuse" else "let through")
            if wanted == "refuse":
                _refuse(entry, is_http=not getattr(obj, "stream", False) and not getattr(obj, "audio_data", None))
        if _is_one_of_a_pair(manager):
            return generate(obj, request)
        # What runs in the background goes on without its client.
        rids, client = _rids_of(obj), None if getattr(obj, "background", False) else request
        if entry is not None and entry.level == "suspected" and quarantine.may_isolate(entry):
            quarantine.note(entry, "sent alone")
            on_answer = functools.partial(quarantine.clear_suspicion, entry)
            return isolation.alone(generate(obj, request), rids, client, on_answer, is_single=_is_single(obj))
        return isolation.later(generate(obj, request), rids, client) if isolation.is_holding else generate(obj, request)

    manager.generate_request = generate_request
    if abort is not None:

        @functools.wraps(abort)
        def abort_request(rid: str = "", abort_all: bool = False, *args: Any, **kwargs: Any) -> Any:
            isolation.abort(rid, everything=abort_all)
            return abort(rid, abort_all, *args, **kwargs)

        manager.abort_request = abort_request


def _is_single(request: Any) -> bool:
    """Say whether a request has one answer."""
    parameters = getattr(request, "sampling_params", None)
    several = parameters.get("n", 1) not in (None, 1) if isinstance(parameters, dict) else isinstance(parameters, list)
    return not several and len(list(itertools.islice(_each(request), 2))) == 1


def _release() -> str:
    from importlib import metadata

    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def is_health_check(request: Any) -> bool:
    """Say whether SGLang asks itself."""
    return str(getattr(request, "rid", None)).startswith(_HEALTH_CHECK)


def _is_busy(manager: Any) -> bool:
    return any(not str(rid).startswith(_HEALTH_CHECK) for rid in getattr(manager, "rid_to_state", ()))


def _is_one_of_a_pair(manager: Any) -> bool:
    """Say whether the other server of a pair of prefill and decode would wait, too."""
    mode = getattr(manager, "disaggregation_mode", None)
    return getattr(mode, "value", mode) not in (None, "null")


def _rids_of(request: Any) -> list[str]:
    rid = getattr(request, "rid", None)
    return [str(one) for one in (rid if isinstance(rid, list) else [rid]) if one is not None]


def _is_starting(manager: Any) -> bool:
    return str(getattr(getattr(manager, "server_status", None), "name", "")) == "Starting"


def _refuse(entry: Entry, *, is_http: bool) -> None:
    """Raise what SGLang answers with status 422, which no router tries elsewhere.

    FastAPI has been imported by whoever brings a request of its own.

    Raises:
        Exception: always.
    """
    told = f"{entry.words}; incident {entry.origin.incident}: {entry.origin.reason}"
    text = f"this request is known to kill a server: {told}"
    if is_http:
        # In a stream the status is sent already, and SGLang writes the error of a ValueError into it.
        raise sys.modules["fastapi"].HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, text)
    raise QuarantinedError(text)
