"""Keep the last log records of this process in a ring, which the crash handler also holds, for an incident.

The ring's handler is added only to a logger that already has one: the first handler of a logger turns off Python's own
output of warnings, and a later setup of logging by a program. In a user's program the logger is SGLang's own.

Records of requests are skipped, and the body of a request in any other record is left out. This process removes the
secrets that it knows. The crash handler removes other secrets, and the prompts that are in the request journal. Without
a journal the words of exceptions are left out, because they may quote a prompt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from itertools import islice
from typing import Any

from sglang_crashkit.memory.ring import MAX_LOG_BYTES, LogWriter
from sglang_crashkit.redact import REDACTED
from sglang_crashkit.settings import Settings
from sglang_crashkit.srt.crash_exit import chain_of
from sglang_crashkit.srt.hooks import handler_pid, held_memory, never_raises
from sglang_crashkit.srt.redaction import known_secrets

logger = logging.getLogger(__name__)

#: The logger of ``RequestLogger`` in ``srt/utils/request_logger.py``, and how its records begin.
_REQUESTS = "sglang.srt.utils.request_logger"
_OF_REQUESTS = ("Receive: obj=", "Receive OpenAI: obj=", "Finish: obj=")
#: A field of a request or an answer that holds a prompt or an output, as Python or JSON writes it. The end of its value
#: cannot be found, so the rest of the line is left out as well.
_BODY = re.compile(
    r"""\b(text|prompt|messages|content|input_ids|output_ids|input_embeds|\w+_data)(["']?\s?[=:]\s?)["'\[{(].*"""
)
_LEFT_OUT = r"\1\2<left out>"
#: `_BODY` matches only a text that has one of these, and searching for them is ten times as fast.
_OF_BODIES = ("text", "prompt", "messages", "content", "put_ids", "input_embeds", "_data")
#: The maximum length of a record's text, in characters; the rest of the space is for the name of its logger.
_ROOM = MAX_LOG_BYTES - 128
#: The length of a text's head, and of its end, that is searched for secrets: more than is kept, so that none is cut.
_SEARCHED = 2 * MAX_LOG_BYTES
_GAP = "\n...\n"
_MIN_WORDS, _MAX_CHAIN = 6, 8


class RingHandler(logging.Handler):
    """Writes records to a ring, which the process `held_by` also holds; an error switches it off, with one warning.

    It removes the values in `secrets` and, unless it `quotes` exceptions, their words.
    """

    def __init__(self, ring: LogWriter, held_by: int | None, secrets: set[str], *, quotes: bool) -> None:
        super().__init__(logging.INFO)
        self.ring: LogWriter | None = ring
        self.held_by = held_by
        self.secrets = secrets
        self.quotes = quotes

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to the ring."""
        ring = self.ring
        if ring is None or record.name.startswith(_REQUESTS):
            return
        try:
            text = self._text_of(record)
        except Exception:  # noqa: BLE001 - a program may log anything; only this record is lost
            return
        try:
            if text is not None:
                ring.note(record.created, record.levelno, record.name, text)
        except Exception:
            self.ring = None
            logger.warning("crash kit: log records are no longer kept", exc_info=True)

    def _text_of(self, record: logging.LogRecord) -> str | None:
        try:
            # An earlier handler may have formatted the message.
            text = str(record.__dict__.get("message") or record.getMessage())
        except Exception:  # noqa: BLE001 - the other handlers report it
            text = str(record.msg)
        if text.startswith(_OF_REQUESTS):
            return None
        if any(part in text for part in _OF_BODIES):
            text = _BODY.sub(_LEFT_OUT, text)
        raised = record.exc_info[1] if record.exc_info else None
        if raised is not None:
            # If no other handler formatted the traceback, it is left out: formatting it reads source files.
            text += "\n" + (record.exc_text or "".join(traceback.format_exception_only(raised)))
        if not self.quotes:
            text = _without_words(text, raised if raised is not None else sys.exc_info()[1])
        text = _shorten(text, 2 * _SEARCHED, _SEARCHED)
        for secret in self.secrets:
            if secret in text:
                text = text.replace(secret, REDACTED)
        return _shorten(text, _ROOM, _ROOM // 4)


def _shorten(text: str, most: int, head: int) -> str:
    """Return `text`, or its head and its end, which has the innermost frames of a traceback, if it is too long."""
    return text if len(text) <= most else f"{text[:head]}{_GAP}{text[head + len(_GAP) - most :]}"


def _without_words(text: str, error: BaseException | None) -> str:
    for link in islice(chain_of(error), _MAX_CHAIN):
        said = [words for words in link.args if isinstance(words, str)]
        # Formatting a tensor would wait for the GPU.
        if all(isinstance(one, (str, int, float, bytes, type(None))) for one in link.args):
            with contextlib.suppress(Exception):
                said = [str(link), *said]
        for words in said:
            for form in (words, repr(words)[1:-1]):
                if len(form) >= _MIN_WORDS:
                    text = text.replace(form, REDACTED)
    return text


_handler: RingHandler | None = None


@never_raises
def keep_log_records(server_args: Any = None, *, of_all: bool) -> None:
    """Keep this process's last log records in memory that the crash handler also holds.

    Call it after each setup of logging, which removes all handlers. In a process of SGLang's own, keep the records
    `of_all` loggers; otherwise only those of SGLang's logger.
    """
    global _handler
    settings, held_by = Settings.from_environ(), handler_pid()
    loggers = list(_loggers(of_all=of_all))
    if not (settings.log_records and loggers):
        return
    if _handler is None or _handler.ring is None or _handler.held_by != held_by:
        forget()
        journaled = bool(getattr(server_args, "crash_dump_folder", None)) and settings.journal
        ring = held_memory("log", lambda: LogWriter(settings.log_records), "no log records are kept")
        if ring is None:
            return
        _handler = RingHandler(ring, held_by, set(), quotes=journaled and settings.prompts == "full")
    # A new set: another thread may be iterating over the earlier one.
    _handler.secrets = _handler.secrets | known_secrets(server_args)
    for each in loggers:
        if _handler not in each.handlers:
            each.addHandler(_handler)


def _loggers(*, of_all: bool) -> Iterator[logging.Logger]:
    root, own = logging.getLogger(), logging.getLogger("sglang")
    if of_all and root.handlers:
        yield root
        if own.propagate:
            return
    if own.hasHandlers():
        yield own


def forget() -> None:
    """Stop keeping log records, and free the ring's memory."""
    global _handler
    earlier, _handler = _handler, None
    if earlier is not None:
        for each in (logging.getLogger(), logging.getLogger("sglang")):
            each.removeHandler(earlier)
        # Another thread may be writing to it.
        with earlier.lock or contextlib.nullcontext():
            ring, earlier.ring = earlier.ring, None
        if ring is not None:
            ring.close()


def _leave_to_parent() -> None:
    """In a forked child, write no records: the ring is the parent's."""
    with contextlib.suppress(Exception):
        if _handler is not None:
            _handler.ring = None


os.register_at_fork(after_in_child=_leave_to_parent)
